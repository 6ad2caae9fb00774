"""The README's session, run word for word: what it shows is what the product prints."""

import os
import re
import subprocess
from pathlib import Path

from tests.nodes import simulated_node
from tests.service import ADMIN_KEY, running, settings_for
from tests.testbed.parts import program, require

README = Path(__file__).parents[1] / "README.md"
VOLATILE = [
    (re.compile(r"[0-9a-hjkmnp-tv-z]{26}"), "<ulid>"),
    (re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"), "<uuid>"),
]


def session() -> tuple[list[str], str]:
    """The commands of the README's console block, and all that it shows."""
    block = README.read_text().split("```console\n")[1].split("```")[0]
    commands = [line.removeprefix("$ ") for line in block.splitlines() if line.startswith("$ ")]
    shown = "\n".join(line for line in block.splitlines() if not line.startswith("$ "))
    return commands, shown


def test_the_session_of_the_readme(tmp_path: Path) -> None:
    require("curl")
    commands, shown = session()
    settings = settings_for(f"sqlite:///{tmp_path / 'mooring.db'}", tmp_path)
    with (
        running(settings) as service,
        service.client as admin,
        simulated_node(admin, tmp_path / "node", "sim-1"),
    ):
        script = "\n".join(commands).replace("http://127.0.0.1:8700", service.url)
        ran = subprocess.run(
            [program("bash"), "-euc", script],
            env={**os.environ, "MOORING_KEY": ADMIN_KEY},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert ran.stderr == ""
    assert steady(ran.stdout.strip()) == steady(shown.strip())


def steady(text: str) -> str:
    for pattern, name in VOLATILE:
        text = pattern.sub(name, text)
    return text
