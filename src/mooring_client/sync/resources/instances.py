# Generated from aio/resources/instances.py: change that file, and run `make client`.
"""Instances: create, change, delete and start them, and wait for them."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Unpack

from mooring_client.answers import model
from mooring_client.calls import UNSET, Call, Unset, body, changes, if_match, path
from mooring_client.errors import MooringError, NotFound
from mooring_client.failures import ConnectionFailed, WaitTimeout
from mooring_client.fields import InstanceFields, spec_of
from mooring_client.reconnecting import Reconnecting
from mooring_client.schemas.events import Event, InstanceEvents
from mooring_client.schemas.gpus import Sample
from mooring_client.schemas.instances import (
    DryRun,
    ExecResult,
    Explanation,
    Instance,
    InstanceList,
    MetricsList,
    WaitResult,
    WaitState,
)
from mooring_client.schemas.port_links import CreatedPortLink
from mooring_client.sync.paging import Pages
from mooring_client.sync.resources.instance_applies import InstanceApplies
from mooring_client.sync.resources.instance_streams import InstanceStreams
from mooring_client.sync.sleeping import sleep

# The server answers a wait after this time at the latest, so that proxies do not close the connection.
_LONGEST_POLL_S = 30


class Instances(InstanceApplies, InstanceStreams):
    """Containers with GPUs: `client.instances`."""

    def create(self, image: str, **fields: Unpack[InstanceFields]) -> Instance:
        """Create an instance. It is `pending` until it is placed; `wait` waits until it runs."""
        return self._transport.send(
            Call(
                operation="create_instance",
                method="POST",
                path="/v1/instances",
                read=model(Instance),
                body=body(image=image, **spec_of(fields)),
            )
        )

    def dry_run(self, image: str, **fields: Unpack[InstanceFields]) -> DryRun:
        """Whether and where such an instance could start now. It creates nothing."""
        return self._transport.send(
            Call(
                operation="create_instance",
                method="POST",
                path="/v1/instances",
                read=model(DryRun),
                params={"dry_run": True},
                body=body(image=image, **spec_of(fields)),
            )
        )

    def list(
        self,
        *,
        state: str | None = None,
        name: str | None = None,
        node_id: str | None = None,
        project_id: str | None = None,
        label: str | None = None,
        limit: int | None = None,
    ) -> Pages[Instance]:
        """List instances, newest first.

        Args:
            label: `key:value`.
            limit: the size of a page, at most 200.
        """
        return Pages(
            self._transport,
            Call(
                operation="list_instances",
                method="GET",
                path="/v1/instances",
                read=model(InstanceList),
                params={
                    "state": state,
                    "name": name,
                    "node_id": node_id,
                    "project_id": project_id,
                    "label": label,
                    "limit": limit,
                },
            ),
        )

    def get(self, instance_id: str) -> Instance:
        """Get an instance."""
        return self._transport.send(
            Call(
                operation="get_instance",
                method="GET",
                path=path("/v1/instances/{}", instance_id),
                read=model(Instance),
            )
        )

    def update(
        self,
        instance_id: str,
        *,
        name: str | Unset = UNSET,
        labels: Mapping[str, str] | Unset = UNSET,
        max_duration_s: int | Unset | None = UNSET,
        priority: int | Unset = UNSET,
        version: int | None = None,
    ) -> Instance:
        """Change an instance.

        Args:
            max_duration_s: from its start; None: no limit.
            version: change it only if it still has this version (PreconditionFailed).
        """
        return self._transport.send(
            Call(
                operation="update_instance",
                method="PATCH",
                path=path("/v1/instances/{}", instance_id),
                read=model(Instance),
                body=changes(name=name, labels=labels, max_duration_s=max_duration_s, priority=priority),
                headers=if_match(version),
            )
        )

    def delete(self, instance_id: str, *, version: int | None = None) -> Instance:
        """Stop an instance and delete it with its container. It is gone (NotFound) once that is done.

        Args:
            version: delete it only if it still has this version (PreconditionFailed).
        """
        return self._transport.send(
            Call(
                operation="delete_instance",
                method="DELETE",
                path=path("/v1/instances/{}", instance_id),
                read=model(Instance),
                headers=if_match(version),
            )
        )

    def stop(self, instance_id: str, *, timeout_s: int | None = None) -> Instance:
        """Stop an instance. Its GPUs are free once it is `stopped`.

        Args:
            timeout_s: from SIGTERM to SIGKILL; None: 10.
        """
        return self._transport.send(
            Call(
                operation="stop_instance",
                method="POST",
                path=path("/v1/instances/{}/stop", instance_id),
                read=model(Instance),
                body=body(timeout_s=timeout_s),
            )
        )

    def start(self, instance_id: str) -> Instance:
        """Start an ended instance again, with a new container: it is queued like a new one."""
        return self._transport.send(
            Call(
                operation="start_instance",
                method="POST",
                path=path("/v1/instances/{}/start", instance_id),
                read=model(Instance),
            )
        )

    def restart(self, instance_id: str) -> Instance:
        """Restart an instance with a new container on the same GPUs."""
        return self._transport.send(
            Call(
                operation="restart_instance",
                method="POST",
                path=path("/v1/instances/{}/restart", instance_id),
                read=model(Instance),
            )
        )

    def poll(
        self, instance_id: str, *, state: WaitState = "running", timeout_s: float | None = None
    ) -> WaitResult:
        """Wait up to 60 s in one request; `wait` has no such limit."""
        return self._transport.send(
            Call(
                operation="wait_for_instance",
                method="GET",
                path=path("/v1/instances/{}/wait", instance_id),
                read=model(WaitResult),
                params={"state": state, "timeout_s": timeout_s},
                extra_s=timeout_s or 30,
            )
        )

    def wait(
        self, instance_id: str, state: WaitState = "running", timeout_s: float | None = None
    ) -> Instance:
        """Wait until an instance has a state, and return it.

        Args:
            timeout_s: None: as long as it takes.

        Raises:
            WaitTimeout: it did not reach the state in time, or it can no longer reach it.
            ConnectionFailed: the server could not be reached for longer than the client's `reconnect_s`.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        reconnecting = Reconnecting(self._transport.reconnect_s)
        while True:
            left = _LONGEST_POLL_S if deadline is None else deadline - time.monotonic()
            try:
                result = self.poll(instance_id, state=state, timeout_s=min(max(left, 1), _LONGEST_POLL_S))
            except (MooringError, ConnectionFailed) as failure:
                if deadline is not None and time.monotonic() >= deadline:
                    raise
                sleep(reconnecting.pause_after(failure))
                continue
            reconnecting.connected()
            if result.reached:
                return result.instance
            found = result.instance
            if found.state in {"stopped", "succeeded", "failed", "deleted"} and found.state != state:
                raise WaitTimeout(f"{found.name} is {found.state} and will not be {state}: {_why(found)}")
            if deadline is not None and time.monotonic() >= deadline:
                raise WaitTimeout(f"{found.name} is still {found.state}: {_why(found)}")

    @contextmanager
    def temporary(self, image: str, **fields: Unpack[InstanceFields]) -> Iterator[Instance]:
        """Create an instance, wait until it runs, and delete it at the end of the block, also on errors."""
        created = self.create(image, **fields)
        try:
            yield self.wait(created.id)
        finally:
            with suppress(NotFound):
                self.delete(created.id)

    def explain(self, instance_id: str) -> Explanation:
        """Why an instance waits, when it will start, and which changed request would start now."""
        return self._transport.send(
            Call(
                operation="explain_instance",
                method="GET",
                path=path("/v1/instances/{}/explain", instance_id),
                read=model(Explanation),
            )
        )

    def metrics(self, instance_id: str) -> Sequence[Sample]:
        """Read the live samples of an instance's GPUs."""
        answer = self._transport.send(
            Call(
                operation="get_instance_metrics",
                method="GET",
                path=path("/v1/instances/{}/metrics", instance_id),
                read=model(MetricsList),
            )
        )
        return answer.items

    def history(
        self, instance_id: str, *, after: int | None = None, limit: int | None = None
    ) -> Sequence[Event]:
        """The events of one instance, oldest first.

        Args:
            after: only events after this `seq`.
        """
        answer = self._transport.send(
            Call(
                operation="list_instance_events",
                method="GET",
                path=path("/v1/instances/{}/events", instance_id),
                read=model(InstanceEvents),
                params={"after": after, "limit": limit},
            )
        )
        return answer.items

    def exec(self, instance_id: str, command: Sequence[str], *, timeout_s: int | None = None) -> ExecResult:
        """Run a command in the container and return its output, up to 1 MiB; `exec_stream` has no limit.

        Args:
            timeout_s: until the command is killed; None: 30.
        """
        return self._transport.send(
            Call(
                operation="exec_in_instance",
                method="POST",
                path=path("/v1/instances/{}/exec", instance_id),
                read=model(ExecResult),
                body=body(command=list(command), timeout_s=timeout_s),
                extra_s=timeout_s or 30,
            )
        )

    def link(self, instance_id: str, port: int, *, ttl_s: int | None = None) -> CreatedPortLink:
        """Create a link that opens a port of the container in a browser."""
        return self._transport.send(
            Call(
                operation="create_port_link",
                method="POST",
                path=path("/v1/instances/{}/ports/{}/links", instance_id, port),
                read=model(CreatedPortLink),
                body=body(ttl_s=ttl_s),
            )
        )


def _why(instance: Instance) -> str:
    return instance.reason.message if instance.reason else "no reason is known"
