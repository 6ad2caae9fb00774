"""A client that a third-party generator creates from the document does what the SDK does in its test."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.contract.tools import FOLDER, python_tool, run
from tests.nodes import simulated_node
from tests.service import ADMIN_KEY, Client

METHODS = frozenset({"get", "post", "put", "patch", "delete"})


@pytest.fixture(scope="module")
def generated(document_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that has the generated package `generated`."""
    folder = tmp_path_factory.mktemp("client")
    generator = python_tool("openapi-python-client")
    made = run(
        generator,
        "generate",
        f"--path={document_file}",
        f"--output-path={folder / 'generated'}",
        "--meta=none",
        "--fail-on-warning",
        # The generator formats its output with the ruff of its environment.
        PATH=f"{generator.parent}{os.pathsep}{os.environ['PATH']}",
    )
    assert made.returncode == 0, made.stdout
    return folder


def test_no_operation_is_left_out(generated: Path, document: dict[str, Any]) -> None:
    """The WebSockets are requests with the answer 101 in the document: programs must open them otherwise."""
    described = {
        operation["operationId"]
        for methods in document["paths"].values()
        for method, operation in methods.items()
        if method in METHODS
    }
    modules = {path.stem for path in generated.glob("generated/api/*/*.py")} - {"__init__"}
    assert modules == described


def test_a_generated_client_manages_an_instance(client: Client, generated: Path, tmp_path: Path) -> None:
    with simulated_node(client, tmp_path / "node", "gpu-1"):
        session = run(
            python_tool("python"),
            FOLDER / "client_session.py",
            str(client.base_url),
            ADMIN_KEY,
            PYTHONPATH=str(generated),
        )
    assert session.returncode == 0, session.stdout
    shown = json.loads(session.stdout)
    assert (shown["state"], len(shown["devices"])) == ("running", 2)
