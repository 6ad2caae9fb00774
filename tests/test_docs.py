"""The documentation and the docstrings name existing files, functions and tests, and links resolve."""

import ast
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "mooring"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
MODULES = sorted((ROOT / "src").rglob("*.py"))
FOLDERS = ("src", "tests", "benchmarks", "scripts", "migrations")
PYTHON_FILES = [path.as_posix() for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
DECISIONS = sorted((ROOT / "docs" / "decisions").glob("*.md"))
SECURITY = (ROOT / "docs" / "security.md").read_text()
WALK = (ROOT / "docs" / "walk.md").read_text()
GLOSSARY = (ROOT / "docs" / "glossary.md").read_text()
RULES = 32
# One printed page.
MAX_GLOSSARY_LINES = 61
TERMS = re.split(
    r",\s+",
    """project, instance, group, share, reservation, quota, node, agent, GPU, MIG device, device, allocation,
    attempt, session, generation, revision, report, incident, request, unit, scheduling cycle, snapshot,
    cluster state, placement, refusal, backfill slot, forecast, eviction, explanation, operation, loop,
    answer""",
)


DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
TABLES = ("nodes", "gpus", "instances", "instance_groups", "reservations", "projects", "allocations")


def test_every_security_rule_is_listed_once_and_names_existing_modules() -> None:
    rules = re.findall(r"^\| (R\d+) \| (.+?) \|", SECURITY, re.MULTILINE)
    assert [name for name, _text in rules] == [f"R{number}" for number in range(1, RULES + 1)]
    for name, text in rules:
        for module in re.findall(
            r"\b((?<![a-z_]/)(?:agent|api|control|core|db|mooring_client)/[a-z_/]+\.py|settings\.py)", text
        ):
            assert any((root / module).exists() for root in (SOURCE, SOURCE.parent)), f"{name}: {module}"


def test_every_test_file_of_the_security_page_exists() -> None:
    named = set(re.findall(r"`(tests/[a-z_/]+\.py)`", SECURITY))
    assert len(named) > 30
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []


def test_links_between_pages_resolve() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name}: {target}"


def _expanded(path: str) -> Iterator[str]:
    """`a/{b,c}.py` as `a/b.py` and `a/c.py`."""
    if (match := re.search(r"\{([^}]*)\}", path)) is None:
        yield path
    else:
        for part in match[1].split(","):
            yield path[: match.start()] + part + path[match.end() :]


@pytest.mark.parametrize("page", [*PAGES, *MODULES], ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_named_python_file_exists(page: Path) -> None:
    named = re.findall(r"(?<![\w./{},])((?:[\w{},]+/)+[\w{},]+\.py)\b", page.read_text())
    paths = [f"/{path}" for name in named for path in _expanded(name)]
    assert [path for path in paths if not any(each.endswith(path) for each in PYTHON_FILES)] == []


def test_every_path_of_the_walk_exists() -> None:
    paths = re.findall(r"`([a-z_]+/[a-z_/{},.]*)(?:: (\w+))?`", WALK)
    assert len(paths) > 40
    for name, function in paths:
        for path in _expanded(name):
            found = next(
                (root / path for root in (SOURCE, SOURCE.parent, ROOT) if (root / path).exists()), None
            )
            assert found is not None, path
            assert not function or re.search(rf"(def|class) {function}\b", found.read_text()), (
                path,
                function,
            )


@cache
def _defined() -> dict[str, set[str]]:
    """Names by their owner: a module, class or table. A class counts as owner of all names of its module."""
    defined: dict[str, set[str]] = defaultdict(set)
    for path in MODULES:
        nodes = list(ast.walk(ast.parse(path.read_text())))
        names = {node.name for node in nodes if isinstance(node, DEFINITIONS)}
        names |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        names |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
        owners = [path.stem, *(node.name for node in nodes if isinstance(node, ast.ClassDef))]
        owners += TABLES if path.parent.name == "tables" else []
        for owner in owners:
            defined[owner] |= names
    return defined


@pytest.mark.parametrize("page", [*PAGES, *MODULES], ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_name_with_its_module_or_class_exists(page: Path) -> None:
    """Pages also have names of API fields, such as `network.used`, so only classes are checked there."""
    defined = _defined()
    owners = defined if page in MODULES else [name for name in defined if name[0].isupper()]
    missing = [
        f"{owner}.{name}"
        for owner, name in re.findall(r"`([A-Za-z_]+)\.([A-Za-z_]+)`", page.read_text())
        if owner in owners and name not in defined[owner] | {"py", "toml", "json"}
    ]
    assert missing == []


def test_decisions_are_numbered_without_gaps() -> None:
    for number, path in enumerate(DECISIONS, 1):
        assert path.name.startswith(f"{number:04}-")
        assert path.read_text().startswith(f"# {number}. ")


def test_every_dependency_has_a_reason() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    client = tomllib.loads((ROOT / "client" / "pyproject.toml").read_text())["project"]
    requirements = [
        *project["dependencies"], *client["dependencies"], *project["optional-dependencies"]["dev"]
    ]  # fmt: skip
    names = [re.split(r"[><=;\s]", requirement)[0] for requirement in requirements]
    reasons = next(path for path in DECISIONS if path.name.startswith("0002")).read_text()
    assert [name for name in names if name not in reasons] == []


def test_the_glossary_is_short_and_has_every_term() -> None:
    assert len(GLOSSARY.splitlines()) <= MAX_GLOSSARY_LINES
    listed = re.findall(r"^\| ([^|]+?) \| [^|]+ \|$", GLOSSARY, re.MULTILINE)
    terms = [term for term in listed if term not in {"term", "---"}]
    assert len(terms) == len(set(terms))
    assert [term for term in TERMS if term not in terms] == []
