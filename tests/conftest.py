"""What all tests share: databases of both kinds, and a service over each."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mooring.db import migrate
from tests.nodes import WireNode
from tests.service import Client, RunningService, running, settings_for
from tests.testbed.postgres import PostgresCluster

pytest_plugins = ["tests.testbed.fixtures"]

DATABASES = ("sqlite", "postgresql")

# Begun last, a file of minutes would leave the other workers idle while its own ends.
_LONGEST_FIRST = ("contract/test_schemathesis.py", "walk/", "scheduler/", "testbed/", "contract/")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_place)


def _place(item: pytest.Item) -> int:
    path = item.path.relative_to(Path(__file__).parent).as_posix()
    places = (place for place, start in enumerate(_LONGEST_FIRST) if path.startswith(start))
    return next(places, len(_LONGEST_FIRST))


@pytest.fixture(autouse=True)
def usual_umask() -> Iterator[None]:
    """Every test begins with it: a command of `mooring` that ran in this process has set another."""
    os.umask(0o022)
    yield
    os.umask(0o022)


@pytest.fixture(scope="session")
def migrated_template(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Callable[[str], str]:
    """A migrated, empty database of each kind, to copy from: migrating for every test would take minutes."""
    made: dict[str, str] = {}

    def template(kind: str) -> str:
        if kind not in made:
            if kind == "sqlite":
                made[kind] = f"sqlite:///{tmp_path_factory.mktemp('template') / 'mooring.db'}"
            else:
                cluster: PostgresCluster = request.getfixturevalue("postgres_cluster")
                made[kind] = cluster.create_database()
            migrate.upgrade(made[kind])
        return made[kind]

    return template


@pytest.fixture(params=DATABASES)
def database_url(
    request: pytest.FixtureRequest, tmp_path: Path, migrated_template: Callable[[str], str]
) -> Iterator[str]:
    """A fresh, migrated database; every test that asks for it runs on both kinds."""
    template = migrated_template(request.param)
    if request.param == "sqlite":
        path = tmp_path / "mooring.db"
        path.write_bytes(Path(template.removeprefix("sqlite:///")).read_bytes())
        yield f"sqlite:///{path}"
        return
    cluster: PostgresCluster = request.getfixturevalue("postgres_cluster")
    url = cluster.create_database(template=template.rsplit("/", 1)[-1].split("?")[0])
    yield url
    cluster.drop_database(url)


@pytest.fixture
def service(database_url: str, tmp_path: Path) -> Iterator[RunningService]:
    """A control plane on its own database, without nodes."""
    with running(settings_for(database_url, tmp_path / "data")) as made:
        yield made


@pytest.fixture
def client(service: RunningService) -> Iterator[Client]:
    """An admin's client of the service."""
    with service.client as made:
        yield made


@pytest.fixture
def node(client: Client) -> Iterator[WireNode]:
    """A node of eight H100 that has reported once, and says only what the test says."""
    made = WireNode(client, "gpu-1")
    made.sync()
    yield made
    made.close()
