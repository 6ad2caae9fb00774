"""Prints readability metrics of a checkout: `python scripts/figures.py [FOLDER]`."""

import ast
import re
import sys
from collections import defaultdict
from pathlib import Path

FIELDS = ("preemptible", "max_duration_s", "link_score", "usage_half_life_s")
# The form of refusal codes.
CODES = re.compile(r"(?:insufficient|no|not|wrong|node|gpu|group|project|quota)_[a-z_]+|cordoned|draining")


def main() -> None:
    source = Path(sys.argv[1] if len(sys.argv) > 1 else ".") / "src" / "mooring"
    texts = {path.relative_to(source).as_posix(): path.read_text() for path in sorted(source.rglob("*.py"))}
    trees = {name: ast.parse(text) for name, text in texts.items()}
    lines = {name: text.count("\n") for name, text in texts.items()}
    longest = max(lines, key=lines.__getitem__)
    print(f"files\t{len(texts)}\nlines\t{sum(lines.values())}\nlongest file\t{lines[longest]}\t{longest}")
    length, function = max(
        (node.end_lineno - node.lineno + 1, f"{name}:{node.name}")
        for name, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno
    )
    print(f"longest function\t{length}\t{function}")
    for field_or_code in (*FIELDS, *_refusal_codes(trees)):
        files = [name for name, text in texts.items() if re.search(rf"\b{field_or_code}\b", text)]
        print(f"files that name {field_or_code}\t{len(files)}")
    twice = _names_used_twice(trees)
    print(f"class names used twice\t{len(twice)}\t{' '.join(sorted(twice))}")


def _refusal_codes(trees: dict[str, ast.Module]) -> list[str]:
    """The refusal codes of the scheduler's rules: their strings, except names of fields of the model."""
    found = {
        node.value
        for name, tree in trees.items()
        if name.startswith("scheduler/") and name.endswith(("filters.py", "gpu_rules.py", "gpu_shortage.py"))
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and CODES.fullmatch(node.value)
    }
    fields = {
        node.target.id
        for node in ast.walk(trees["scheduler/model.py"])
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    return sorted(found - fields)


def _names_used_twice(trees: dict[str, ast.Module]) -> dict[str, list[str]]:
    """Class names that several files define, except tables and schemas, which share names on purpose."""
    where: dict[str, list[str]] = defaultdict(list)
    for file, tree in trees.items():
        if not file.startswith(("db/tables", "schemas/")):
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    where[node.name].append(file)
    return {name: files for name, files in where.items() if len(files) > 1}


if __name__ == "__main__":
    main()
