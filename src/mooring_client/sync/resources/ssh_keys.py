# Generated from aio/resources/ssh_keys.py: change that file, and run `make client`.
"""SSH keys and certificates."""

from datetime import datetime

from mooring_client.answers import model, nothing
from mooring_client.calls import Call, body, path
from mooring_client.schemas.ssh_keys import SshCertificate, SshKey, SshKeyList
from mooring_client.sync.paging import Pages
from mooring_client.sync.resources.base import Resource


class SshKeys(Resource):
    """SSH keys and certificates: `client.ssh_keys`."""

    def create(
        self,
        name: str,
        public_key: str,
        *,
        project_id: str | None = None,
        expires_at: datetime | str | None = None,
    ) -> SshKey:
        """Register a public key. It acts as the API key of this client.

        Args:
            public_key: the line of a `.pub` file.
        """
        return self._transport.send(
            Call(
                operation="create_ssh_key",
                method="POST",
                path="/v1/ssh-keys",
                read=model(SshKey),
                body=body(name=name, public_key=public_key, project_id=project_id, expires_at=expires_at),
            )
        )

    def list(self, *, project_id: str | None = None, limit: int | None = None) -> Pages[SshKey]:
        """List SSH keys, newest first."""
        return Pages(
            self._transport,
            Call(
                operation="list_ssh_keys",
                method="GET",
                path="/v1/ssh-keys",
                read=model(SshKeyList),
                params={"project_id": project_id, "limit": limit},
            ),
        )

    def get(self, key_id: str) -> SshKey:
        """Get an SSH key."""
        return self._transport.send(
            Call(
                operation="get_ssh_key",
                method="GET",
                path=path("/v1/ssh-keys/{}", key_id),
                read=model(SshKey),
            )
        )

    def delete(self, key_id: str) -> None:
        """Remove an SSH key. Its open connections end too."""
        return self._transport.send(
            Call(
                operation="delete_ssh_key",
                method="DELETE",
                path=path("/v1/ssh-keys/{}", key_id),
                read=nothing,
            )
        )

    def certify(self, public_key: str, *, ttl_s: int | None = None) -> SshCertificate:
        """Sign a short-lived certificate for a public key.

        Args:
            ttl_s: how long clients can log in with it; None: 3600.
        """
        return self._transport.send(
            Call(
                operation="create_ssh_certificate",
                method="POST",
                path="/v1/ssh-certificates",
                read=model(SshCertificate),
                body=body(public_key=public_key, ttl_s=ttl_s),
            )
        )
