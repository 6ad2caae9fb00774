"""Words that the project has given up stay out of the source, the documentation and the README."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "src").rglob("*.py"))]
# Regular expressions of whole words, and what to write instead. Add a word once its last use is gone.
RETIRED = {
    r"nudg(e|es|ed|ing)": "notify",
    r"kept a moment": "backfill slot",
    r"sealer": "Encryptor",
    r"prospects?": "forecast",
    r"crew": "WorkerPools",
    r"made_up": "simulated",
    r"thrice": "three times",
    r"expel(s|led)?": "kill",
}
# Where a word is right all the same: the file, relative to the checkout, and the word's expression.
EXCEPTIONS: set[tuple[str, str]] = set()


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
