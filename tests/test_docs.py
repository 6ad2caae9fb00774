"""The documentation names existing tests and modules, and its links resolve."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
SECURITY = (ROOT / "docs" / "security.md").read_text()
RULES = 32


def test_every_security_rule_is_listed_once_and_names_existing_modules() -> None:
    rules = re.findall(r"^\| (R\d+) \| (.+?) \|", SECURITY, re.MULTILINE)
    assert [name for name, _held in rules] == [f"R{number}" for number in range(1, RULES + 1)]
    for name, held in rules:
        for module in re.findall(
            r"\b((?:agent|api|control|core|db|schemas)/[a-z_/]+\.py|settings\.py)", held
        ):
            assert (ROOT / "src" / "mooring" / module).exists(), f"{name}: {module}"


def test_every_named_test_exists() -> None:
    named = set(re.findall(r"`(tests/[a-z_/]+\.py)`", SECURITY))
    assert len(named) > 30
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []


def test_links_between_pages_resolve() -> None:
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        for target in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name}: {target}"
