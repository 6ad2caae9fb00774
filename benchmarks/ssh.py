"""OpenSSH through a gateway, compared with the Docker SDK on the same dockerd.

    python -m benchmarks.ssh [rounds] [seconds]

Both sides run the same commands in one container, in turns. Then 200 sessions are idle for this many seconds.
"""

import os
import pty
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import psutil
from tests.walk.product import GatewayProcess
from tests.walk.ssh_client import SshClient

from benchmarks import stack
from benchmarks.figures import median, percentile, verdict
from benchmarks.streams import KEYS, MIB, SIZE, Direct

IDLE_SESSIONS = 200
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
        client = ssh_client(made, base, exits)
        passed = _compare(OpenSsh(client), Direct(made, sleeping_instance(made)), rounds)
        passed += _idle(client, idle_s)
    return 0 if all(passed) else 1


def ssh_client(made: stack.Stack, base: Path, exits: ExitStack) -> SshClient:
    ports = made.bed.take_port(), made.bed.take_port()
    gateway = GatewayProcess(made.server.environment, base, made.bed.root_address, *ports)
    gateway.start()
    exits.callback(gateway.stop)
    client = SshClient(made.admin, gateway, base)
    client.register()
    return client


def sleeping_instance(made: stack.Stack) -> str:
    """Creates the instance of this name. Returns the id of its container."""
    created = made.admin.create(
        name=NAME, command=["sleep", "100000"], gpus={"count": 0}, cpus=1, memory_mib=512
    )
    container: str = made.admin.wait(created["id"], "running")["container_id"]
    return container


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


def _timed(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


if __name__ == "__main__":
    raise SystemExit(main(*map(int, sys.argv[1:])))
