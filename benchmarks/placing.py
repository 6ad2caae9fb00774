"""Placements decided and committed per second in PostgreSQL, with 10,000 nodes and 80,000 GPUs.

    python -m benchmarks.placing [--nodes 10000] [--instances 20000]

Creates nodes and pending instances by bulk statements, then runs the production loop until all are placed.
The upper limit is the time to write the same rows with handwritten array statements, in batches of the same
size, without decisions, checks or locks. PostgreSQL flushes to disk and shares the cores with the scheduler.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import psycopg
from tests.testbed.postgres import PostgresCluster

from benchmarks import stack
from benchmarks.figures import verdict
from mooring.control.scheduling.cache import SchedulerCache
from mooring.db import migrate
from mooring.db.session import Database
from mooring.db.signals import Signals
from mooring.loops import scheduling
from mooring.loops.scheduling import Scheduling
from mooring.scheduler.model import Placement, Request

GPUS = 8
WANTED_PER_S = 800
# GPUs per request -> number among 100 requests.
MIX = {1: 70, 2: 15, 4: 10, 8: 5}


def main(nodes: int, instances: int) -> int:
    with _postgres() as cluster:
        template = cluster.create_database()
        migrate.upgrade(template)
        _fill(template, nodes, instances)
        limit = _by_hand(cluster.create_database(template))
        rate = _by_the_loop(cluster.create_database(template), instances)
    print(f"handwritten statements: {limit:.0f} placements/s; the loop reaches {100 * rate / limit:.0f} %")
    return 0 if verdict("decided and committed", rate, WANTED_PER_S, "/s", at_least=True) else 1


@contextmanager
def _postgres() -> Iterator[PostgresCluster]:
    with stack.workspace() as bed:
        cluster = PostgresCluster(bed)
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.destroy()


def _by_the_loop(url: str, instances: int) -> float:
    """Placements per second of the production loop."""
    database = Database(url, Signals())
    try:
        loop = _Timed(database, SchedulerCache())
        began = time.perf_counter()
        loop.load_nodes()
        print(f"loading all nodes: {time.perf_counter() - began:.1f} s")
        began, cpu_began = time.perf_counter(), time.process_time()
        while _count(url, "pending"):
            loop.tick()
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu_began
    finally:
        database.dispose()
    placed = _count(url, "scheduled")
    if placed != instances or _allocated_gpus(url) != _requested_gpus(url):
        raise SystemExit(
            f"{placed} of {instances} placed, {_allocated_gpus(url)} of {_requested_gpus(url)} GPUs allocated"
        )
    print(
        f"{placed} placed in {seconds:.1f} s, in {loop.cycles} cycles: "
        f"{100 * loop.commit_s / seconds:.0f} % of the time to write and commit, "
        f"{100 * (seconds - loop.commit_s) / seconds:.0f} % to read and decide; "
        f"{1e3 * cpu / placed:.2f} ms of this process's CPU each"
    )
    return placed / seconds


class _Timed(Scheduling):
    """The production loop, which also measures the time spent writing."""

    def __init__(self, database: Database, cache: SchedulerCache) -> None:
        super().__init__(database, cache)
        self.commit_s = 0.0
        self.cycles = 0

    def load_nodes(self) -> None:
        with self.database.read() as session:
            self._cache.nodes(session)

    def tick(self) -> None:
        self.cycles += 1
        super().tick()

    def _place(self, placements: Sequence[Placement], requests: Sequence[Request]) -> None:
        began = time.perf_counter()
        super()._place(placements, requests)
        self.commit_s += time.perf_counter() - began


def _count(url: str, state: str) -> int:
    return _number(url, f"SELECT count(*) FROM instances WHERE state = '{state}'")


def _allocated_gpus(url: str) -> int:
    return _number(url, "SELECT sum(milli_held) / 1000 FROM gpus")


def _requested_gpus(url: str) -> int:
    return _number(url, "SELECT sum(gpu_count) FROM instances")


def _number(url: str, query: str) -> int:
    with psycopg.connect(url) as connection:
        return int((connection.execute(query.encode()).fetchone() or (0,))[0])


def _by_hand(url: str) -> float:
    """Placements per second with array statements: the first instances on the first GPUs."""
    with psycopg.connect(url) as connection:
        waiting = connection.execute("SELECT id, gpu_count FROM instances ORDER BY id").fetchall()
        gpus = connection.execute("SELECT uuid, node_id FROM gpus ORDER BY uuid").fetchall()
        connection.commit()
        plan, next_gpu = [], 0
        for instance_id, count in waiting:
            if next_gpu % GPUS + count > GPUS:
                next_gpu += GPUS - next_gpu % GPUS  # the first GPU of the next node
            uuids = [uuid for uuid, _node in gpus[next_gpu : next_gpu + count]]
            plan.append((instance_id, gpus[next_gpu][1], uuids))
            next_gpu += count
        began = time.perf_counter()
        for start in range(0, len(plan), scheduling.BATCH):
            _write(connection, plan[start : start + scheduling.BATCH])
            connection.commit()
        return len(plan) / (time.perf_counter() - began)


def _write(connection: psycopg.Connection, batch: list[tuple[str, str, list[str]]]) -> None:
    ids, nodes = (
        [instance_id for instance_id, _node, _uuids in batch],
        [node_id for _id, node_id, _uuids in batch],
    )
    placed_as = json.dumps({"isolation": "exclusive", "link_score": None, "borrowed": False})
    connection.execute(
        "UPDATE nodes SET generation = generation + 1, revision = revision + 1 WHERE id = ANY(%s)", [nodes]
    )
    connection.execute(
        "UPDATE instances SET state = 'scheduled', reason = NULL, version = version + 1,"
        " attempt = attempt + 1, node_id = given.node_id, node_generation = 1, cpu_milli = 8000,"
        " memory_mib = 65536, placed_as = %s, scheduled_at = now()"
        " FROM unnest(%s::text[], %s::text[]) AS given (id, node_id) WHERE instances.id = given.id",
        [placed_as, ids, nodes],
    )
    allocations = [(uuid, instance_id) for instance_id, _node, uuids in batch for uuid in uuids]
    connection.execute(
        "INSERT INTO allocations (gpu_uuid, instance_id, project_id, attempt, milli, from_at)"
        " SELECT uuid, id, 'prj_bench', 1, 1000, now()"
        " FROM unnest(%s::text[], %s::text[]) AS given (uuid, id)",
        [[uuid for uuid, _id in allocations], [instance_id for _uuid, instance_id in allocations]],
    )
    connection.execute(
        "INSERT INTO events (id, type, project_id, instance_id, at, data)"
        " SELECT 'evt_' || id, 'instance.state_changed', 'prj_bench', id, now(), json_build_object("
        "'instance_id', id, 'from', 'pending', 'to', 'scheduled', 'version', 2, 'reason', NULL)"
        " FROM unnest(%s::text[]) AS id",
        [ids],
    )


def _fill(url: str, nodes: int, instances: int) -> None:
    facts = {
        "hostname": "host", "address": "10.0.0.1", "cpus": 192, "memory_mib": 2_063_000,
        "labels": {"zone": "a"},
        "agent_version": "0.1.0", "docker_version": "20.10.24", "driver_version": "550.54.15",
        "cuda_version": "12.4", "swarm": None, "mps": False, "simulated_containers": False,
        "simulated_gpus": False, "overrides": [],
    }  # fmt: skip
    with psycopg.connect(url) as connection:
        connection.execute(
            "INSERT INTO projects (id, name, labels, quotas, weight, security_profile, gpu_sharing,"
            " host_network, version, created_at)"
            " VALUES ('prj_bench', 'bench', '{}', '{}', 1, 'standard', false, false, 1, now())"
        )
        connection.execute(
            "INSERT INTO nodes (id, name, credential_hash, renewal_due, cordoned, draining, silent, facts,"
            " samples, orphans, session, seq, generation, revision, heartbeats, created_at)"
            " SELECT 'nod_' || lpad(n::text, 6, '0'), 'gpu-' || n, 'hash-' || n, false, false, false, false,"
            " %s, '[]', '[]', 1, 1, 0, 0, 1, now() FROM generate_series(1, %s) AS n",
            [json.dumps(facts), nodes],
        )
        _fill_gpus(connection, nodes)
        _fill_instances(connection, instances)
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("VACUUM ANALYZE")


def _fill_gpus(connection: psycopg.Connection, nodes: int) -> None:
    for index in range(GPUS):
        others = [other for other in range(GPUS) if other != index]
        facts = {
            "index": index, "model": "NVIDIA H100 80GB HBM3", "memory_mib": 81_559, "numa_node": index // 4,
            "pci_bus_id": f"00000000:{index + 1:02x}:00.0", "minor_number": index,
            "nvlink_peers": [{"uuid": f"GPU-NODE-{other}", "links": 18} for other in others],
            "topology": {f"GPU-NODE-{other}": "system" for other in others}, "mig_mode": "disabled",
            "mig_devices": [], "compute_capability": "9.0", "power_limit_w": 700.0, "fault": None,
            "uuid": f"GPU-NODE-{index}",
        }  # fmt: skip
        connection.execute(
            "INSERT INTO gpus (uuid, node_id, index, model, memory_mib, facts, health, simulated, milli_held)"
            " SELECT 'GPU-' || name || %s, 'nod_' || name, %s, 'NVIDIA H100 80GB HBM3', 81559,"
            " replace(%s, 'NODE', name)::json, 'healthy', false, 0"
            " FROM (SELECT lpad(n::text, 6, '0') AS name FROM generate_series(1, %s) AS n) AS names",
            [f"-{index}", index, json.dumps(facts), nodes],
        )


def _fill_instances(connection: psycopg.Connection, instances: int) -> None:
    counts = [count for count, share in MIX.items() for _ in range(share)]
    spec = {
        "image": "nvcr.io/nvidia/pytorch:24.05-py3", "command": ["python", "train.py"], "env": {},
        "gpus": {"count": 0, "model": "H100"}, "cpus": 8.0, "memory_mib": 65_536, "ports": [],
        "max_duration_s": 86_400, "restart": "never", "on_capacity": "queue", "on_node_loss": "keep",
        "priority": 50, "preemptible": False, "on_preemption": "requeue", "preemption_grace_s": 30,
        "node_selector": {},
    }  # fmt: skip
    connection.execute(
        "INSERT INTO instances (id, project_id, name, labels, spec, gpu_count, gpu_milli, priority, state,"
        " desired_state, reason, version, generation, attempt, node_generation, requeue, stop_timeout_s,"
        " endpoints, simulated, max_duration_s, created_at, queued_at)"
        " SELECT 'ins_' || lpad(n::text, 8, '0'), 'prj_bench', 'job-' || n, '{}',"
        " jsonb_set(%s::jsonb, '{gpus,count}', to_jsonb(count))::json, count, count * 1000, 50, 'pending',"
        ' \'running\', \'{"code": "queued", "message": "new"}\', 1, 1, 0, 0, false, 10, \'[]\', false, 86400,'
        " queued_at, queued_at FROM (SELECT n, (%s::int[])[1 + (n * 37) %% 100] AS count,"
        " now() - interval '1 hour' + n * interval '1 millisecond' AS queued_at"
        " FROM generate_series(1, %s) AS n) AS requested",
        [json.dumps(spec), counts, instances],
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--nodes", type=int, default=10_000)
    parser.add_argument("--instances", type=int, default=20_000)
    chosen = parser.parse_args()
    sys.exit(main(chosen.nodes, chosen.instances))
