"""What a node says about its instances: one sentence for each attempt it knows. Pure."""

from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace
from typing import Final

from mooring.agent.decide.reconcile import ENDED, Doing, Key, Restarts, Work, is_live, will_restart
from mooring.agent.runtime import Container
from mooring.core.instance import Phase, Reason
from mooring.schemas.agent import Assignment, ObservedInstance, Orphan, Removal

SIGKILLED: Final = 137
CREATING: Final = Reason(code="creating", message="The container is being created")
NEVER_BEGAN: Final = Reason(
    code="never_started",
    message="The container exists, its process never began, and it may not be tried again",
)


@dataclass(frozen=True, slots=True)
class Known:
    """What a report is made of."""

    containers: Mapping[Key, Container]
    assignments: Mapping[Key, Assignment] = field(default_factory=dict)
    removals: Mapping[Key, Removal] = field(default_factory=dict)
    work: Mapping[Key, Work] = field(default_factory=dict)
    progress: Mapping[Key, Reason] = field(default_factory=dict)
    waiting: Mapping[Key, Reason] = field(default_factory=dict)
    refusals: Mapping[Key, Reason] = field(default_factory=dict)
    restarts: Mapping[Key, Restarts] = field(default_factory=dict)
    unreleased: Mapping[Key, Container] = field(default_factory=dict)  # their cards are not free yet
    engine_ended: Set[Key] = frozenset()  # ended while the engine was away: its restart killed them
    expelled: Mapping[Key, Reason] = field(default_factory=dict)  # whom the agent itself killed, and why


def observed(known: Known) -> list[ObservedInstance]:
    """Everything but silence, which says that nothing is there."""
    starts = {key for key, work in known.work.items() if work.doing is Doing.START}
    keys = {*known.containers, *starts, *known.waiting, *known.refusals, *known.unreleased}
    return [_one(known, key, known.containers.get(key)) for key in sorted(keys)]


def orphans(known: Known, control_plane_id: str) -> list[Orphan]:
    """Containers of this control plane that it neither assigned nor told to remove."""
    return [
        Orphan(
            container_id=container.container_id,
            name=f"mooring-{container.instance_id}-{container.attempt}",
            instance_id=container.instance_id,
            control_plane_id=control_plane_id,
        )
        for key, container in sorted(known.containers.items())
        if key not in known.assignments and key not in known.removals
    ]


def _one(known: Known, key: Key, container: Container | None) -> ObservedInstance:
    work = known.work.get(key)
    if work is not None and work.doing is Doing.START:
        return _bare(key, Phase.STARTING, known.progress.get(key, CREATING))
    if key in known.unreleased:
        return _unreleased(known, key)
    if container is None:
        if key in known.refusals:
            return _bare(key, Phase.REFUSED, known.refusals[key])
        return _bare(key, Phase.STARTING, known.waiting[key])
    return _seen(known, key, container)


def _unreleased(known: Known, key: Key) -> ObservedInstance:
    """Whatever holds cards is told as if it ran: who hears of its end lets go of them."""
    if key in known.refusals:
        return _bare(key, Phase.STARTING, CREATING)
    return _full(replace(known.unreleased[key], status="running"), Phase.RUNNING, None)


def _seen(known: Known, key: Key, container: Container) -> ObservedInstance:
    assignment, work = known.assignments.get(key), known.work.get(key)
    if container.status == "created":
        if assignment is not None and assignment.want == "running" and not assignment.may_start:
            return _full(container, Phase.EXITED, NEVER_BEGAN)
        return _full(container, Phase.STARTING, known.waiting.get(key, CREATING))
    if is_live(container):
        return _full(container, Phase.RUNNING, None)
    if key in known.expelled:
        return _full(container, Phase.EXITED, known.expelled[key])
    if (work is not None and work.doing is Doing.RESTART) or will_restart(assignment, container):
        reason = known.waiting.get(key) or restarting(container, known.restarts.get(key))
        return _full(container, Phase.STARTING, reason)
    ended_by_us = key in known.removals or (assignment is not None and assignment.want == "stopped")
    return _full(container, Phase.EXITED, _why_ended(container, ended_by_us, key in known.engine_ended))


def restarting(container: Container, planned: Restarts | None) -> Reason:
    """Why an exited instance is `starting`: the message is the same until the next exit."""
    message = f"The process ended with exit code {container.exit_code}"
    if planned is not None:
        message += f"; restart {planned.tries + 1} follows {planned.pause_s} s after its end"
    return Reason(code="restarting", message=message)


def _why_ended(container: Container, ended_by_us: bool, engine_ended: bool) -> Reason | None:
    if container.oom_killed:
        return Reason(code="oom_killed", message="The process used more memory than memory_mib allows")
    if container.exit_code == 0 or ended_by_us:
        return None
    if engine_ended:
        message = "The container engine of the node was restarted and ended the container"
        return Reason(code="runtime_restarted", message=message)
    if container.exit_code == SIGKILLED:
        return Reason(code="killed", message="The process was killed (SIGKILL), not by Mooring")
    message = f"The process ended with exit code {container.exit_code}"
    return Reason(
        code="exited_nonzero", message=f"{message}: {container.error}" if container.error else message
    )


def _bare(key: Key, phase: Phase, reason: Reason) -> ObservedInstance:
    return ObservedInstance(instance_id=key[0], attempt=key[1], phase=phase, reason=reason)


def _full(container: Container, phase: Phase, reason: Reason | None) -> ObservedInstance:
    ended = container.status in ENDED
    return ObservedInstance(
        instance_id=container.instance_id,
        attempt=container.attempt,
        phase=phase,
        reason=reason,
        container_id=container.container_id,
        exit_code=container.exit_code if ended else None,
        started_at=container.started_at,
        finished_at=container.finished_at if ended else None,
        image_digest=container.image_digest,
        endpoints=list(container.endpoints),
    )
