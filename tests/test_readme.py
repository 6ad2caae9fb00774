"""Runs the sessions in the README and the docs, and checks that they show what the commands print."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mooring.settings import Settings
from tests.nodes import simulated_node
from tests.service import ADMIN_KEY, running, settings_for
from tests.testbed.parts import program, require
from tests.testbed.workspace import Workspace
from tests.walk.product import GatewayProcess, clean_environment

ROOT = Path(__file__).parents[1]
PYTHON = Path(sys.executable).parent
PROMPTS = ("$ ", "> ")  # of a command, and of a line that continues one
CHANGING = [
    (re.compile(r"[0-9a-hjkmnp-tv-z]{26}"), "<ulid>"),
    (re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"), "<uuid>"),
    (re.compile(r"   [0-9]s\b"), "   <age>"),
]


def session(page: Path) -> tuple[list[str], str]:
    """The commands in the console blocks of a page, and the output that the page shows."""
    lines = [
        line
        for block in page.read_text().split("```console\n")[1:]
        for line in block.split("```")[0].splitlines()
    ]
    commands = [line[2:] for line in lines if line.startswith(PROMPTS)]
    return commands, "\n".join(line for line in lines if not line.startswith(PROMPTS))


@pytest.mark.parametrize(
    "page",
    [
        "README.md", "docs/tenancy.md", "docs/scheduling.md", "docs/access.md", "docs/cli.md", "docs/sdk.md",
        "docs/templates.md", "docs/webhooks.md", "docs/volumes.md", "docs/skypilot.md",
    ],
)  # fmt: skip
def test_a_session_prints_what_its_page_shows(page: str, workspace: Workspace, tmp_path: Path) -> None:
    require("curl")
    commands, shown = session(ROOT / page)
    gateway_port, ssh_port, proxy_port, receiver_port = (workspace.take_port() for _ in range(4))
    settings = settings_for(
        f"sqlite:///{tmp_path / 'mooring.db'}",
        tmp_path,
        ssh_port=ssh_port,
        proxy_port=proxy_port,
        skypilot_image="mooring-test/skypilot-ready:1",
        webhook_allowed_networks="127.0.0.0/8",
    )
    with (
        running(settings) as service,
        service.client as admin,
        simulated_node(admin, tmp_path / "node", "sim-1"),
        running_gateway(settings, gateway_port, tmp_path),
    ):
        addresses = {
            "127.0.0.1:8700": service.url.removeprefix("http://"),
            "127.0.0.1:8720": f"127.0.0.1:{gateway_port}",
            "127.0.0.1:8721": f"127.0.0.1:{proxy_port}",
            "Port 8722": f"Port {ssh_port}",
            "127.0.0.1:9000": f"127.0.0.1:{receiver_port}",
            '("127.0.0.1", 9000)': f'("127.0.0.1", {receiver_port})',
            "-p 8722": f"-p {ssh_port}",
        }
        script = "\n".join(commands)
        for documented, real in addresses.items():
            script, shown = script.replace(documented, real), shown.replace(documented, real)
        done = subprocess.run(
            [program("bash"), "-euc", script],
            env={
                **clean_environment(),
                "MOORING_KEY": ADMIN_KEY,
                "PATH": f"{PYTHON}:{os.environ['PATH']}",
                "HOME": str(tmp_path),
            },
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=100,
            check=False,
        )
    for port in (gateway_port, ssh_port, proxy_port, receiver_port):
        workspace.give_back_port(port)
    printed = done.stdout.replace(str(tmp_path), "~")
    assert unchanging(printed.strip()) == unchanging(shown.strip())


@contextmanager
def running_gateway(settings: Settings, port: int, folder: Path) -> Iterator[None]:
    """Within the block, a gateway of the service with these settings."""
    environment = clean_environment() | {
        "MOORING_DATA_DIR": str(settings.data_dir),
        "MOORING_DATABASE_URL": settings.resolved_database_url,
    }
    ports = port, settings.ssh_port, settings.proxy_port
    gateway = GatewayProcess(environment, folder, "127.0.0.1", *ports)
    gateway.start()
    try:
        yield
    finally:
        gateway.stop()


def unchanging(text: str) -> str:
    for pattern, name in CHANGING:
        text = pattern.sub(name, text)
    return text
