"""Words that the project has given up stay out of the source, the documentation and the README."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "src").rglob("*.py"))]
CARD = r"(?<!mooring\.)(?<!\})cards?"  # `mooring.cards` is a label
# Regular expressions of whole words, and what to write instead. Add a word once its last use is gone.
RETIRED = {
    # What the GPUs and the scheduler do.
    CARD: "GPU",
    r"nudg(e|es|ed|ing)": "notify",
    r"kept a moment": "backfill slot",
    r"moments?": "time",
    r"prospects?": "forecast",
    r"outlooks?": "explanation",
    r"census": "node groups",
    r"promises?": "backfill slot, guarantee",
    r"rests": "free per GPU",
    r"supposing": "what-if",
    r"thought away": "ignored",
    r"worlds?": "ClusterState, SchedulerCache, ReconcileInput",
    r"outworn": "should_rebuild",
    r"lasting": "stable, persistent",
    # What the agent does.
    r"crew": "WorkerPools",
    r"hired?": "WorkerPools",
    r"hush(ed)?": "wake",
    r"(mis|dis)trust(s|ed)?": "reject, report_incident",
    r"expel(s|led)?": "kill",
    r"strangers?": "foreign containers, untrusted projects",
    r"made_up": "simulated",
    r"(ear|mouth)s?": "poll thread, push thread",
    # What the control plane does.
    r"sealer": "Encryptor",
    r"sealed": "encrypted",
    r"refuse_\w+": "require_*",
    r"deeds?": "operation",
    r"judge_by": "set_potential",
    r"verdicts?": "fault, outcome",
    r"leave_to_stay": "exclude_present_objects",
    r"_really": "_real",
    # Words that no manual uses.
    r"anew": "again",
    r"broken off": "aborted",
    r"(give|gives|giving|gave) way": "yield",
    r"(let|lets|letting) go of": "release",
    r"in vain": "without success",
    r"somebody": "someone, another program",
    r"thrice": "three times",
    r"told": "notified, applied, reported",
    r"what (became|becomes) of": "the result of",
    r"whoever": "anyone who",
    r"(is|are|was|were) away": "cannot be reached",
}
# Where a word is right all the same: the file, relative to the checkout, and the word's expression.
EXCEPTIONS: set[tuple[str, str]] = {
    # The names of a field in the agent's file, and of a column.
    ("src/mooring/agent/docker/container_records.py", CARD),
    ("src/mooring/agent/docker/derive.py", CARD),
    ("src/mooring/agent/docker/observe.py", CARD),
    ("src/mooring/control/idempotency.py", "sealed"),
    ("src/mooring/control/tenants/encryption.py", "sealed"),
    ("src/mooring/db/tables/history.py", "sealed"),
}


@pytest.mark.parametrize("word", RETIRED)
def test_retired_words_are_not_used(word: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: write {RETIRED[word]!r}: {line.strip()}"
        for path in FILES
        if (path.relative_to(ROOT).as_posix(), word) not in EXCEPTIONS
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(rf"\b{word}\b", line, re.IGNORECASE)
    ]
    assert found == []
