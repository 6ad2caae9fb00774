"""What the node reports of its instances: the phase of each attempt, and the orphans. Pure."""

from dataclasses import replace
from typing import Final

from mooring.agent.decide.reconcile import ENDED, NO_CONTACT, is_live, will_restart
from mooring.agent.decide.snapshot import ActionKind, AgentSnapshot, Key, PlannedRestart
from mooring.agent.runtime import Container
from mooring.core.instance.state import Phase
from mooring.schemas.agent import ObservedInstance
from mooring_client.schemas.nodes import Orphan
from mooring_client.schemas.states import Reason

SIGKILLED: Final = 137
CREATING: Final = Reason(code="creating", message="The container is being created")
NEVER_BEGAN: Final = Reason(
    code="never_started",
    message="The container was created, but its process never started, and the start may not be retried",
)


def observed(snapshot: AgentSnapshot) -> list[ObservedInstance]:
    """Every attempt that is on the node, is being started, waits, was refused, or has unreleased GPUs."""
    starts = {key for key, work in snapshot.work.items() if work.kind is ActionKind.START}
    keys = {*snapshot.containers, *starts, *snapshot.waiting, *snapshot.refusals, *snapshot.unreleased}
    return [_observed(snapshot, key, snapshot.containers.get(key)) for key in sorted(keys)]


def orphans(snapshot: AgentSnapshot, control_plane_id: str) -> list[Orphan]:
    """Containers of this control plane that its answer neither assigns nor removes."""
    return [
        Orphan(
            container_id=container.container_id,
            name=f"mooring-{container.instance_id}-{container.attempt}",
            instance_id=container.instance_id,
            control_plane_id=control_plane_id,
            gpu_uuids=list(container.gpu_uuids) if is_live(container) else [],
        )
        for key, container in sorted(snapshot.containers.items())
        if key not in snapshot.assignments and key not in snapshot.removals
    ]


def _observed(snapshot: AgentSnapshot, key: Key, container: Container | None) -> ObservedInstance:
    work = snapshot.work.get(key)
    if work is not None and work.kind is ActionKind.START:
        return _without_container(key, Phase.STARTING, snapshot.progress.get(key, CREATING))
    if key in snapshot.unreleased:
        return _observed_unreleased(snapshot, key)
    if container is None:
        if key in snapshot.refusals:
            return _without_container(key, Phase.REFUSED, snapshot.refusals[key])
        return _without_container(key, Phase.STARTING, snapshot.waiting[key])
    return _observed_container(snapshot, key, container)


def _observed_unreleased(snapshot: AgentSnapshot, key: Key) -> ObservedInstance:
    """Reported as live until the GPUs are idle: until then they stay allocated."""
    if key in snapshot.refusals:
        return _without_container(key, Phase.STARTING, CREATING)
    return _with_container(replace(snapshot.unreleased[key], status="running"), Phase.RUNNING, None)


def _observed_container(snapshot: AgentSnapshot, key: Key, container: Container) -> ObservedInstance:
    assignment, work = snapshot.assignments.get(key), snapshot.work.get(key)
    if container.status == "created":
        if assignment is not None and assignment.want == "running" and not assignment.may_start:
            return _with_container(container, Phase.EXITED, NEVER_BEGAN)
        return _with_container(container, Phase.STARTING, snapshot.waiting.get(key, CREATING))
    if is_live(container):
        return _with_container(container, Phase.RUNNING, None)
    agents_reason = snapshot.kill_reasons.get(key) or (NO_CONTACT if key in snapshot.fenced else None)
    if agents_reason is not None:
        return _with_container(container, Phase.EXITED, agents_reason)
    if (work is not None and work.kind is ActionKind.RESTART) or will_restart(assignment, container):
        reason = snapshot.waiting.get(key) or restarting(container, snapshot.restarts.get(key))
        return _with_container(container, Phase.STARTING, reason)
    to_be_ended = key in snapshot.removals or (assignment is not None and assignment.want == "stopped")
    by_engine = key in snapshot.killed_by_engine
    return _with_container(container, Phase.EXITED, _end_reason(container, to_be_ended, by_engine))


def restarting(container: Container, planned: PlannedRestart | None) -> Reason:
    """Why an exited instance is `starting`. The message does not change until the next exit."""
    message = f"The process ended with exit code {container.exit_code}"
    if planned is not None:
        message += f"; restart {planned.tries + 1} follows {planned.pause_s} s after its end"
    return Reason(code="restarting", message=message)


def _end_reason(container: Container, to_be_ended: bool, killed_by_engine: bool) -> Reason | None:
    """Why the process ended; None: it succeeded, or Mooring was to end it."""
    if container.oom_killed:
        return Reason(code="oom_killed", message="The process used more memory than memory_mib allows")
    if container.exit_code == 0 or to_be_ended:
        return None
    if killed_by_engine:
        message = "The node's container engine restarted, which ended the container"
        return Reason(code="runtime_restarted", message=message)
    if container.exit_code == SIGKILLED:
        return Reason(code="killed", message="The process was killed (SIGKILL), not by Mooring")
    message = f"The process ended with exit code {container.exit_code}"
    return Reason(
        code="exited_nonzero", message=f"{message}: {container.error}" if container.error else message
    )


def _without_container(key: Key, phase: Phase, reason: Reason) -> ObservedInstance:
    return ObservedInstance(instance_id=key[0], attempt=key[1], phase=phase, reason=reason)


def _with_container(container: Container, phase: Phase, reason: Reason | None) -> ObservedInstance:
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
