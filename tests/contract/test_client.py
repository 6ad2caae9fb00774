"""A client that a third-party generator creates from the document works."""

import json
import os
from pathlib import Path

from tests.contract.tools import FOLDER, python_tool, run
from tests.nodes import simulated_node
from tests.service import ADMIN_KEY, Client


def test_a_generated_client_manages_an_instance(client: Client, document_file: Path, tmp_path: Path) -> None:
    generator = python_tool("openapi-python-client")
    made = run(
        generator,
        "generate",
        f"--path={document_file}",
        f"--output-path={tmp_path / 'mooring_client'}",
        "--meta=none",
        "--fail-on-warning",
        # The generator formats its output with the ruff of its environment.
        PATH=f"{generator.parent}{os.pathsep}{os.environ['PATH']}",
    )
    assert made.returncode == 0, made.stdout
    with simulated_node(client, tmp_path / "node", "gpu-1"):
        session = run(
            generator.with_name("python"),
            FOLDER / "client_session.py",
            str(client.base_url),
            ADMIN_KEY,
            PYTHONPATH=str(tmp_path),
        )
    assert session.returncode == 0, session.stdout
    shown = json.loads(session.stdout)
    assert (shown["state"], len(shown["devices"])) == ("running", 2)
