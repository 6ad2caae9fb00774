"""The list of mutants: one TOML file per area in this folder.

A mutant names a guard in the source by its exact text, what the text becomes when the guard is removed, and
the one test that must then fail.
"""

import tomllib
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]


@dataclass(frozen=True, slots=True)
class Mutant:
    """One guard removed from the source.

    `find` occurs exactly once in `file`, a path relative to the repository. `test` is a pytest node id.
    `rule` is a rule of docs/security.md (R7), a finding of the audit (F4), or the area.
    """

    name: str
    rule: str
    file: str
    find: str
    replace: str
    test: str

    def apply(self, root: Path) -> str:
        """Remove the guard in the tree at `root`.

        Returns:
            The original text of the file, to restore it.

        Raises:
            ValueError: the text to find does not occur exactly once.
        """
        path = root / self.file
        original = path.read_text()
        if original.count(self.find) != 1:
            raise ValueError(
                f"{self.name}: the text to find occurs {original.count(self.find)} times in {self.file}"
            )
        path.write_text(original.replace(self.find, self.replace))
        return original


def load() -> list[Mutant]:
    """All mutants, ordered by file and position."""
    return [
        Mutant(**entry)
        for path in sorted(FOLDER.glob("*.toml"))
        for entry in tomllib.loads(path.read_text())["mutant"]
    ]
