"""Rules that hold in all of the source."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from fastapi import APIRouter, FastAPI

from mooring.api.auth import authorization
from mooring_client import errors

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"
TESTS = ROOT / "tests"
BENCHMARKS = ROOT / "benchmarks"
FILES = sorted(SOURCE.rglob("*.py"))
MAX_LINES = 400
# Only modules in these may open a transaction.
EDGES = ("api/", "loops/", "auth/", "gateway/", "streams/", "server.py", "cli/", "db/")
MAX_FUNCTION_LINES = 50
CODE = re.compile(r"[a-z][a-z0-9_]*")
COMMAND = re.compile(r"[\w.]*:(\w+)")  # f"{_CLI}.doctor:doctor" is the constant ".doctor:doctor"
BULK_UPDATE = re.compile(r"(?<![\w.])update\(|bulk_update")
STATE_IN_SQL = re.compile(r"(?is)update\s+instances\s.*\bset\b.*\bstate\s*=")


def _name(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix().removeprefix("mooring/")


def _of_client(path: Path) -> bool:
    return path.is_relative_to(SOURCE / "mooring_client")


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def _nodes(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(_tree(path)))


def _called(node: ast.AST) -> str:
    """The last part of the called name: `commit` of `session.commit()`; empty if the node is no call."""
    if not isinstance(node, ast.Call):
        return ""
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_files_are_short_and_have_a_docstring(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") < MAX_LINES
    if text.strip() and path.name != "__main__.py":
        assert ast.get_docstring(_tree(path)), f"{_name(path)} does not say what it is for"


def test_functions_are_short() -> None:
    """Without their parameters: a command has one a line for each of its options."""
    long = {
        (_name(path), node.name)
        for path in FILES
        for node in _nodes(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or 0) - node.body[0].lineno + 2 > MAX_FUNCTION_LINES
    }
    assert not long


def test_signal_handlers_do_nothing() -> None:
    """A handler runs in the main thread, which may be blocked, and it interrupts this thread anywhere.

    So it may run too late, and can deadlock if it sets an event. `signal.set_wakeup_fd` has neither problem.
    The handler `before` may be restored.
    """
    handlers = [
        (_name(path), ast.unparse(node.args[1]))
        for path in FILES
        for node in _nodes(path)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "signal.signal"
    ]
    assert handlers
    allowed = re.compile(r"lambda \*_: None|signal\.SIG_(IGN|DFL)|before")
    assert [each for each in handlers if not allowed.fullmatch(each[1])] == []


def test_tests_wait_for_conditions_and_never_sleep() -> None:
    """A fixed sleep is too short on a busy machine and too long on an idle one."""
    sleeps = {
        path.relative_to(TESTS).as_posix()
        for path in TESTS.rglob("*.py")
        # The simulation sleeps in virtual time.
        if not {".venv", "node_modules", "simulation"} & set(path.parts)
        for node in ast.walk(ast.parse(path.read_text()))
        if _called(node) == "sleep" and ast.unparse(node) != "asyncio.sleep(0)"
    }
    # Both wait for a condition until a deadline. The hooks cannot import the first.
    assert sleeps == {"testbed/waiting.py", "contract/schemathesis_hooks.py"}


def test_no_two_modules_define_classes_of_one_name() -> None:
    """Of one distribution, without tables and schemas: a table, its schema and a class may share a name."""
    where: dict[tuple[bool, str], list[str]] = {}
    for path in FILES:
        name = _name(path)
        if not name.startswith(("db/tables", "schemas/", "mooring_client/schemas/")):
            for node in _nodes(path):
                if isinstance(node, ast.ClassDef):
                    where.setdefault((_of_client(path), node.name), []).append(name)
    shared = {name: files for name, files in where.items() if len(files) > 1}
    assert not shared, shared


def test_what_is_defined_is_used() -> None:
    """Loggers in their module; functions in the product or in a benchmark.

    A decorator or a base class may call what they know: such functions are left out.
    """
    used = {name for path in (*FILES, *BENCHMARKS.glob("*.py")) for name in _used_names(path)}
    unused = [(_name(path), name) for path in FILES for name in _loggers(path) - _used_names(path)]
    unused += [(_name(path), name) for path in FILES for name in _called_by_name(path) - used]
    assert not unused, unused


@cache
def _used_names(path: Path) -> frozenset[str]:
    """Names that are read, and the functions in tables of commands, such as `"mooring.cli.doctor:doctor"`."""
    read = {
        node.id for node in _nodes(path) if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Store)
    }
    attributes = {node.attr for node in _nodes(path) if isinstance(node, ast.Attribute)}
    commands = {
        match[1]
        for node in _nodes(path)
        if isinstance(node, ast.Constant) and (match := COMMAND.fullmatch(str(node.value)))
    }
    return frozenset(read | attributes | commands)


def _loggers(path: Path) -> set[str]:
    assigned = (node for node in _tree(path).body if isinstance(node, ast.Assign))
    return {
        target.id
        for node in assigned
        for target in node.targets
        if isinstance(target, ast.Name) and _called(node.value) == "getLogger"
    }


def _called_by_name(path: Path) -> set[str]:
    """Functions, and methods of classes without a base class."""
    bodies = [_tree(path).body]
    bodies += [node.body for node in _nodes(path) if isinstance(node, ast.ClassDef) and not node.bases]
    return {
        node.name
        for body in bodies
        for node in body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and not node.decorator_list
        and not node.name.startswith("__")
    }


def test_only_the_session_commits() -> None:
    commits = [
        (_name(path), node.lineno)
        for path in FILES
        for node in _nodes(path)
        if isinstance(node, ast.Call) and _called(node) in {"commit", "rollback"}
    ]
    assert {name for name, _line in commits} == {"db/session.py"}, commits


def test_sessions_are_opened_at_the_edges_only() -> None:
    for path in FILES:
        opened = [
            node.lineno
            for node in _nodes(path)
            if isinstance(node, ast.Call)
            and (_called(node) in {"Session", "sessionmaker", "scoped_session"} or _opens(node))
        ]
        assert not opened or _name(path).startswith(EDGES), (_name(path), opened)


def _opens(node: ast.AST) -> bool:
    """Whether it calls `read()` or `write()` of an object with a name that ends in `database` or `db`."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    owner = ast.unparse(node.func.value)
    return node.func.attr in {"read", "write"} and owner.endswith(("database", "db"))


def test_control_scheduler_core_and_schemas_import_no_network_library() -> None:
    for path in FILES:
        if not _name(path).startswith(
            ("control/", "scheduler/", "core/", "schemas/", "mooring_client/schemas/")
        ):
            continue
        imported = {
            name.split(".")[0]
            for node in _nodes(path)
            if isinstance(node, ast.Import | ast.ImportFrom)
            for name in (
                [node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
            )
        }
        assert not imported & {"fastapi", "starlette", "uvicorn", "httpx", "requests", "socket"}, _name(path)


def test_no_dependency_runs_code_after_the_answer() -> None:
    """FastAPI runs the code after a dependency's `yield` once the answer is sent. If a commit there failed,
    the client would have received a success.
    """
    injected, generators = set(), {}
    for path in FILES:
        if not _name(path).startswith("api/"):
            continue
        for node in _nodes(path):
            if _called(node) in {"Depends", "Security"} and isinstance(node, ast.Call) and node.args:
                injected.add(ast.unparse(node.args[0]).split(".")[-1])
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and any(
                isinstance(part, ast.Yield | ast.YieldFrom) for part in ast.walk(node)
            ):
                generators[node.name] = _name(path)
    assert len(injected) > 5
    assert injected & generators.keys() == set()


def test_only_new_row_move_and_assign_write_an_instances_state() -> None:
    written = {
        (_name(path), scope.name if isinstance(scope, ast.FunctionDef) else "")
        for path in FILES
        if not (_name(path).startswith("agent/") or _of_client(path))  # they cannot import db
        for scope in _scopes(_tree(path))
        if _writes_state(scope, bulk=bool(BULK_UPDATE.search(path.read_text())))
    }
    assert written == {
        ("control/instances/instances.py", "new_row"),
        ("control/instances/instances.py", "move"),
        ("control/instances/placements.py", ""),  # the statements that `assign` executes
    }


def _scopes(tree: ast.Module) -> Iterator[ast.AST]:
    """Every function, and the statements of the module that are outside of functions and classes."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    yield from functions
    rest = [node for node in tree.body if not isinstance(node, ast.FunctionDef | ast.ClassDef)]
    yield ast.Module(body=rest, type_ignores=[])


def _writes_state(scope: ast.AST, *, bulk: bool) -> bool:
    """Whether the scope assigns `x.state`, or has an INSERT or UPDATE of instances that sets `state`.

    Args:
        bulk: the file has UPDATE statements, so a dict with the key "state" may be the values of one.
    """
    for node in ast.walk(scope):
        match node:
            case ast.Attribute(attr="state", ctx=ast.Store()):
                return True
            case ast.Call() if _called(node) in {"values", "Instance"}:
                if any(keyword.arg == "state" for keyword in node.keywords):
                    return True
            case ast.Call() if _called(node) == "setattr":
                if "state" in _texts(node.args[1:2]):
                    return True
            case ast.Dict() if any(_names_state(key, bulk=bulk) for key in node.keys):
                return True
            case ast.Constant(value=str(sql)) if STATE_IN_SQL.search(sql):
                return True
    return False


def _names_state(key: ast.expr | None, *, bulk: bool) -> bool:
    if isinstance(key, ast.Constant):
        return bulk and key.value == "state"
    return isinstance(key, ast.Attribute) and key.attr == "state"


def codes_in_source() -> dict[str, str]:
    """Every code that the source can send, and the file and line where it first occurs."""
    found: dict[str, str] = {}
    for path in FILES:
        for node in _nodes(path):
            for code in filter(CODE.fullmatch, _codes(node)):
                found.setdefault(code, f"{_name(path)}:{getattr(node, 'lineno', 0)}")
    return found


def _codes(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Call | ast.ClassDef):
        yield from _texts([keyword.value for keyword in node.keywords if keyword.arg == "code"])
    if isinstance(node, ast.Call):
        if _called(node) in _take_a_code_first():
            yield from _texts(node.args[:1])
    elif isinstance(node, ast.Dict):
        pairs = zip(node.keys, node.values, strict=True)
        yield from _texts(
            [value for key, value in pairs if isinstance(key, ast.Constant) and key.value == "code"]
        )
    elif isinstance(node, ast.Assign):
        target = ast.unparse(node.targets[0])
        yield from _tables(target, node.value)
    elif isinstance(node, ast.AnnAssign) and node.value is not None:
        target = ast.unparse(node.target)
        if target == "code":
            yield from _texts([node.value])
        yield from _tables(target, node.value)


@cache
def _take_a_code_first() -> frozenset[str]:
    """The functions with `code` as their first parameter; found, so that none is missing from a list."""
    functions = [node for path in FILES for node in _nodes(path) if isinstance(node, ast.FunctionDef)]
    parameters = {
        each.name: [a.arg for a in each.args.args if a.arg not in {"self", "cls"}] for each in functions
    }
    return frozenset(name for name, names in parameters.items() if names[:1] == ["code"]) | {
        "PydanticCustomError"
    }


def _tables(target: str, value: ast.expr) -> Iterator[str]:
    """The codes in the tables that map errors of Docker and events of NVML to codes."""
    if target in {"CODES", "RECOVERY_ACTIONS"} and isinstance(value, ast.Dict):
        yield from _texts(value.values)
    if target == "_START_FAILURES" and isinstance(value, ast.List):
        yield from _texts([entry.elts[1] for entry in value.elts if isinstance(entry, ast.Tuple)])


def _texts(values: list[ast.expr]) -> Iterator[str]:
    for value in values:
        for part in ast.walk(value):
            if isinstance(part, ast.Constant) and isinstance(part.value, str):
                yield part.value


def test_every_code_is_documented() -> None:
    documented = set(
        re.findall(r"`([a-z][a-z0-9_]*)(?:<number>)?`", (ROOT / "docs" / "errors.md").read_text())
    )
    sent = codes_in_source()
    assert len(sent) > 90
    missing = {
        code: where for code, where in sent.items() if code not in documented and not code.endswith("_")
    }
    assert not missing, missing


def test_every_documented_error_is_sent() -> None:
    section = (ROOT / "docs" / "errors.md").read_text().split("## Errors")[1].split("\n## ")[0]
    documented = re.findall(r"^\| `([a-z_]+)` \| (\d{3})", section, re.MULTILINE)
    assert len(documented) == len(dict(documented))
    sent = codes_in_source()
    assert [code for code, _status in documented if code not in sent] == []


def test_every_error_code_is_a_class_with_a_row_in_the_documentation() -> None:
    classes = [
        each
        for each in vars(errors).values()
        if isinstance(each, type) and issubclass(each, errors.MooringError)
    ]
    codes = {each.code: each.status for each in classes}
    assert codes.keys() == {*errors.MooringError.by_code, errors.MooringError.code}
    assert len(codes) == len(classes)
    rows = re.findall(
        r"^\| `([a-z_]+)` \| (\d{3}) \|", (ROOT / "docs" / "errors.md").read_text(), re.MULTILINE
    )
    assert {code: int(status) for code, status in rows} == codes


def test_an_error_is_raised_with_the_code_of_its_class() -> None:
    """No other module defines error classes, and no call sets the code, status or title."""
    for path in FILES:
        for node in _nodes(path):
            if isinstance(node, ast.ClassDef) and _name(path) != "mooring_client/errors.py":
                bases = {ast.unparse(base).split(".")[-1] for base in node.bases}
                assert not bases & vars(errors).keys() - {"Any"}, f"{_name(path)}:{node.lineno}"
            if isinstance(node, ast.Call) and isinstance(getattr(errors, _called(node), None), type):
                arguments = {keyword.arg for keyword in node.keywords}
                assert not arguments & {"code", "status", "title"}, f"{_name(path)}:{node.lineno}"


def test_topics_are_made_by_the_enum_or_received() -> None:
    """A misspelt topic would be a silent delay. db/notifications.py makes topics of what PostgreSQL sends."""
    made = {_name(path) for path in FILES for node in _nodes(path) if _called(node) == "ObjectTopic"}
    assert made == {"db/signals.py", "db/notifications.py"}


def test_a_route_without_authorization_fails_at_startup() -> None:
    router = APIRouter(prefix="/v1")

    @router.get("/naked", operation_id="get_health")
    def naked() -> None: ...

    app = FastAPI()
    app.include_router(router)
    with pytest.raises(LookupError, match="not an AuthorizedRoute"):
        authorization.require_all_authorized(app)


def test_a_route_without_a_rule_fails_at_startup() -> None:
    router = APIRouter(route_class=authorization.AuthorizedRoute)

    def forgotten() -> None: ...

    with pytest.raises(LookupError, match="has no row"):
        router.get("/forgotten", operation_id="forgotten")(forgotten)
