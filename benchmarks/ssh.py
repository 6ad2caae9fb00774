"""OpenSSH through a gateway, compared with the Docker SDK on the same dockerd.

    python -m benchmarks.ssh [rounds] [seconds]

Both sides run the same commands in one container, in turns. Then 200 sessions are idle for this many seconds,
and the API is called while 500 MB pass through the gateway.
"""

import os
import pty
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import psutil
from tests.walk.product import GatewayProcess
from tests.walk.ssh_client import SshClient

from benchmarks import stack
from benchmarks.figures import median, percentile, verdict
from benchmarks.streams import KEYS, MIB, SIZE, Direct

IDLE_SESSIONS = 200
GETS = 1000
COPIED = 500 * 1000 * 1000
_LOWEST = 19
NAME = "bench"


class OpenSsh:
    """Commands through OpenSSH and the gateway."""

    def __init__(self, client: SshClient) -> None:
        self._client = client

    def runs_true(self) -> None:
        assert self._client.run(NAME, "true").returncode == 0

    def downloads(self) -> None:
        argv = self._client.argv(NAME, f"head -c {SIZE} /dev/zero")
        with subprocess.Popen(argv, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            received = 0
            while data := process.stdout.read(MIB):
                received += len(data)
        assert received == SIZE

    def uploads(self) -> None:
        argv = self._client.argv(NAME, "cat > /dev/null")
        with subprocess.Popen(argv, stdin=subprocess.PIPE) as process:
            assert process.stdin is not None
            for _ in range(SIZE // MIB):
                process.stdin.write(bytes(MIB))
        assert process.returncode == 0

    def echoes(self) -> list[float]:
        ours, theirs = pty.openpty()
        argv = self._client.argv(NAME, "stty raw -echo; echo ready; cat", flags=("-tt",))
        with subprocess.Popen(argv, stdin=theirs, stdout=theirs, stderr=subprocess.DEVNULL) as process:
            os.close(theirs)
            seen = b""
            while b"ready" not in seen:
                seen += os.read(ours, 1000)
            took = [_echo(ours) for _ in range(KEYS)]
            process.kill()
        os.close(ours)
        return took


def _echo(terminal: int) -> float:
    began = time.perf_counter()
    os.write(terminal, b"x")
    os.read(terminal, 100)
    return time.perf_counter() - began


def main(rounds: int = 5, idle_s: int = 60) -> int:
    with ExitStack() as exits:
        made = exits.enter_context(stack.on_docker(through_proxy=False))
        base = exits.enter_context(stack.folder())
        client = _client(made, base, exits)
        created = made.admin.create(
            name=NAME, command=["sleep", "100000"], gpus={"count": 0}, cpus=1, memory_mib=512
        )
        running = made.admin.wait(created["id"], "running")
        passed = _compare(OpenSsh(client), Direct(made, running["container_id"]), rounds)
        passed += _idle(client, idle_s)
        passed.append(_api_meanwhile(made, client))
    return 0 if all(passed) else 1


def _client(made: stack.Stack, base: Path, exits: ExitStack) -> SshClient:
    ports = made.bed.take_port(), made.bed.take_port()
    gateway = GatewayProcess(made.server.environment, base, made.bed.root_address, *ports)
    gateway.start()
    exits.callback(gateway.stop)
    client = SshClient(made.admin, gateway, base)
    client.register()
    return client


def _compare(ssh: OpenSsh, direct: Direct, rounds: int) -> list[bool]:
    seconds: dict[str, tuple[list[float], list[float]]] = {}
    sides = ssh, direct
    for number in range(rounds + 1):
        for kind in ("runs_true", "downloads", "uploads"):
            for side in (0, 1) if number % 2 else (1, 0):
                took = _timed(getattr(sides[side], kind))
                if number:  # the first round warms both sides
                    seconds.setdefault(kind, ([], []))[side].append(took)
    passed = []
    for kind in ("downloads", "uploads"):
        product, bare = (SIZE / MIB / median(side) for side in seconds[kind])
        print(f"{kind}: {product:.0f} MiB/s through ssh, {bare:.0f} MiB/s through the SDK")
        passed.append(verdict(kind, product, round(min(100, 0.6 * bare)), " MiB/s", at_least=True))
    true, bare_true = (median(side) * 1e3 for side in seconds["runs_true"])
    print(f"`true`: {true:.0f} ms through ssh, {bare_true:.0f} ms through the SDK")
    passed.append(verdict("`true`, longer than through the SDK", true - bare_true, 60, " ms"))
    echo, bare_echo = (percentile(side.echoes(), 0.95) * 1e3 for side in sides)
    print(f"keystroke p95: {echo:.1f} ms through ssh, {bare_echo:.1f} ms through the SDK")
    passed.append(verdict("keystroke p95, longer than through the SDK", echo - bare_echo, 25, " ms"))
    return passed


def _idle(client: SshClient, idle_s: int) -> list[bool]:
    process = psutil.Process(client.gateway.pid)
    sessions = []
    for _ in range(IDLE_SESSIONS):
        sessions.append(client.start(NAME, "echo ready; cat"))
        assert sessions[-1].stdout is not None
        assert sessions[-1].stdout.readline() == b"ready\n"
    before = client.gateway.processor_s()
    time.sleep(idle_s)
    share = (client.gateway.processor_s() - before) / idle_s * 100
    memory = process.memory_info().rss / MIB
    lost = sum(each.poll() is not None for each in sessions)
    for each in sessions:
        each.kill()
        each.communicate()
    print(
        f"{IDLE_SESSIONS} idle sessions: {memory:.0f} MiB, {share:.1f} % of a core, {lost} lost in {idle_s} s"
    )
    return [
        verdict("memory of the gateway", memory, 200, " MiB"),
        verdict("CPU of the gateway", share, 2, " %"),
        verdict("sessions lost", lost, 0, ""),
    ]


def _api_meanwhile(made: stack.Stack, client: SshClient) -> bool:
    """What runs on other machines in production gets only the processor time that is left here."""
    for pid in (made.agent.pid, made.node.dockerd.pid, made.node.containerd.pid):
        for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
            process.nice(_LOWEST)
    get = partial(made.admin.get, "/v1/instances")
    idle = [_timed(get) for _ in range(GETS)]
    argv = ["nice", f"-n{_LOWEST}", *client.argv(NAME, f"head -c {COPIED} /dev/zero")]
    busy = []
    with subprocess.Popen(argv, stdout=subprocess.DEVNULL) as copying:
        while copying.poll() is None:
            busy.append(_timed(get))
    assert copying.returncode == 0
    p99, idle_p99 = percentile(busy, 0.99), percentile(idle, 0.99)
    print(f"GET p99: {p99 * 1e3:.1f} ms in {len(busy)} calls during a copy, {idle_p99 * 1e3:.1f} ms without")
    return verdict("GET p99, to that without a copy", p99 / idle_p99, 1.3, "")


def _timed(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


if __name__ == "__main__":
    raise SystemExit(main(*map(int, sys.argv[1:])))
