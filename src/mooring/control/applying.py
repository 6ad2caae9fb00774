"""Applying: a request with all fields of a resource, which is created, changed or left as it is.

The request is compared with what is stored, both in the form of the API with all defaults filled in. So a
request that asks for what there is changes nothing, however it is written.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

from mooring.core.json_differences import JsonDifference
from mooring_client.errors import BeingDeleted, Conflict, PreconditionFailed, RequiresReplacement

Row = TypeVar("Row")


class ApplyOutcome(StrEnum):
    CREATED = "created"
    CHANGED = "changed"
    UNCHANGED = "unchanged"
    REQUIRES_REPLACEMENT = "requires_replacement"


@dataclass(frozen=True, slots=True)
class ApplyResult(Generic[Row]):
    """The result of a request. With REQUIRES_REPLACEMENT, nothing was written.

    Attributes:
        fixed: pointers to the differing fields that cannot be changed.
    """

    row: Row
    outcome: ApplyOutcome
    differences: tuple[JsonDifference, ...] = ()
    fixed: tuple[str, ...] = ()

    @property
    def has_written(self) -> bool:
        return self.outcome in {ApplyOutcome.CREATED, ApplyOutcome.CHANGED}


def created(row: Row) -> ApplyResult[Row]:
    return ApplyResult(row, ApplyOutcome.CREATED)


def compared(
    row: Row, found: tuple[JsonDifference, ...], changeable: Collection[str] = ()
) -> ApplyResult[Row]:
    """What the differences between a row and a request lead to: CHANGED is then up to the caller.

    Args:
        changeable: the fields that can be changed.
    """
    if not found:
        return ApplyResult(row, ApplyOutcome.UNCHANGED)
    if fixed := tuple(each.pointer for each in found if each.field not in changeable):
        return ApplyResult(row, ApplyOutcome.REQUIRES_REPLACEMENT, found, fixed)
    return ApplyResult(row, ApplyOutcome.CHANGED, found)


def requires_replacement(noun: str, resource_id: str, fixed: Iterable[str]) -> RequiresReplacement:
    pointers = list(fixed)
    return RequiresReplacement(
        f"{', '.join(pointers)} cannot be changed; delete the {noun} {resource_id} and apply it again",
        id=resource_id,
        pointers=pointers,
    )


def being_deleted(noun: str, resource_id: str) -> BeingDeleted:
    return BeingDeleted(
        f"the {noun} {resource_id} is being deleted; repeat this once it is gone", id=resource_id
    )


def changed_meanwhile(noun: str, name: str) -> Conflict:
    """The error after which the whole transaction is repeated, since what it has read is outdated."""
    return Conflict(f"the {noun} {name} was changed at the same time; try again")


def require_no_version(noun: str, name: str, if_match: int | None) -> None:
    """Raises PreconditionFailed: `If-Match` is given, and there is nothing of this name to match."""
    if if_match is not None:
        raise PreconditionFailed(f"there is no {noun} {name}, so it has no version", version=None)
