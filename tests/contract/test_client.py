"""A client that a generator of other people's makes from the document works."""

import json
import os
from pathlib import Path

from tests.contract.tools import FOLDER, python_tool, run
from tests.nodes import simulated_node
from tests.service import ADMIN_KEY, Client


def test_a_generated_client_lives_through_an_instance(
    client: Client, document_file: Path, tmp_path: Path
) -> None:
    generator = python_tool("openapi-python-client")
    made = run(
        generator,
        "generate",
        f"--path={document_file}",
        f"--output-path={tmp_path / 'mooring_client'}",
        "--meta=none",
        "--fail-on-warning",
        # It has its ruff put what it wrote into order.
        PATH=f"{generator.parent}{os.pathsep}{os.environ['PATH']}",
    )
    assert made.returncode == 0, made.stdout
    with simulated_node(client, tmp_path / "node", "gpu-1"):
        done = run(
            generator.with_name("python"),
            FOLDER / "client_session.py",
            str(client.base_url),
            ADMIN_KEY,
            PYTHONPATH=str(tmp_path),
        )
    assert done.returncode == 0, done.stdout
    shown = json.loads(done.stdout)
    assert (shown["state"], len(shown["devices"])) == ("running", 2)
