# Generated from aio/resources/reservations.py: change that file, and run `make client`.
"""Reservations: GPUs reserved for a project for a period."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from mooring_client.answers import model, nothing
from mooring_client.calls import UNSET, AppliedResource, Call, Unset, body, changes, if_match, path
from mooring_client.schemas.applying import ApplyPlan
from mooring_client.schemas.reservations import Reservation, ReservationList, ReservedGpus
from mooring_client.sync.paging import Pages
from mooring_client.sync.resources.base import Resource


class Reservations(Resource):
    """GPUs reserved for a project for a period: `client.reservations`."""

    def create(
        self,
        name: str,
        *,
        gpus: ReservedGpus | Mapping[str, Any],
        to_at: datetime | str,
        from_at: datetime | str | None = None,
        project_id: str | None = None,
    ) -> Reservation:
        """Reserve GPUs. During the period, only the project's instances run on them.

        Args:
            from_at: None: now.
        """
        return self._transport.send(
            Call(
                operation="create_reservation",
                method="POST",
                path="/v1/reservations",
                read=model(Reservation),
                body=body(
                    **{"name": name, "gpus": gpus, "to": to_at, "from": from_at, "project_id": project_id}
                ),
            )
        )

    def apply(
        self,
        name: str,
        *,
        gpus: ReservedGpus | Mapping[str, Any],
        to_at: datetime | str,
        from_at: datetime | str | None = None,
        project_id: str | None = None,
        version: int | None = None,
    ) -> AppliedResource[Reservation]:
        """Create the reservation of this name, or change its period.

        Args:
            from_at: None: now; of a reservation that has begun, its start.
            version: only if the reservation has this version (PreconditionFailed).

        Raises:
            RequiresReplacement: `gpus` differs, which cannot be changed. Nothing was changed.
        """
        return self._transport.apply(
            Call(
                operation="apply_reservation",
                method="PUT",
                path=path("/v1/reservations/by-name/{}", name),
                read=model(Reservation),
                body=body(**{"gpus": gpus, "to": to_at, "from": from_at, "project_id": project_id}),
                headers=if_match(version),
            )
        )

    def plan(
        self,
        name: str,
        *,
        gpus: ReservedGpus | Mapping[str, Any],
        to_at: datetime | str,
        from_at: datetime | str | None = None,
        project_id: str | None = None,
        version: int | None = None,
    ) -> ApplyPlan:
        """What `apply` would do with these arguments. It changes nothing, and raises what `apply` would."""
        return self._transport.send(
            Call(
                operation="apply_reservation",
                method="PUT",
                path=path("/v1/reservations/by-name/{}", name),
                read=model(ApplyPlan),
                params={"dry_run": True},
                body=body(**{"gpus": gpus, "to": to_at, "from": from_at, "project_id": project_id}),
                headers=if_match(version),
            )
        )

    def list(self, *, project_id: str | None = None, limit: int | None = None) -> Pages[Reservation]:
        """List reservations, newest first."""
        return Pages(
            self._transport,
            Call(
                operation="list_reservations",
                method="GET",
                path="/v1/reservations",
                read=model(ReservationList),
                params={"project_id": project_id, "limit": limit},
            ),
        )

    def get(self, reservation_id: str) -> Reservation:
        """Get a reservation."""
        return self._transport.send(
            Call(
                operation="get_reservation",
                method="GET",
                path=path("/v1/reservations/{}", reservation_id),
                read=model(Reservation),
            )
        )

    def update(
        self,
        reservation_id: str,
        *,
        name: str | Unset = UNSET,
        from_at: datetime | str | Unset = UNSET,
        to_at: datetime | str | Unset = UNSET,
        version: int | None = None,
    ) -> Reservation:
        """Change a reservation.

        Args:
            version: change it only if it still has this version (PreconditionFailed).
        """
        return self._transport.send(
            Call(
                operation="update_reservation",
                method="PATCH",
                path=path("/v1/reservations/{}", reservation_id),
                read=model(Reservation),
                body=changes(**{"name": name, "from": from_at, "to": to_at}),
                headers=if_match(version),
            )
        )

    def delete(self, reservation_id: str, *, version: int | None = None) -> None:
        """End a reservation and delete it; its GPUs are free for all.

        Args:
            version: delete it only if it still has this version (PreconditionFailed).
        """
        return self._transport.send(
            Call(
                operation="delete_reservation",
                method="DELETE",
                path=path("/v1/reservations/{}", reservation_id),
                read=nothing,
                headers=if_match(version),
            )
        )
