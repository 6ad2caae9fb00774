"""Builds assignments, containers and snapshots for tests of the agent, and a toy engine."""

import itertools
from dataclasses import replace
from typing import Any

from mooring.agent.decide.reconcile import (
    Action,
    Cancel,
    ReconcilePlan,
    Remove,
    Restart,
    Start,
    Stop,
    decide,
    key_of,
)
from mooring.agent.decide.snapshot import ActionKind, AgentSnapshot, Key, Work
from mooring.agent.runtime import Cancelled, Container, Progress, PullNeeded, Runtime, StartDelayed
from mooring.schemas.agent import Assignment, Removal

_numbers = itertools.count(1)


def assignment(
    *,
    instance_id: str | None = None,
    project_id: str = "prj_1",
    gpu_uuids: tuple[str, ...] = (),
    cpus: float = 1,
    **spec: Any,
) -> Assignment:
    """An assignment of a new instance, or of `instance_id`."""
    number = next(_numbers)
    return Assignment.model_validate(
        {
            "instance_id": instance_id or f"ins_{number}",
            "attempt": 1,
            "name": f"name-{number}",
            "project_id": project_id,
            "generation": 7,
            "want": "running",
            "may_start": True,
            "stop_timeout_s": 5,
            "spec": {"image": "mooring/test:1", "command": ["sleep", "1000"], **spec},
            "gpu_uuids": gpu_uuids,
            "cpus": cpus,
            "memory_mib": 64,
        }
    )


def wanted(
    instance_id: str = "a", attempt: int = 1, *, gpus: tuple[str, ...] = (), **changes: Any
) -> Assignment:
    spec = changes.pop("spec", {})
    made = assignment(instance_id=instance_id, gpu_uuids=gpus, **spec)
    return made.model_copy(update={"attempt": attempt, **changes})


def removal(instance_id: str = "a", attempt: int = 1) -> Removal:
    return Removal(instance_id=instance_id, attempt=attempt, stop_timeout_s=7)


def container(instance_id: str = "a", attempt: int = 1, status: str = "running", **more: Any) -> Container:
    more.setdefault("gpu_uuids", ())
    return Container(instance_id, attempt, f"c-{instance_id}-{attempt}", status, **more)


def exited(
    instance_id: str = "a",
    attempt: int = 1,
    *,
    exit_code: int | None = 1,
    at: str = "2026-11-21T08:00:05Z",
    **more: Any,
) -> Container:
    more.setdefault("started_at", "2026-11-21T08:00:00Z")
    return container(instance_id, attempt, "exited", exit_code=exit_code, finished_at=at, **more)


def snapshot(*items: Assignment | Removal | Container, **more: Any) -> AgentSnapshot:
    return AgentSnapshot(
        assignments={key_of(one): one for one in items if isinstance(one, Assignment)},
        removals={key_of(one): one for one in items if isinstance(one, Removal)},
        containers={key_of(one): one for one in items if isinstance(one, Container)},
        **more,
    )


def decided(*items: Assignment | Removal | Container, now: float = 100, **more: Any) -> ReconcilePlan:
    return decide(snapshot(*items, **more), now)


def pull_and_start(
    runtime: Runtime,
    given: Assignment,
    progress: Progress = lambda _reason: None,
    cancelled: Cancelled = lambda: False,
) -> Container | None:
    """Start a container as the agent does, but in one thread; pull the image if needed.

    Like the agent, try again while the registry is unavailable, but three times only and without a pause. A
    test's registry may not answer the engine in time on a busy machine.
    """
    for _ in range(2):
        try:
            return _try_start(runtime, given, progress, cancelled)
        except StartDelayed as delay:
            if delay.reason.code != "registry_unavailable":
                raise
    return _try_start(runtime, given, progress, cancelled)


def _try_start(
    runtime: Runtime, given: Assignment, progress: Progress, cancelled: Cancelled
) -> Container | None:
    try:
        return runtime.start(given, progress, cancelled)
    except PullNeeded:
        begin = runtime.pull(given, progress, cancelled)
        return begin() if begin else None


class ToyEngine:
    """Containers, and actions on them. Each action is in progress until the test finishes it."""

    def __init__(self, containers: dict[Key, Container]) -> None:
        self.containers = containers
        self.work: dict[Key, Work] = {}
        self.began: set[Key] = set()
        self.actions: dict[Key, Action] = {}

    def plan(self, before: AgentSnapshot, now: float) -> ReconcilePlan:
        state = {"containers": dict(self.containers), "work": dict(self.work), "began": set(self.began)}
        plan = decide(replace(before, **state), now)  # type: ignore[arg-type]
        for action in plan.actions:
            self._begin(action)
        return plan

    def finish(self, key: Key) -> None:
        """Finish the action on `key`, which then takes effect."""
        work, action = self.work.pop(key), self.actions.pop(key)
        if isinstance(action, Start) and not work.cancelled:
            self.began.add(key)
            self.containers[key] = container(*key, gpu_uuids=tuple(action.assignment.gpu_uuids))
        elif isinstance(action, Restart):
            self.containers[key] = replace(self.containers[key], status="running")
        elif isinstance(action, Stop):
            self.containers[key] = replace(
                self.containers[key], status="exited", exit_code=143, finished_at="2026-11-21T09:00:00Z"
            )
        elif isinstance(action, Remove):
            del self.containers[key]

    def _begin(self, action: Action) -> None:
        if isinstance(action, Cancel):
            self.work[action.key] = replace(self.work[action.key], cancelled=True)
            return
        target = action.assignment if isinstance(action, Start) else action.container
        key = key_of(target)
        assert key not in self.work, "one action at a time"
        self.work[key] = Work(ActionKind(type(action).__name__.lower()), tuple(target.gpu_uuids))
        self.actions[key] = action
