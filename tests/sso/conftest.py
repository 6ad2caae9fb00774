"""A provider, and services that take its tokens."""

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
    """The session's provider; who stops it or changes its keys takes one of their own."""
    providers.require()
    made = Provider(workspace)
    made.start()
    yield made
    made.destroy()


@pytest.fixture
def own_provider(workspace: Workspace) -> Iterator[Provider]:
    """A running provider of this test alone."""
    providers.require()
    made = Provider(workspace)
    made.start()
    yield made
    made.destroy()


@pytest.fixture
def service(database_url: str, tmp_path: Path, provider: Provider) -> Iterator[RunningService]:
    """A control plane that takes the session's provider's tokens; it has the project `vision`."""
    settings = settings_for(
        database_url, tmp_path / "data", oidc_issuer=provider.issuer, oidc_audience=AUDIENCE, oidc_roles=ROLES
    )
    with running(settings) as made:
        yield made


@pytest.fixture
def vision(client: Client) -> str:
    """The id of the project that most claims are about."""
    return new_project(client, "vision")


@pytest.fixture(scope="session")
def sqlite_url(
    tmp_path_factory: pytest.TempPathFactory, migrated_template: Callable[[str], str]
) -> Callable[[], str]:
    """Fresh SQLite databases, for what looks the same on both."""

    def new() -> str:
        path = tmp_path_factory.mktemp("sso") / "mooring.db"
        path.write_bytes(Path(migrated_template("sqlite").removeprefix("sqlite:///")).read_bytes())
        return f"sqlite:///{path}"

    return new


def new_project(client: Client, name: str) -> str:
    answer = client.post("/v1/projects", json={"name": name})
    assert answer.status_code == 201, answer.text
    return str(answer.json()["id"])
