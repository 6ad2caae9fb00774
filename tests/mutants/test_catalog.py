"""The list of mutants fits the code: the text of each guard is in the source, and each named test exists."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutants.catalog import ROOT, Mutant, load

MUTANTS = load()
SECURITY = (ROOT / "docs" / "security.md").read_text()


def _ids(mutant: Mutant) -> str:
    return mutant.name


def test_names_are_unique() -> None:
    names = [mutant.name for mutant in MUTANTS]
    assert sorted(set(names)) == sorted(names)


def test_every_rule_of_the_security_page_has_a_mutant() -> None:
    rules = set(re.findall(r"^\| (R\d+) \|", SECURITY, re.MULTILINE))
    assert sorted(rules - {mutant.rule for mutant in MUTANTS}) == []


@pytest.mark.parametrize("mutant", MUTANTS, ids=_ids)
def test_the_guard_is_in_the_source_exactly_once(mutant: Mutant) -> None:
    text = (ROOT / mutant.file).read_text()
    assert text.count(mutant.find) == 1
    assert mutant.find != mutant.replace
    if mutant.file.endswith(".py"):
        ast.parse(text.replace(mutant.find, mutant.replace))


@pytest.mark.parametrize("mutant", MUTANTS, ids=_ids)
def test_the_named_test_exists(mutant: Mutant) -> None:
    path, _, name = mutant.test.partition("::")
    function = name.split("[")[0].split("::")[-1]
    assert function, "name one test, not a whole file"
    tree = ast.parse(Path(ROOT / path).read_text())
    defined = {
        node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert function in defined


def test_pytest_finds_every_named_test(request: pytest.FixtureRequest) -> None:
    """Including parameters, which only pytest knows. A second pytest collects those that this run did not."""
    collected = {item.nodeid for item in request.session.items}
    collected |= {nodeid.partition("[")[0] for nodeid in collected}
    if missing := {mutant.test for mutant in MUTANTS} - collected:
        argv = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
        done = subprocess.run(
            [*argv, *sorted(missing)], capture_output=True, text=True, check=False, cwd=ROOT
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.mark.parametrize("mutant", [mutant for mutant in MUTANTS if mutant.rule.startswith("R")], ids=_ids)
def test_the_security_page_names_the_test_for_the_rule(mutant: Mutant) -> None:
    row = re.search(rf"^\| {mutant.rule} \|.*$", SECURITY, re.MULTILINE)
    assert row
    assert f"`{mutant.test.partition('::')[0]}`" in row.group()
