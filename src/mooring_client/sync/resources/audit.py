# Generated from aio/resources/audit.py: change that file, and run `make client`.
"""The audit log."""

from mooring_client.answers import model
from mooring_client.calls import Call
from mooring_client.schemas.audit import AuditEntry, AuditHead, AuditLog
from mooring_client.sync.paging import Pages
from mooring_client.sync.resources.base import Resource


class Audit(Resource):
    """The signed log of privileged actions: `client.audit`."""

    def list(
        self,
        *,
        project_id: str | None = None,
        action: str | None = None,
        actor_id: str | None = None,
        target_id: str | None = None,
        limit: int | None = None,
    ) -> Pages[AuditEntry]:
        """List entries, newest first."""
        return Pages(
            self._transport,
            Call(
                operation="list_audit_log",
                method="GET",
                path="/v1/audit-log",
                read=model(AuditLog),
                params={
                    "project_id": project_id,
                    "action": action,
                    "actor_id": actor_id,
                    "target_id": target_id,
                    "limit": limit,
                },
            ),
        )

    def head(self) -> AuditHead:
        """The newest signature over the whole log; keep it elsewhere, to detect a shortened log."""
        return self._transport.send(
            Call(
                operation="get_audit_head",
                method="GET",
                path="/v1/audit-log/head",
                read=model(AuditHead),
            )
        )
