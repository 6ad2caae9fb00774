"""Schemas of links to ports."""

from typing import Annotated, Final

from pydantic import Field

from mooring_client.schemas.base import Answer, Body, Timestamp

MAX_TTL_S: Final = 30 * 86_400


class PortLinkCreate(Body):
    """A request for a link. It acts as the credential of this request."""

    ttl_s: Annotated[int, Field(ge=10, le=MAX_TTL_S, description="how long the link works")] = 600


class CreatedPortLink(Answer):
    url: Annotated[str, Field(description="open it in a browser; anyone who has it can use it")]
    expires_at: Timestamp
