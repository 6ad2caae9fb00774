# Generated from aio/resources/instance_streams.py: change that file, and run `make client`.
"""Streams of instances: logs, commands with input, and connections to ports."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Literal, overload

from mooring_client.answers import nothing, read_object, text
from mooring_client.calls import Call, path
from mooring_client.schemas.logs import LogLine
from mooring_client.stream_messages import SUBPROTOCOL
from mooring_client.sync.following import followed
from mooring_client.sync.forwarding import Report, forwarded
from mooring_client.sync.resources.base import Resource
from mooring_client.sync.streams import Command, PortConnection, connected, opened


class InstanceStreams(Resource):
    """The streams of `client.instances`."""

    @overload
    def logs(
        self,
        instance_id: str,
        *,
        tail: int | None = None,
        since: datetime | str | None = None,
        follow: Literal[False] = False,
    ) -> str: ...

    @overload
    def logs(
        self,
        instance_id: str,
        *,
        tail: int | None = None,
        since: datetime | str | None = None,
        follow: Literal[True],
    ) -> Iterator[LogLine]: ...

    def logs(
        self,
        instance_id: str,
        *,
        tail: int | None = None,
        since: datetime | str | None = None,
        follow: bool = False,
    ) -> str | Iterator[LogLine]:
        """The last lines of an instance's output as one text, also after it has ended.

        Args:
            tail: number of lines; None: 100.
            since: only lines from this time on.
            follow: yield lines until the container ends: each once, in order, also after a lost connection.
        """
        call = _logs(instance_id, tail, since, follow=follow)
        return self._followed(call) if follow else self._transport.send(call)

    def _followed(self, call: Call[str]) -> Iterator[LogLine]:
        for data in followed(self._transport, call, None, ends=True):
            yield read_object(LogLine, data)

    @contextmanager
    def exec_stream(
        self,
        instance_id: str,
        command: Sequence[str],
        *,
        tty: bool = False,
        stdin: bool = False,
        user: str | None = None,
        working_dir: str | None = None,
        env: Mapping[str, str] | None = None,
        width: int | None = None,
        height: int | None = None,
    ) -> Iterator[Command]:
        """Run a command in the container, with its input and output. It is killed at the end of the block.

        Args:
            tty: run it in a terminal, of `width` x `height` characters.
            stdin: open its input; otherwise it is empty.
            user: name or uid, and `:group`.
        """
        call = Call(
            operation="stream_exec_in_instance",
            method="GET",
            path=path("/v1/instances/{}/exec/stream", instance_id),
            read=nothing,
            params={
                "command": list(command),
                "tty": tty,
                "stdin": stdin,
                "user": user,
                "working_dir": working_dir,
                "env": [f"{name}={value}" for name, value in (env or {}).items()],
                "width": width,
                "height": height,
            },
        )
        with opened(self._transport, call, SUBPROTOCOL) as websocket:
            yield Command(websocket)

    @contextmanager
    def attach(
        self, instance_id: str, *, stdin: bool = False, width: int | None = None, height: int | None = None
    ) -> Iterator[Command]:
        """Attach to an instance's own command. It continues after the block.

        Args:
            stdin: write its input too; the instance needs `stdin`.
        """
        call = Call(
            operation="stream_attach_to_instance",
            method="GET",
            path=path("/v1/instances/{}/attach/stream", instance_id),
            read=nothing,
            params={"stdin": stdin, "width": width, "height": height},
        )
        with opened(self._transport, call, SUBPROTOCOL) as websocket:
            yield Command(websocket)

    @contextmanager
    def connect(self, instance_id: str, port: int) -> Iterator[PortConnection]:
        """Open a TCP connection to a port of the container, which need not be published."""
        with connected(self._transport, instance_id, port) as connection:
            yield connection

    @contextmanager
    def forward(
        self,
        instance_id: str,
        port: int,
        *,
        local_port: int = 0,
        local_host: str = "127.0.0.1",
        report: Report | None = None,
    ) -> Iterator[int]:
        """Forward a local port to a port of the container within the block; yield the local port.

        Args:
            local_port: 0: any free one.
            report: called with the failure of a single connection.
        """
        with forwarded(self._transport, instance_id, port, local_host, local_port, report) as listening:
            yield listening


def _logs(instance_id: str, tail: int | None, since: datetime | str | None, *, follow: bool) -> Call[str]:
    return Call(
        operation="get_instance_logs",
        method="GET",
        path=path("/v1/instances/{}/logs", instance_id),
        read=text,
        params={"tail": tail, "since": since, "follow": follow},
    )
