"""The GPUs and MIG devices that an instance claims, and which claims exclude each other. Pure."""

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Literal, Protocol

from mooring.schemas.agent import Assignment

# The sharing key of a GPU that is claimed for its MIG devices: instances of any project share it.
_MIG_KEY: Final = "mig"

Claims = Mapping[str, str | None]


@dataclass(frozen=True, slots=True)
class Share:
    """A part of one GPU; other instances of the same project may have the rest."""

    isolation: Literal["mps", "shared"]
    milli: int
    memory_mib: int
    project_id: str


@dataclass(frozen=True, slots=True)
class Devices:
    gpu_uuids: tuple[str, ...] = ()  # of whole GPUs, of the shared GPU, or of MIG devices
    parent_gpus: tuple[str, ...] = ()  # the GPUs of the MIG devices, in the same order
    share: Share | None = None


class HasDevices(Protocol):
    """Anything that has devices, is about to get them, or is releasing them."""

    @property
    def gpu_uuids(self) -> tuple[str, ...]: ...

    @property
    def parent_gpus(self) -> tuple[str, ...]: ...

    @property
    def share(self) -> Share | None: ...


def devices_of(assignment: Assignment) -> Devices:
    """The devices of an assignment. Without grants (an older control plane): whole GPUs."""
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


def claims(owner: HasDevices) -> Claims:
    """UUID -> sharing key: claims with the same key can coexist; None excludes all others."""
    sharing_key = owner.share.project_id if owner.share else None
    return {**dict.fromkeys(owner.parent_gpus, _MIG_KEY), **dict.fromkeys(owner.gpu_uuids, sharing_key)}


class ClaimTable:
    """Who claims each GPU and MIG device, and with which sharing key."""

    def __init__(self) -> None:
        self._claims: dict[str, list[tuple[Hashable, str | None]]] = {}

    def add(self, claimant: Hashable, owner: HasDevices) -> None:
        for uuid, sharing_key in claims(owner).items():
            self._claims.setdefault(uuid, []).append((claimant, sharing_key))

    def conflict(self, claimant: Hashable, wanted: HasDevices) -> str | None:
        """The first wanted UUID on which another claimant has a claim that excludes this one."""
        for uuid, sharing_key in claims(wanted).items():
            for other, other_key in self._claims.get(uuid, ()):
                if other != claimant and (sharing_key is None or sharing_key != other_key):
                    return uuid
        return None


def physical_gpu(owner: HasDevices, uuid: str) -> str:
    """The UUID of the physical GPU: the parent of a MIG device, else the device's own."""
    return dict(zip(owner.gpu_uuids, owner.parent_gpus, strict=False)).get(uuid, uuid)


def claimed_uuids(owners: Iterable[HasDevices]) -> set[str]:
    return {uuid for owner in owners for uuid in claims(owner)}
