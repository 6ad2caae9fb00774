"""What an instance has of a node's GPUs, and who may have the same card at the same time. Pure."""

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Literal, Protocol

from mooring.schemas.agent import Assignment

# Who has MIG devices of a card has the card together with all who have others of it, of any project.
_MIG: Final = "mig"

Claims = Mapping[str, str | None]


@dataclass(frozen=True, slots=True)
class Share:
    """A part of one card; other instances of the same project may have the rest."""

    isolation: Literal["mps", "shared"]
    milli: int
    memory_mib: int
    project_id: str


@dataclass(frozen=True, slots=True)
class Devices:
    gpu_uuids: tuple[str, ...] = ()  # of whole cards, of the shared one, or of MIG devices
    cards: tuple[str, ...] = ()  # of MIG devices, in the same order: the cards they are on
    share: Share | None = None


class DeviceHolder(Protocol):
    """Whatever has devices, or is about to have or to let go of them."""

    @property
    def gpu_uuids(self) -> tuple[str, ...]: ...

    @property
    def cards(self) -> tuple[str, ...]: ...

    @property
    def share(self) -> Share | None: ...


def devices_of(assignment: Assignment) -> Devices:
    """An older control plane sends no grants: whole cards."""
    grants = assignment.grants
    if not grants:
        return Devices(tuple(assignment.gpu_uuids))
    if any(grant.mig_uuid for grant in grants):
        return Devices(
            tuple(grant.mig_uuid or grant.gpu_uuid for grant in grants),
            tuple(grant.gpu_uuid for grant in grants),
        )
    return Devices(tuple(grant.gpu_uuid for grant in grants), share=_share(assignment))


def _share(assignment: Assignment) -> Share | None:
    if assignment.isolation not in {"mps", "shared"} or len(assignment.grants) != 1:
        return None
    [grant] = assignment.grants
    return Share(
        "mps" if assignment.isolation == "mps" else "shared",
        grant.milli,
        grant.memory_mib,
        assignment.project_id,
    )


def claims(holder: DeviceHolder) -> Claims:
    """UUID -> with whom it may be had: null nobody, else those whose claim says the same."""
    company = holder.share.project_id if holder.share else None
    return {**dict.fromkeys(holder.cards, _MIG), **dict.fromkeys(holder.gpu_uuids, company)}


class Had:
    """Who has which cards and MIG devices, and with whom they may be had."""

    def __init__(self) -> None:
        self._claims: dict[str, list[tuple[Hashable, str | None]]] = {}

    def note(self, key: Hashable, holder: DeviceHolder) -> None:
        for uuid, claim in claims(holder).items():
            self._claims.setdefault(uuid, []).append((key, claim))

    def in_the_way(self, key: Hashable, wanted: DeviceHolder) -> str | None:
        """What of this somebody else has who does not share it."""
        for uuid, claim in claims(wanted).items():
            for other, theirs in self._claims.get(uuid, ()):
                if other != key and (claim is None or claim != theirs):
                    return uuid
        return None


def card_of(holder: DeviceHolder, uuid: str) -> str:
    """The card that one of its devices is, or is on."""
    return dict(zip(holder.gpu_uuids, holder.cards, strict=False)).get(uuid, uuid)


def all_claimed(holders: Iterable[DeviceHolder]) -> set[str]:
    return {uuid for holder in holders for uuid in claims(holder)}
