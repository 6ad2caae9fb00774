"""The document that the tests of the contract read."""

from pathlib import Path
from typing import Any

import pytest

from tests.contract import document as documents


@pytest.fixture(scope="session")
def document() -> dict[str, Any]:
    """The OpenAPI document of a running service."""
    return documents.current()


@pytest.fixture(scope="session")
def document_file(document: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same as a file, for programs; named as spectral.yaml expects it."""
    path = tmp_path_factory.mktemp("document") / "openapi.json"
    path.write_text(documents.as_text(document))
    return path
