"""The output of a scheduling cycle."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from mooring.scheduler.model import Eviction, Forecast, Placement, Unplaced
from mooring.scheduler.queue_order import QueueOrder
from mooring.scheduler.units import Age


@dataclass(frozen=True, slots=True)
class Waiting:
    """Instances that wait for the same reason."""

    queued: tuple[
        Age, ...
    ]  # since when, and the instance; the same object in the next plan, if they are the same
    why: Unplaced  # its `instance_id` is empty

    @property
    def instance_ids(self) -> list[str]:
        return [instance_id for _since, instance_id in self.queued]


@dataclass(frozen=True)
class SchedulingPlan:
    """What is derived is computed when it is first read: thousands of instances may wait."""

    placements: tuple[Placement, ...]
    waiting: tuple[Waiting, ...]
    evictions: tuple[Eviction, ...] = ()
    forecasts: tuple[Forecast, ...] = ()
    queue: QueueOrder = field(default_factory=QueueOrder)  # before the placements
    with_slots: tuple[str, ...] = ()  # instances whose slot moves them forward in the next cycle's queue

    def why(self, instance_id: str) -> Unplaced | None:
        """Why the instance waits; None: it is placed, or was not considered."""
        found = next((each.why for each in self.waiting if instance_id in each.instance_ids), None)
        return None if found is None else replace(found, instance_id=instance_id)

    @cached_property
    def order(self) -> tuple[str, ...]:
        """The instances of `waiting`, in the order of the queue."""
        waiting = {instance_id for each in self.waiting for instance_id in each.instance_ids}
        return tuple(instance_id for instance_id in self.queue.instance_ids if instance_id in waiting)

    @cached_property
    def position_of(self) -> Mapping[str, int]:
        return {instance_id: place for place, instance_id in enumerate(self.order, 1)}

    @property
    def positions(self) -> Mapping[str, int]:
        """Positions in `order`, from 1."""
        return _Positions(self)

    @cached_property
    def unplaced(self) -> tuple[Unplaced, ...]:
        """Why each of `order` waits."""
        why = {instance_id: each.why for each in self.waiting for instance_id in each.instance_ids}
        return tuple(replace(why[instance_id], instance_id=instance_id) for instance_id in self.order)


class _Positions(Mapping[str, int]):
    """Computed when the first one is read: most requests show no pending instance."""

    def __init__(self, plan: SchedulingPlan) -> None:
        self._plan = plan

    def __getitem__(self, instance_id: str) -> int:
        return self._plan.position_of[instance_id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._plan.position_of)

    def __len__(self) -> int:
        return len(self._plan.position_of)
