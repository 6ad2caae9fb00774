"""Thousands of nodes in one process: they speak the agents' protocol with little CPU, and run nothing.

Each node joins, opens a session, reports, and keeps its two calls open, as an agent does. An instance that it
should run is reported as running at once. Bodies are made once for each node, so the process needs a tenth
of the CPU of an agent.
"""

import asyncio
import json
import multiprocessing
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any
from urllib.parse import urlsplit

from tests.testbed.waiting import wait_until

from mooring.agent.gpus.telemetry import Machine, Telemetry, node_facts
from mooring.agent.simulated.gpus import SimulatedGpuReader
from mooring.agent.simulated.runtime import SimulatedRuntime
from mooring.schemas.agent import SyncRequest

JOINING = 4
STREAMS_WAIT_S = 45.0
WITHIN_S = 20.0


class WireNodes:
    """The nodes, seen from the process that measures."""

    def __init__(self, parent: Connection) -> None:
        self._parent = parent

    def counts(self) -> Counter[str]:
        """How many calls were answered so far, by path, and how many failed (`failed`)."""
        return Counter(self._asked("counts"))

    def ready(self) -> int:
        return int(self._asked("ready"))

    def heartbeats(self, *, on: bool) -> None:
        """Whether an unchanged report is sent as a heartbeat."""
        self._asked("heartbeats" if on else "reports")

    def _asked(self, question: str) -> Any:
        self._parent.send(question)
        return self._parent.recv()


@contextmanager
def wire_nodes(urls: Sequence[str], tokens: Sequence[str], within_s: float) -> Iterator[WireNodes]:
    """One node for each token, spread over the servers; waits until all have reported."""
    parent, child = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=_run, args=(list(urls), list(tokens), child), daemon=True
    )
    process.start()
    child.close()  # so that its end ends a wait for an answer
    try:
        nodes = WireNodes(parent)
        wait_until(lambda: nodes.ready() == len(tokens), within_s)
        yield nodes
    finally:
        process.kill()
        process.join()


def _run(urls: list[str], tokens: list[str], child: Connection) -> None:
    asyncio.run(_Fleet(urls, tokens).run(child))


class _Fleet:
    def __init__(self, urls: list[str], tokens: list[str]) -> None:
        self.joining = asyncio.Semaphore(JOINING)
        self.answered: Counter[str] = Counter()
        self.ready = 0
        self.heartbeats = True
        self._nodes = [
            _Node(self, urls[number % len(urls)], token, f"wire-{number}")
            for number, token in enumerate(tokens)
        ]

    async def run(self, child: Connection) -> None:
        running = [asyncio.create_task(node.run()) for node in self._nodes]
        asked = asyncio.Event()
        asyncio.get_running_loop().add_reader(child.fileno(), asked.set)
        while not any(task.done() for task in running):
            await asked.wait()
            asked.clear()
            while child.poll():
                child.send(self._answer(child.recv()))

    def _answer(self, question: str) -> object:
        if question in {"heartbeats", "reports"}:
            self.heartbeats = question == "heartbeats"
        return dict(self.answered) if question == "counts" else self.ready


class _Node:
    def __init__(self, fleet: _Fleet, url: str, token: str, name: str) -> None:
        self._fleet, self._token, self._name = fleet, token, name
        self._address = urlsplit(url)
        self._headers = ""
        self._seq = self._session = self._generation = 0
        self._instances: list[dict[str, Any]] = []
        self._report: dict[str, Any] = {}
        self._revision: int | None = None

    async def run(self) -> None:
        reports, streams = _Calls(self._address), _Calls(self._address)
        async with self._fleet.joining:
            joined = await reports.post("/agent/v1/join", "", json.dumps({
                "token": self._token, "node_name": self._name, "hostname": self._name,
            }))  # fmt: skip
            self._headers = f"Authorization: Bearer {joined['credential']}\r\n"
            opened = await reports.post("/agent/v1/session", self._headers, "{}")
            self._session = opened["session"]
            self._report = _report(joined["node_id"], self._name)
            await self._sync(reports, 0)
        self._fleet.ready += 1
        await asyncio.gather(self._poll(reports), self._wait_for_streams(streams))

    async def _poll(self, calls: "_Calls") -> None:
        while True:
            wait_s = random.uniform(4, 6)
            try:
                if self._revision is None or not self._fleet.heartbeats:
                    await self._sync(calls, wait_s)
                else:
                    await self._heartbeat(calls, wait_s)
            except (OSError, asyncio.IncompleteReadError, TimeoutError, RuntimeError):
                await self._note_failure(calls)

    async def _wait_for_streams(self, calls: "_Calls") -> None:
        body = json.dumps({"session": self._session, "wait_s": STREAMS_WAIT_S, "known": []})
        await asyncio.sleep(random.uniform(0, STREAMS_WAIT_S))
        while True:
            try:
                await self._post(calls, "/agent/v1/stream-requests", body, STREAMS_WAIT_S)
            except (OSError, asyncio.IncompleteReadError, TimeoutError, RuntimeError):
                await self._note_failure(calls)

    async def _note_failure(self, calls: "_Calls") -> None:
        self._fleet.answered["failed"] += 1
        calls.close()
        await asyncio.sleep(random.uniform(0.5, 1.5))

    async def _sync(self, calls: "_Calls", wait_s: float) -> None:
        self._seq += 1
        report = {
            **self._report, "session": self._session, "seq": self._seq, "generation": self._generation,
            "wait_s": wait_s, "instances": self._instances,
        }  # fmt: skip
        answer = await self._post(calls, "/agent/v1/sync", json.dumps(report), wait_s)
        changed = answer["generation"] != self._generation
        self._generation, self._revision = answer["generation"], answer["revision"]
        wanted = [_running(each) for each in answer["assignments"] if each["want"] == "running"]
        if changed and wanted != self._instances:
            self._instances = wanted
            await self._sync(calls, 0)

    async def _heartbeat(self, calls: "_Calls", wait_s: float) -> None:
        answer = await self._post(calls, "/agent/v1/heartbeat", json.dumps({
            "session": self._session, "seq": self._seq, "generation": self._generation,
            "revision": self._revision, "wait_s": wait_s, "samples": self._report["samples"],
        }), wait_s)  # fmt: skip
        if answer["report_wanted"]:
            await self._sync(calls, 0)

    async def _post(self, calls: "_Calls", path: str, body: str, wait_s: float) -> Any:
        async with asyncio.timeout(wait_s + WITHIN_S):
            answer = await calls.post(path, self._headers, body)
        self._fleet.answered[path] += 1
        return answer


class _Calls:
    """One connection, with one call at a time."""

    def __init__(self, address: Any) -> None:
        self._host, self._port = address.hostname, address.port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def post(self, path: str, headers: str, body: str) -> Any:
        if self._streams is None:
            self._streams = await asyncio.open_connection(self._host, self._port)
        reader, writer = self._streams
        content = body.encode()
        writer.write(
            f"POST {path} HTTP/1.1\r\nHost: {self._host}\r\n{headers}Content-Type: application/json\r\n"
            f"Content-Length: {len(content)}\r\n\r\n".encode()
            + content
        )
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.split("content-length: ")[1].split("\r\n")[0])
        text = await reader.readexactly(length)
        if not head.startswith("http/1.1 2"):
            raise RuntimeError(f"{path}: {head[:12]} {text[:300]!r}")
        return json.loads(text)

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


def _report(node_id: str, name: str) -> dict[str, Any]:
    """What an agent with eight H100 reports."""
    telemetry = Telemetry(SimulatedGpuReader(node_id), lambda _: None)
    reading = telemetry.reading()
    made = SyncRequest(
        session=1, seq=1, generation=0, instances=[],
        facts=node_facts(Machine(name, "127.0.0.1"), SimulatedRuntime().facts(), reading),
        gpus=telemetry.inventory(reading), samples=telemetry.samples(reading, []),
    )  # fmt: skip
    return json.loads(made.model_dump_json())  # type: ignore[no-any-return]


def _running(assignment: dict[str, Any]) -> dict[str, Any]:
    key = f"{assignment['instance_id']}-{assignment['attempt']}"
    return {
        "instance_id": assignment["instance_id"], "attempt": assignment["attempt"], "phase": "running",
        "container_id": key,
    }  # fmt: skip
