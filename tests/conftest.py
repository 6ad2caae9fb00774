"""Fixtures for all tests: a database of either kind, and a service that uses it."""

import os
from collections.abc import Callable, Collection, Iterator
from functools import cache
from pathlib import Path

import pytest

from mooring.db import migrate
from tests import compiled_statements
from tests.nodes import WireNode
from tests.service import Client, RunningService, running, settings_for
from tests.testbed.postgres import PostgresCluster

pytest_plugins = ["tests.testbed.fixtures"]

DATABASES = ("sqlite", "postgresql")

# Kinds of files whose tests mostly wait for daemons and timers, the longest first. Each is spread evenly, to
# run beside files that use the CPU. The last fifth has none: a long file at the end would leave the other
# workers idle.
_WAITING = (
    ("contract/test_schemathesis.py", "faults/", "walk/", "testbed/", "contract/"),
    ("agent/docker/", "agent/images/", "agent/disk/", "agent/sync/"),
)
_WAITING_BEGIN_WITHIN = 0.8

# Fixtures that start a daemon. `--quick` leaves out the tests that use them.
_DAEMONS = {
    "docker_node", "docker_nodes", "new_docker_node", "new_postgres_cluster", "postgres_cluster",
    "private_registry", "registry", "root_address", "swarm_of_two",
}  # fmt: skip
# Tests that start daemons or tools of node_modules without one of the above fixtures, or measure the machine.
_NEVER_QUICK = ("contract/", "faults/", "sso/", "testbed/", "walk/", "test_packaging.py", "test_readme.py")
_DATABASE_FIXTURES = ("database_url", "shared_service", "setup", "history")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="only tests that need no daemon, on SQLite")
    parser.addoption("--every-database", action="store_true", help="every test on SQLite and PostgreSQL")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """More workers than CPUs: the tests wait for timers and daemons. More daemons would need more memory."""
    cpus = os.cpu_count() or 1
    return cpus * 2 if config.getoption("quick") else cpus + 1


def pytest_configure(config: pytest.Config) -> None:
    compiled_statements.share()
    config.addinivalue_line(
        "markers",
        "both_databases: run on PostgreSQL too: races, locks, quotas, pages, triggers, access, bad input",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    quick, every = config.getoption("quick"), config.getoption("every_database")
    items[:] = [
        item
        for item in items
        if (every or _runs_on_its_database(item)) and not (quick and _needs_a_daemon(item))
    ]
    places = _places(dict.fromkeys(map(_relative_path, items)))
    items.sort(key=lambda item: places[_relative_path(item)])


def _runs_on_its_database(item: pytest.Item) -> bool:
    """True if the item runs on SQLite, is marked `both_databases`, or selects its database itself."""
    chosen = any(marker.args[0] == "database_url" for marker in item.iter_markers("parametrize"))
    on_postgresql = any(_params(item).get(name) == "postgresql" for name in _DATABASE_FIXTURES)
    return chosen or not on_postgresql or item.get_closest_marker("both_databases") is not None


def _params(item: pytest.Item) -> dict[str, object]:
    """The parameters of the item and of its fixtures."""
    return item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}


def _needs_a_daemon(item: pytest.Item) -> bool:
    fixtures = _DAEMONS.intersection(getattr(item, "fixturenames", ()))
    return (
        bool(fixtures)
        or _relative_path(item).startswith(_NEVER_QUICK)
        or "postgresql" in _params(item).values()
    )


def _places(files: Collection[str]) -> dict[str, float]:
    """Where each file comes in the order of all, from 0 to 1."""
    waiting = [
        list(dict.fromkeys(file for start in kind for file in files if file.startswith(start)))
        for kind in _WAITING
    ]
    others = [file for file in files if not any(file in kind for kind in waiting)]
    return {
        file: within * place / len(kind)
        for kind, within in (*((kind, _WAITING_BEGIN_WITHIN) for kind in waiting), (others, 1.0))
        for place, file in enumerate(kind)
    }


def _relative_path(item: pytest.Item) -> str:
    return _relative_to_tests(item.path)


@cache
def _relative_to_tests(path: Path) -> str:
    return path.relative_to(Path(__file__).parent).as_posix()


@pytest.fixture(autouse=True)
def default_umask() -> Iterator[None]:
    """Resets the umask around every test: a `mooring` command in this process may have changed it."""
    os.umask(0o022)
    yield
    os.umask(0o022)


@pytest.fixture(scope="session")
def migrated_template(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Callable[[str], str]:
    """Empty migrated databases to copy from, one of each kind: a migration per test would take minutes."""
    urls: dict[str, str] = {}

    def template(kind: str) -> str:
        if kind not in urls:
            urls[kind] = migrated(kind)
        return urls[kind]

    def migrated(kind: str) -> str:
        if kind == "sqlite":
            url = f"sqlite:///{tmp_path_factory.mktemp('template') / 'mooring.db'}"
            migrate.upgrade(url)
            return url
        cluster: PostgresCluster = request.getfixturevalue("postgres_cluster")
        url = cluster.create_database()
        migrate.upgrade(url)
        cluster.reject_connections(url)
        return url

    return template


@pytest.fixture(params=DATABASES)
def database_url(
    request: pytest.FixtureRequest, tmp_path: Path, migrated_template: Callable[[str], str]
) -> Iterator[str]:
    """A fresh, migrated database: SQLite, and PostgreSQL too for tests marked `both_databases`."""
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
    """A control plane with its own database and no nodes."""
    with running(settings_for(database_url, tmp_path / "data")) as running_service:
        yield running_service


@pytest.fixture
def client(service: RunningService) -> Iterator[Client]:
    """A client of the service with an admin key."""
    with service.client as admin_client:
        yield admin_client


@pytest.fixture
def node(client: Client) -> Iterator[WireNode]:
    """A node with eight H100 that has reported once and sends only the test's reports."""
    wire_node = WireNode(client, "gpu-1")
    wire_node.sync()
    yield wire_node
    wire_node.close()
