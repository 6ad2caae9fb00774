"""Makes `mooring_client.operations` from the methods of the client: which method calls which operation.

`make client` runs it. tests/client/test_sync.py fails if the result is not the committed one.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

CLIENT = Path(__file__).parents[1] / "src" / "mooring_client"
TARGET = CLIENT / "operations.py"
HEAD = '''\
"""The operations of the API, and the method of the SDK for each."""

# Generated: change `aio`, and run `make client`.
from collections.abc import Mapping
from typing import Final

# `operationId` -> the method of `Mooring` and `AsyncMooring`.
OPERATIONS: Final[Mapping[str, str]] = {
'''
Function = ast.FunctionDef | ast.AsyncFunctionDef


class _Source:
    """All classes and functions of `aio`."""

    def __init__(self) -> None:
        self._classes: dict[str, tuple[Path, ast.ClassDef]] = {}
        self._functions: dict[tuple[Path, str], Function] = {}
        for path in sorted((CLIENT / "aio").rglob("*.py")):
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.ClassDef):
                    self._classes[node.name] = path, node
                elif isinstance(node, Function):
                    self._functions[path, node.name] = node

    def operations(self) -> dict[str, str]:
        """The method of each operation. Of several, such as one for dry runs, the first."""
        found: dict[str, str] = {}
        for attribute, kind in self._resources():
            for path, method in self._methods(kind):
                for operation in self._called(path, method):
                    found.setdefault(operation, f"{attribute}.{method.name}")
        return found

    def _resources(self) -> Iterator[tuple[str, str]]:
        """Yield the attributes of the client, with the names of their classes."""
        _, client = self._classes["AsyncMooring"]
        for node in client.body:
            if isinstance(node, Function) and "cached_property" in map(ast.unparse, node.decorator_list):
                assert isinstance(node.returns, ast.Constant)
                yield node.name, str(node.returns.value)

    def _methods(self, kind: str) -> Iterator[tuple[Path, Function]]:
        """Yield the public methods of a class and its bases."""
        path, found = self._classes[kind]
        for node in found.body:
            if isinstance(node, Function) and not node.name.startswith("_"):
                yield path, node
        for base in found.bases:
            yield from self._methods(ast.unparse(base))

    def _called(self, path: Path, function: Function) -> Iterator[str]:
        """Yield the operations of the `Call`s in a function, and in the functions that it calls."""
        for node in ast.walk(function):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                name = node.func.id
                if name == "Call":
                    fields = {each.arg: each.value for each in node.keywords}
                    yield ast.literal_eval(fields["operation"])
                else:
                    for each, helper in self._functions.items():
                        if each == (path, name) or (each[1] == name and not name.startswith("_")):
                            yield from self._called(each[0], helper)


def generated() -> str:
    """The text of the module."""
    found = _Source().operations()
    return "".join([HEAD, *(f'    "{name}": "{found[name]}",\n' for name in sorted(found)), "}\n"])


if __name__ == "__main__":
    TARGET.write_text(generated())
