"""Schemas of SSH keys, and of what SSH clients need."""

from typing import Annotated, Final

from pydantic import ConfigDict, Field

from mooring_client.schemas.base import Answer, Body, RequestTime, Timestamp
from mooring_client.schemas.projects import DisplayName
from mooring_client.schemas.text import LongText, Text

# Long enough for a private key, so that its sender learns what is wrong.
PublicKey = Annotated[
    LongText, Field(max_length=16_384, description="the line of a `.pub` file: `ssh-ed25519 AAAA… comment`")
]
MAX_TTL_S: Final = 86_400


class SshKeyCreate(Body):
    """A new SSH key. It acts as the credential of this request."""

    model_config = ConfigDict(hide_input_in_errors=True)  # someone may send a private key

    name: DisplayName
    public_key: PublicKey
    project_id: Annotated[
        Text | None, Field(max_length=64, description="the only project to use it in; null: all of yours")
    ] = None
    expires_at: Annotated[RequestTime | None, Field(description="RFC 3339 with a zone; null: never")] = None


class SshKey(Answer):
    id: str
    name: str
    public_key: Annotated[str, Field(description="without its comment")]
    fingerprint: Annotated[str, Field(description="as `ssh-keygen -l` shows it")]
    api_key_id: Annotated[str | None, Field(description="the API key that registered it; null: a person")]
    user_id: Annotated[str | None, Field(description="the person who registered it; null: an API key")]
    project_id: Annotated[str | None, Field(description="the only project to use it in; null: all")]
    created_at: Timestamp
    expires_at: Timestamp | None
    last_used_at: Annotated[Timestamp | None, Field(description="rounded to the minute; null: never")]


class SshKeyList(Answer):
    items: list[SshKey]
    next_cursor: str | None


class SshCertificateCreate(Body):
    """A request for a certificate. It acts as the credential of this request."""

    model_config = ConfigDict(hide_input_in_errors=True)

    public_key: PublicKey
    ttl_s: Annotated[int, Field(ge=60, le=MAX_TTL_S, description="how long clients can log in with it")] = (
        3600
    )


class SshCertificate(Answer):
    certificate: Annotated[str, Field(description="the line of a `-cert.pub` file")]
    expires_at: Annotated[Timestamp, Field(description="at the latest when your API key expires")]


class SshAddress(Answer):
    """Where SSH clients connect, and how they recognize the gateway."""

    host: str
    port: int
    host_keys: Annotated[list[str], Field(description="public keys of the gateway")]
    known_hosts: Annotated[str, Field(description="lines for the client's `known_hosts` file")]
    websocket_url: Annotated[
        str | None,
        Field(description="a WebSocket for clients that cannot reach the port; null: the server knows none"),
    ]
