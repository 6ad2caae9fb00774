"""An OpenID provider, and services that accept its tokens."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.service import Client, RunningService, running, settings_for
from tests.sso import provider as providers
from tests.sso.provider import AUDIENCE, Provider
from tests.testbed.workspace import Workspace

ROLES = "admins=admin,viewers=vision:viewer,members=vision:member,owners=vision:owner,speech=speech:member"


@pytest.fixture(scope="session")
def provider(workspace: Workspace) -> Iterator[Provider]:
    """The shared provider; a test that stops it or changes its keys uses `own_provider`."""
    providers.require()
    made = Provider(workspace)
    made.start()
    yield made
    made.destroy()


@pytest.fixture
def own_provider(workspace: Workspace) -> Iterator[Provider]:
    """A running provider for a single test."""
    providers.require()
    made = Provider(workspace)
    made.start()
    yield made
    made.destroy()


@pytest.fixture
def service(database_url: str, tmp_path: Path, provider: Provider) -> Iterator[RunningService]:
    """A control plane that accepts the shared provider's tokens."""
    settings = settings_for(
        database_url, tmp_path / "data", oidc_issuer=provider.issuer, oidc_audience=AUDIENCE, oidc_roles=ROLES
    )
    with running(settings) as made:
        yield made


@pytest.fixture
def vision(client: Client) -> str:
    """The ID of the project that most claims refer to."""
    return new_project(client, "vision")


@pytest.fixture(scope="session")
def sqlite_url(
    tmp_path_factory: pytest.TempPathFactory, migrated_template: Callable[[str], str]
) -> Callable[[], str]:
    """Fresh SQLite databases, for tests that do not depend on the database."""

    def new() -> str:
        path = tmp_path_factory.mktemp("sso") / "mooring.db"
        path.write_bytes(Path(migrated_template("sqlite").removeprefix("sqlite:///")).read_bytes())
        return f"sqlite:///{path}"

    return new


def new_project(client: Client, name: str) -> str:
    answer = client.post("/v1/projects", json={"name": name})
    assert answer.status_code == 201, answer.text
    return str(answer.json()["id"])
