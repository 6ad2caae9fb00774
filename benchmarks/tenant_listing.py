"""Time to list 100 instances of one project among 100,000 of others, compared with 1,000 of others.

python -m benchmarks.tenant_listing [rounds]

For each kind of database, queries two services in turns with a key of the project, and compares the medians.
"""

import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from sqlalchemy import insert
from tests.service import Client, RunningService, running, settings_for
from tests.testbed.postgres import PostgresCluster

from benchmarks import stack
from benchmarks.figures import median, verdict
from mooring.control.tenants import projects
from mooring.db.tables import Instance
from mooring.db.types import new_id, now
from mooring_client.schemas.states import DesiredState, State

OWN, FEW, MANY, OTHER_PROJECTS = 100, 1_000, 100_000, 50
_BATCH = 5_000


def main(rounds: int) -> int:
    with ExitStack() as exits:
        folder = Path(exits.enter_context(tempfile.TemporaryDirectory(prefix="mooring-bench-")))
        cluster = PostgresCluster(exits.enter_context(stack.workspace()), durable=False)
        exits.callback(cluster.destroy)
        cluster.start()
        verdicts = [
            _compared(kind, urls, folder, rounds)
            for kind, urls in {
                "sqlite": [f"sqlite:///{folder / f'{name}.db'}" for name in ("few", "many")],
                "postgresql": [cluster.create_database(), cluster.create_database()],
            }.items()
        ]
    return 0 if all(verdicts) else 1


def _compared(kind: str, urls: list[str], folder: Path, rounds: int) -> bool:
    with (
        _among(FEW, urls[0], folder / f"{kind}-few") as few,
        _among(MANY, urls[1], folder / f"{kind}-many") as many,
    ):
        taken: dict[int, list[float]] = {FEW: [], MANY: []}
        for _ in range(rounds):
            for others, client in ((FEW, few), (MANY, many)):
                taken[others].append(_listed(client))
    few_ms, many_ms = median(taken[FEW]) * 1e3, median(taken[MANY]) * 1e3
    print(f"{kind}: {few_ms:.2f} ms among {FEW}, {many_ms:.2f} ms among {MANY} ({rounds} answers each)")
    return verdict(f"{kind}: among {MANY} / among {FEW}", many_ms / few_ms, 1.3, "x")


def _listed(client: Client) -> float:
    began = time.perf_counter()
    answer = client.get("/v1/instances?limit=100")
    taken = time.perf_counter() - began
    assert answer.status_code == 200, answer.text
    assert len(answer.json()["items"]) == OWN
    return taken


@contextmanager
def _among(others: int, url: str, data_dir: Path) -> Iterator[Client]:
    """A client of a project with `OWN` instances, spread evenly among `others` of other projects."""
    with running(settings_for(url, data_dir, rate_limits="off")) as service:
        own_id = _fill(service, others)
        with service.client as admin:
            made = admin.post("/v1/api-keys", json={"name": "lists", "project_id": own_id, "role": "viewer"})
            assert made.status_code == 201, made.text
        with Client(service.url, made.json()["key"]) as client:
            _listed(client)
            yield client


def _fill(service: RunningService, others: int) -> str:
    database = service.plane.database
    with database.write() as session:
        own, *others_projects = (
            projects.new(f"project-{number}", {}) for number in range(1 + OTHER_PROJECTS)
        )
        session.add_all([own, *others_projects])
        session.flush()
        ids = [project.id for project in others_projects]
        own_id = own.id
    every = others // OWN
    for start in range(0, others, _BATCH):
        rows = []
        for number in range(start, min(start + _BATCH, others)):
            if number % every == 0:
                rows.append(_row(own_id, f"own-{number}"))
            rows.append(_row(ids[number % len(ids)], f"other-{number}"))
        with database.write() as session:
            session.execute(insert(Instance), rows)
    if not database.is_sqlite:
        with database.engine.connect() as connection:
            connection.exec_driver_sql("ANALYZE")
    return own_id


def _row(project_id: str, name: str) -> dict[str, object]:
    created_at = now()
    return {
        "id": new_id("ins"), "project_id": project_id, "name": name, "labels": {},
        "spec": {"image": "busybox"}, "gpu_count": 0, "state": State.STOPPED,
        "desired_state": DesiredState.STOPPED, "version": 3,
        "generation": 2, "attempt": 1, "node_generation": 0, "stop_timeout_s": 10, "endpoints": [],
        "simulated": False, "created_at": created_at, "queued_at": created_at,
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 400))
