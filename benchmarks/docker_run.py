"""How much longer `docker run --rm busybox true` takes through a gateway than on the node itself.

python -m benchmarks.docker_run [rounds]
"""

import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack

from tests.service import ADMIN_KEY
from tests.testbed.images import BUSYBOX
from tests.walk.docker_client import DockerClient
from tests.walk.product import GatewayProcess, clean_environment

from benchmarks import stack
from benchmarks.figures import median, verdict

MOST_ADDED_MS = 350
ARGV = ["run", "--rm", "--memory", "64m", BUSYBOX, "true"]


def main(rounds: int) -> int:
    with ExitStack() as exits:
        made = exits.enter_context(stack.on_docker(through_proxy=False))
        base = exits.enter_context(stack.folder())
        host, port = made.bed.root_address, made.bed.take_port()
        gateway = GatewayProcess(
            made.server.environment, base, host, made.bed.take_port(), made.bed.take_port(), docker_port=port
        )
        gateway.start()
        exits.callback(gateway.stop)
        client = DockerClient(f"tcp://{host}:{port}", ADMIN_KEY, base / "docker")
        node = {**clean_environment(), "DOCKER_HOST": made.node.url}

        def on_node() -> int:
            return subprocess.run(
                ["docker", *ARGV], check=False, env=node, stdin=subprocess.DEVNULL
            ).returncode

        def through_gateway() -> int:
            return client.run(*ARGV).returncode

        seconds: tuple[list[float], list[float]] = ([], [])
        for number in range(rounds + 1):
            for side, run in enumerate((on_node, through_gateway)):
                took = _timed(run)
                if number:  # the first round warms both sides
                    seconds[side].append(took)
    bare, product = (median(side) * 1e3 for side in seconds)
    print(f"docker run: {product:.0f} ms through the gateway, {bare:.0f} ms on the node")
    return 0 if verdict("longer than on the node", product - bare, MOST_ADDED_MS, " ms") else 1


def _timed(run: Callable[[], int]) -> float:
    began = time.perf_counter()
    assert run() == 0
    return time.perf_counter() - began


if __name__ == "__main__":
    raise SystemExit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 15))
