"""PUT requests that apply all fields of a resource: their transaction, their answer and their dry run."""

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Final, TypeVar

from fastapi import Query
from pydantic import BaseModel
from pydantic_core import to_json
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from mooring.api.context import Context
from mooring.api.http.responses import json_answer, respond
from mooring.api.openapi.responses import Responses
from mooring.control import applying
from mooring.control.applying import ApplyOutcome, ApplyResult
from mooring.control.audit import audit_log
from mooring.control.idempotency import StoredAnswer
from mooring.control.tenants import storage
from mooring.core.access import Access
from mooring.core.json_differences import ABSENT, JsonDifference
from mooring_client.errors import Conflict, Invalid, MooringError, NameTaken
from mooring_client.schemas.applying import ApplyPlan
from mooring_client.schemas.base import Json

HEADER: Final = "Mooring-Applied"
# Requests for one name that meet at its unique index: the loser finds, when it repeats, what the winner made.
_TRIES: Final = 5
# Values of env may be secrets, URLs of webhooks often are, and plans are printed in logs of CI.
_HIDDEN: Final = ("/env/", "/template/env/", "/spec/env/", "/url")
Row = TypeVar("Row")

DryRunOption = Annotated[
    bool, Query(description="only report what the request would do; everything else is checked as always")
]


async def answer(
    context: Context,
    access: Access,
    noun: str,
    operation: Callable[[Session], ApplyResult[Any]],
    show: Callable[[Session, Any, int], StoredAnswer],
    *,
    dry_run: bool = False,
) -> Response:
    """Run an operation in a transaction, and answer 201 if it has created something, otherwise 200.

    A dry run does the same and rolls back, so its result is that of the request.

    Args:
        noun: of the resource, for messages.
        show: the answer with a row and a status.

    Raises:
        RequiresReplacement: the operation has found fields that cannot be changed. Not in a dry run.
    """
    act = partial(_once, context, access, noun, operation, show, dry_run=dry_run)
    return respond(await run_in_threadpool(_repeated, act))


def _repeated(act: Callable[[], StoredAnswer]) -> StoredAnswer:
    for left in reversed(range(_TRIES)):
        try:
            return act()
        except (MooringError, IntegrityError) as error:
            if not left or not _is_outdated(error):
                raise
    raise AssertionError("the last try has returned or raised")


def _is_outdated(error: Exception) -> bool:
    """Whether another request has just changed what the transaction had read, so that it can be repeated."""
    return type(error) in {IntegrityError, NameTaken, Conflict}


def _once(
    context: Context,
    access: Access,
    noun: str,
    operation: Callable[[Session], ApplyResult[Any]],
    show: Callable[[Session, Any, int], StoredAnswer],
    *,
    dry_run: bool,
) -> StoredAnswer:
    with context.database.write(commit=not dry_run) as session:
        recorded = audit_log.recorded(session)
        result = operation(session)
        if audit_log.recorded(session) != recorded + result.has_written:
            raise AssertionError(f"{access.action} must write a row of the audit log for each change")
        if dry_run:
            shown = json_answer(_plan(result))
        elif result.outcome is ApplyOutcome.REQUIRES_REPLACEMENT:
            raise applying.requires_replacement(noun, result.row.id, result.fixed)
        else:
            shown = show(session, result.row, 201 if result.outcome is ApplyOutcome.CREATED else 200)
            shown.headers[HEADER] = str(result.outcome)
        storage.enforce(session, context.storage_limits)
    return shown


def _plan(result: ApplyResult[Any]) -> Json:
    is_new = result.outcome is ApplyOutcome.CREATED
    changes = [_change(each, fixed=each.pointer in result.fixed) for each in result.differences]
    return {
        "outcome": str(result.outcome),
        "id": None if is_new else result.row.id,
        "changes": changes,
    }


def _change(difference: JsonDifference, *, fixed: bool) -> Json:
    hidden = difference.pointer.startswith(_HIDDEN)
    before, after = (
        None if hidden or value is ABSENT else to_json(value).decode()
        for value in (difference.before, difference.after)
    )
    return {"pointer": difference.pointer, "before": before, "after": after, "fixed": fixed}


def require_same_name(in_path: str, in_body: str | None) -> None:
    """Raises Invalid: the body names another resource than the path."""
    if in_body not in {None, in_path}:
        message = f"the path names {in_path}, and the body {in_body}; omit the name in the body"
        raise Invalid(message, errors=[{"pointer": "/name", "code": "name_differs", "message": message}])


_HEADERS: Final[Json] = {HEADER: {"$ref": f"#/components/headers/{HEADER}"}}
DOCUMENTED_CHANGE: Final[Responses] = {
    200: {"description": "The resource as requested.", "headers": _HEADERS}
}


def documented(model: type[BaseModel]) -> Responses:
    """The successful answers of an operation that creates or changes a resource by its name."""
    return {
        200: {
            "model": model | ApplyPlan,
            "description": "The resource, which existed; or the plan of a dry run.",
            "headers": _HEADERS,
        },
        201: {"model": model, "description": "The new resource.", "headers": _HEADERS},
    }
