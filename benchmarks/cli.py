"""The command line, installed alone, compared with what it cannot do without, in turns.

    python -m benchmarks.cli [rounds] [--only start|lists|run]

- start: `mooring --help`, and a Python that does nothing
- lists, with 1,000 instances: `mooring ps`, and its HTTP requests alone; the completion of names in a shell
- run: from the container's first output to the user's, by `mooring run`, and by `docker run` on the node
"""

import argparse
import http.client
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlencode, urlsplit

from tests.environments import ROOT, build_wheels, for_client
from tests.service import ADMIN_KEY
from tests.testbed.images import BUSYBOX
from tests.walk.product import clean_environment

from benchmarks import stack
from benchmarks.figures import median, percentile, verdict
from benchmarks.listing import INSTANCES, fill

Figure = TypeVar("Figure")

PAGE = 200  # as `mooring ps` asks
# The same requests by httpx, which the SDK is built on, in a Python that has just started.
HTTPX = """
import httpx, sys
with httpx.Client(base_url=sys.argv[1], headers={"Authorization": "Bearer " + sys.argv[2]}) as client:
    params = {"limit": sys.argv[3]}
    while True:
        page = client.get("/v1/instances", params=params).json()
        if page["next_cursor"] is None:
            break
        params["cursor"] = page["next_cursor"]
"""
# `adjtimex` prints the time of this machine's clock in two lines: seconds, and microseconds.
PROGRAMS = {"goes on": ["sh", "-c", "adjtimex; sleep 1"], "ends at once": ["adjtimex"]}
SMALL = ("--cpus", "0.1", "--memory", "64m")
CLOCK_LINES = (b"time.tv_sec:", b"time.tv_usec:")


class Laptop:
    """The client's wheel, installed alone, and commands in it."""

    def __init__(self, folder: Path) -> None:
        build_wheels(folder / "wheels", ROOT / "client")
        environment = for_client(folder / "venv")
        environment.install(folder / "wheels", "mooring-client", compiled=True)
        self.python, self.mooring = str(environment.program("python")), str(environment.program("mooring"))
        # Without those of this machine that make Python slower.
        self._variables = {
            name: value for name, value in clean_environment().items() if not name.startswith("PYTHON")
        } | {"XDG_CONFIG_HOME": str(folder), "HOME": str(folder)}

    def variables(self, url: str) -> dict[str, str]:
        """The variables with which `mooring` talks to this server."""
        return self._variables | {
            "MOORING_URL": url,
            "MOORING_API_KEY": ADMIN_KEY,
            # The test bed's addresses are not those of this machine's loopback.
            "MOORING_INSECURE_HTTP": "1",
        }

    def run(self, *argv: str, url: str = "", **variables: str) -> bytes:
        done = subprocess.run(argv, check=True, env=self.variables(url) | variables, capture_output=True)
        return done.stdout


def start(laptop: Laptop, rounds: int) -> bool:
    """The start of any command."""
    bare, product = in_turns(
        rounds,
        lambda: timed(lambda: laptop.run(laptop.python, "-c", "pass")),
        lambda: timed(lambda: laptop.run(laptop.mooring, "--help")),
    )
    imports = _shown("mooring --help", product) - _shown("python -c pass", bare)
    return verdict("imports of mooring --help", imports, 150, " ms")


def lists(laptop: Laptop, rounds: int) -> bool:
    """`mooring ps` and the completion of names."""
    named: list[bool] = []
    typed = {"_MOORING_COMPLETE": "complete_bash", "COMP_WORDS": "mooring logs listed-9", "COMP_CWORD": "2"}
    with stack.server_alone() as server, stack.simulated_fleet(server, "10x16xH100", elsewhere=True):
        with server.client as admin:
            fill(admin, INSTANCES)

        def ps() -> None:
            assert laptop.run(laptop.mooring, "ps", url=server.url).count(b"\n") == INSTANCES + 1

        def complete() -> None:
            named.append(b"listed-9" in laptop.run(laptop.mooring, url=server.url, **typed))

        def by_httpx() -> None:
            laptop.run(laptop.python, "-c", HTTPX, server.url, ADMIN_KEY, str(PAGE))

        sides = (lambda: requests_of_ps(server.url), by_httpx, ps, complete)
        bare, httpx, product, names = in_turns(rounds, *(partial(timed, side) for side in sides))
    listed = _shown("mooring ps", product)
    _shown("its requests, by a new Python with httpx", httpx)
    requests = _shown("its requests alone", bare)
    completed = _shown("completion of names", names)
    passed = [
        verdict("mooring ps, longer than its requests", listed - requests, 120, " ms"),
        verdict("completion of names", completed, 300, " ms"),
        verdict("completions without a name, after 0.3 s", named.count(False), 0),
    ]
    return all(passed)


def requests_of_ps(url: str) -> None:
    """What `mooring ps` needs from the server, by the plainest client, which has started already."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc)
    cursor: dict[str, str] = {}
    count = 0
    while True:
        query = urlencode({"limit": PAGE, **cursor})
        headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
        connection.request("GET", f"/v1/instances?{query}", headers=headers)
        page = json.loads(connection.getresponse().read())
        count += len(page["items"])
        if page["next_cursor"] is None:
            break
        cursor = {"cursor": page["next_cursor"]}
    connection.close()
    assert count == INSTANCES


def run(laptop: Laptop, rounds: int) -> bool:
    """The first output of an attached instance, whose program goes on or ends at once."""
    passed = []
    with stack.on_docker(through_proxy=False) as made:
        node = clean_environment() | {"DOCKER_HOST": made.node.url}
        for name, program in PROGRAMS.items():
            ours = [laptop.mooring, "run", "--rm", *SMALL, BUSYBOX, "--", *program]
            docker = ["docker", "run", "--rm", "--memory", "64m", BUSYBOX, *program]
            bare, product = in_turns(
                rounds,
                partial(first_output_delay_ms, docker, node),
                partial(first_output_delay_ms, ours, laptop.variables(made.server.url)),
            )
            print(
                f"first output of a program that {name}: median {median(product):.0f} ms by mooring run, "
                f"{median(bare):.0f} ms by docker run"
            )
            passed.append(verdict("first output after the container's", median(product), 150, " ms"))
    return all(passed)


def first_output_delay_ms(argv: Sequence[str], environment: Mapping[str, str]) -> float:
    """From the time that the container prints to the time at which its first byte arrives here."""
    with subprocess.Popen(
        argv, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        output = os.read(process.stdout.fileno(), 65_536)
        arrived_us = time.time_ns() // 1000
        output += process.stdout.read()
        said = process.stderr.read()
    assert output, said
    seconds, microseconds = (
        int(line.split()[-1]) for line in output.splitlines() if line.strip().startswith(CLOCK_LINES)
    )
    return (arrived_us - seconds * 1_000_000 - microseconds) / 1000


@dataclass(frozen=True)
class Took:
    """Milliseconds of one run, and those of the CPU in its processes: other load adds less to these."""

    wall: float
    cpu: float


def timed(act: Callable[[], object]) -> Took:
    cpu, began = _cpu_s(), time.perf_counter()
    act()
    return Took((time.perf_counter() - began) * 1e3, (_cpu_s() - cpu) * 1e3)


def _cpu_s() -> float:
    """The CPU time of all processes that this one has waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def in_turns(rounds: int, *sides: Callable[[], Figure]) -> list[list[Figure]]:
    """What each side returns. The first round warms all of them, and does not count."""
    figures = [[side() for side in sides] for _ in range(rounds + 1)]
    return [list(of_side) for of_side in zip(*figures[1:], strict=True)]


def _shown(name: str, took: Sequence[Took]) -> float:
    """Print what a side took. Returns the median."""
    middle, cpu = median([each.wall for each in took]), median([each.cpu for each in took])
    high = percentile([each.wall for each in took], 0.9)
    print(f"{name}: median {middle:.0f} ms (CPU {cpu:.0f} ms), 90th percentile {high:.0f} ms", flush=True)
    return middle


PARTS = {"start": start, "lists": lists, "run": run}


def main(rounds: int, only: str | None) -> int:
    passed = []
    with stack.folder() as base:
        laptop = Laptop(base)
        for name, part in PARTS.items():
            if only in {None, name}:
                print(f"{name}, at a load average of {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs:")
                passed.append(part(laptop, rounds))
    return 0 if all(passed) else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("rounds", nargs="?", type=int, default=15)
    parser.add_argument("--only", choices=PARTS)
    wanted = parser.parse_args()
    sys.exit(main(wanted.rounds, wanted.only))
