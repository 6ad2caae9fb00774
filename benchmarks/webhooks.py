"""Webhooks: how soon an event arrives, and whether each of 10,000 does although a third of the answers fail.

    python -m benchmarks.webhooks [sqlite | postgresql] [--events 10000]

Runs a server in this process, and a receiver of HTTP on loopback. Two parts:

    latency    creates 20 instances a second for 20 s; from the time in the event, which is before its commit,
               until the receiver has the request. The bar: p95 under 500 ms.
    faults     instances are created and deleted as fast as the server allows, and the receiver answers a
               third of all requests with 500, at random. Each event must be answered with 2xx, at least once,
               and those of an instance in the order of their versions.

The schedule of attempts is 0.2 s instead of 5 s, 5 min and so on: otherwise the second part takes hours.
"""

import argparse
import random
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import datetime

from tests.service import Client, RunningService, running, settings_for
from tests.testbed.postgres import PostgresCluster
from tests.webhooks.receivers import LOOPBACK, Received, Receiver, Reply

from benchmarks import stack
from benchmarks.figures import median, percentile, verdict

BOUND_MS = 500.0
PER_S = 20
FOR_S = 20
CLIENTS = 8
SCHEDULE = (0.0, *([0.2] * 100))
NOWHERE = {"nowhere": "yes"}
EVENTS = ["instance.state_changed"]


class Failing:
    """Answers a third of the requests with 500, at random, and records those that it accepts."""

    def __init__(self) -> None:
        self.accepted: list[Received] = []
        self._random = random.Random(20261128)
        self._lock = threading.Lock()

    def __call__(self, received: Received) -> Reply:
        with self._lock:
            if self._random.random() < 1 / 3:
                return Reply(500)
            self.accepted.append(received)
        return Reply()


def main(kind: str, events: int) -> int:
    with ExitStack() as exits:
        folder = exits.enter_context(stack.folder())
        url = f"sqlite:///{folder / 'mooring.db'}"
        if kind == "postgresql":
            cluster = PostgresCluster(exits.enter_context(stack.workspace()))
            exits.callback(cluster.destroy)
            cluster.start()
            url = cluster.create_database()
        settings = settings_for(url, folder / "data", rate_limits="off", webhook_allowed_networks=LOOPBACK)
        with running(settings, webhook_schedule=SCHEDULE) as service:
            results = [latency(service), faults(service, events)]
    return 0 if all(results) else 1


def latency(service: RunningService) -> bool:
    """Create instances at a steady pace, and measure until their events arrive."""
    with Receiver() as receiver, service.client as client:
        webhook = _webhook(client, receiver.url)
        began = time.monotonic()
        for number in range(PER_S * FOR_S):
            time.sleep(max(0.0, began + number / PER_S - time.monotonic()))
            client.create(node_selector=NOWHERE)
        received = receiver.wait(PER_S * FOR_S, 60)
        client.delete(f"/v1/webhooks/{webhook}")
        times = sorted(
            each.at - datetime.fromisoformat(each.event["timestamp"]).timestamp() for each in received
        )
    p95 = percentile(times, 0.95)
    print(
        f"latency  {len(times)} events: median {median(times) * 1000:.0f} ms, p95 {p95 * 1000:.0f} ms, "
        f"p99 {percentile(times, 0.99) * 1000:.0f} ms, longest {times[-1] * 1000:.0f} ms"
    )
    return verdict("p95", p95 * 1000, BOUND_MS, " ms")


def faults(service: RunningService, events: int) -> bool:
    """Create and delete instances, and check what the failing receiver has accepted."""
    answer = Failing()
    with Receiver(answer) as receiver, service.client as client:
        webhook = _webhook(client, receiver.url)
        began, after = time.monotonic(), service.newest_seq
        with ThreadPoolExecutor(CLIENTS) as pool:
            list(
                pool.map(
                    lambda _number: _create_and_delete(service.url, events // 2 // CLIENTS), range(CLIENTS)
                )
            )
        made_s = time.monotonic() - began
        expected = _event_ids(client, after)
        while len({each.message_id for each in answer.accepted}) < len(expected) and _seconds(began) < 540:
            time.sleep(0.2)
        took_s = _seconds(began)
        delivered = {each.message_id for each in answer.accepted}
        metrics = [
            line for line in client.get("/metrics").text.splitlines() if line.startswith("mooring_webhook")
        ]
        client.delete(f"/v1/webhooks/{webhook}")
    lost, disordered = len(expected - delivered), _disordered(answer.accepted)
    twice = len(answer.accepted) - len(delivered)
    print(
        f"faults   {len(expected)} events made in {made_s:.0f} s, {len(receiver.received)} requests, "
        f"{len(answer.accepted)} accepted after {took_s:.0f} s, {twice} twice, {lost} lost, "
        f"{disordered} instances out of order"
    )
    print("\n".join(metrics))
    return lost == 0 and disordered == 0


def _seconds(since: float) -> float:
    return time.monotonic() - since


def _webhook(client: Client, url: str) -> str:
    answer = client.post("/v1/webhooks", json={"url": url, "events": EVENTS})
    assert answer.status_code == 201, answer.text
    return str(answer.json()["id"])


def _create_and_delete(url: str, count: int) -> None:
    with Client(url) as client:
        for _ in range(count):
            made = client.create(node_selector=NOWHERE)
            client.delete(f"/v1/instances/{made['id']}")


def _event_ids(client: Client, after: int) -> set[str]:
    """The ids of all events of instances after a `seq`."""
    found: set[str] = set()
    while page := client.get("/v1/events", params={"after": after, "limit": 200}).json()["items"]:
        found |= {each["id"] for each in page if each["type"] in EVENTS}
        after = page[-1]["seq"]
    return found


def _disordered(accepted: Sequence[Received]) -> int:
    """The number of instances with an event that was first accepted after a later one."""
    newest: dict[str, int] = {}
    seen: set[str] = set()
    disordered: set[str] = set()
    for each in accepted:
        instance, version = each.data["instance_id"], each.data["version"]
        if each.message_id not in seen and version < newest.get(instance, 0):
            disordered.add(instance)
        seen.add(each.message_id)
        newest[instance] = max(version, newest.get(instance, 0))
    return len(disordered)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", nargs="?", choices=("sqlite", "postgresql"), default="sqlite")
    parser.add_argument("--events", type=int, default=10_000)
    arguments = parser.parse_args()
    sys.exit(main(arguments.kind, arguments.events))
