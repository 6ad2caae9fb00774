"""The OpenAPI document for the contract tests."""

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
    """The document as a file, with the name that spectral.yaml expects."""
    path = tmp_path_factory.mktemp("document") / "openapi.json"
    path.write_text(documents.as_text(document))
    return path
