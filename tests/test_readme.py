"""The sessions of the README and the docs, run word for word: what they show is what the product prints."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.nodes import simulated_node
from tests.service import ADMIN_KEY, running, settings_for
from tests.testbed.parts import program, require

ROOT = Path(__file__).parents[1]
PROMPTS = ("$ ", "> ")  # the second goes on with the line before
VOLATILE = [
    (re.compile(r"[0-9a-hjkmnp-tv-z]{26}"), "<ulid>"),
    (re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"), "<uuid>"),
]


def session(page: Path) -> tuple[list[str], str]:
    """The commands of a page's console blocks, and all that they show."""
    lines = [
        line
        for block in page.read_text().split("```console\n")[1:]
        for line in block.split("```")[0].splitlines()
    ]
    commands = [line[2:] for line in lines if line.startswith(PROMPTS)]
    return commands, "\n".join(line for line in lines if not line.startswith(PROMPTS))


@pytest.mark.parametrize("page", ["README.md", "docs/tenancy.md", "docs/scheduling.md"])
def test_a_session(page: str, tmp_path: Path) -> None:
    require("curl")
    commands, shown = session(ROOT / page)
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
            cwd=tmp_path,
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
