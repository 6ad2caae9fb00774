"""A service with two tenants that the tests of a module share."""

from collections.abc import Callable, Iterator

import pytest

from tests.api.conftest import copied
from tests.conftest import DATABASES
from tests.service import running, settings_for
from tests.tenancy.tenants import IMAGE, Setup, setup_of


@pytest.fixture(scope="module", params=DATABASES)
def setup(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    migrated_template: Callable[[str], str],
) -> Iterator[Setup]:
    folder = tmp_path_factory.mktemp("tenancy")
    with (
        copied(request, migrated_template(request.param), folder) as url,
        running(settings_for(url, folder / "data", rate_limits="off", skypilot_image=IMAGE)) as service,
        service.client as admin,
        setup_of(service, admin, folder / "node") as made,
    ):
        yield made
