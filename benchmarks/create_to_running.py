"""Create -> running through Mooring, compared with the same create + start through the Docker SDK.

    python -m benchmarks.create_to_running [rounds]

Both create the same container (the direct side copies Mooring's) on one dockerd, in turns; each side is first
in every second round. Mooring's time ends when a waiting client reads `running`.
"""

import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import docker
from tests.service import Client
from tests.testbed.waiting import wait_until

from benchmarks import stack
from benchmarks.figures import median, percentile, verdict

BODY = {"command": ["sleep", "1000"], "gpus": {"count": 1}, "cpus": 0.1, "memory_mib": 64}
AT_ONCE = 8
REST_S = 0.3


def main(rounds: int) -> int:
    with stack.on_docker() as made:
        direct = Direct(made.node.url, template(made))
        for _ in range(3):  # both sides warm
            through_product(made.server.client)
            direct.once()
        pairs = [one_pair(made.admin, direct, product_first=number % 2 == 0) for number in range(rounds)]
        ratios = [throughput_ratio(made, direct) for _ in range(max(5, rounds // 4))]
    product, plain = [list(side) for side in zip(*pairs, strict=True)]
    print(f"create -> running, {rounds} rounds: product median {median(product) * 1e3:.0f} ms, "
          f"p95 {percentile(product, 0.95) * 1e3:.0f} ms; direct median {median(plain) * 1e3:.0f} ms, "
          f"p95 {percentile(plain, 0.95) * 1e3:.0f} ms")  # fmt: skip
    passed = [
        verdict("median ratio", median(product) / median(plain), 1.08, "x"),
        verdict("p95 ratio", percentile(product, 0.95) / percentile(plain, 0.95), 1.3, "x"),
        verdict(f"throughput of {AT_ONCE} at once, ratio", median(ratios), 0.9, "x", at_least=True),
    ]
    return 0 if all(passed) else 1


def template(made: stack.Stack) -> dict[str, Any]:
    """The configuration of Mooring's container, as the engine reports it."""
    running = made.admin.wait(made.admin.create(**BODY)["id"], "running")
    api = made.node.client.api
    attributes = api.inspect_container(running["container_id"])
    host = attributes["HostConfig"]
    # Not the project's network, which the agent removes with the project's last container.
    api.create_network("copied", driver="bridge")
    remove(made.admin, running["id"])
    config = {name: attributes["Config"][name] for name in ("Image", "Hostname", "Cmd", "Env", "Entrypoint")}
    return {**config, "Labels": {"copied": "yes"}, "HostConfig": {**host, "NetworkMode": "copied"}}


def one_pair(client: Client, direct: "Direct", *, product_first: bool) -> tuple[float, float]:
    """Both sides once, each after the same pause, since dockerd still cleans up after the last container."""
    if product_first:
        return _after_pause(lambda: through_product(client)), _after_pause(direct.once)
    plain = _after_pause(direct.once)
    return _after_pause(lambda: through_product(client)), plain


def _after_pause(measure: Callable[[], float]) -> float:
    time.sleep(REST_S)
    return measure()


def through_product(client: Client) -> float:
    """Seconds from the create to reading `running`."""
    began = time.perf_counter()
    instance_id = client.create(**BODY)["id"]
    client.wait(instance_id, "running")
    took = time.perf_counter() - began
    remove(client, instance_id)
    return took


def remove(client: Client, instance_id: str) -> None:
    client.post(f"/v1/instances/{instance_id}/stop", json={"timeout_s": 0})
    client.delete(f"/v1/instances/{instance_id}")
    wait_until(lambda: client.get(f"/v1/instances/{instance_id}").status_code == 404, 30)


class Direct:
    """Create + start with the client of the SDK, as a script does."""

    def __init__(self, url: str, config: dict[str, Any]) -> None:
        self._api = docker.APIClient(base_url=url, version="auto", timeout=60, max_pool_size=AT_ONCE)
        self._config = config

    def once(self) -> float:
        began = time.perf_counter()
        container = self._create()
        self._api.start(container)
        took = time.perf_counter() - began
        self._api.remove_container(container, force=True, v=True)
        return took

    def _create(self) -> str:
        return str(self._api.create_container_from_config(self._config)["Id"])  # type: ignore[no-untyped-call]

    def many(self) -> list[str]:
        def one(_number: int) -> str:
            container = self._create()
            self._api.start(container)
            return container

        with ThreadPoolExecutor(AT_ONCE) as pool:
            return list(pool.map(one, range(AT_ONCE)))

    def remove(self, containers: list[str]) -> None:
        for container in containers:
            self._api.remove_container(container, force=True, v=True)


def throughput_ratio(made: stack.Stack, direct: Direct) -> float:
    """Mooring's throughput at AT_ONCE parallel creates, relative to the direct one."""
    containers: list[str] = []
    plain = _timed(lambda: containers.extend(direct.many()))
    direct.remove(containers)
    clients = [made.server.client for _ in range(AT_ONCE)]
    made_ids: list[str] = []

    def one(client: Client) -> str:
        instance_id = str(client.create(**BODY)["id"])
        client.wait(instance_id, "running", 60)
        return instance_id

    with ThreadPoolExecutor(AT_ONCE) as pool:
        product = _timed(lambda: made_ids.extend(pool.map(one, clients)))
        list(pool.map(remove, clients, made_ids))
    for client in clients:
        client.close()
    return plain / product


def _timed(act: Callable[[], object]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 30))
