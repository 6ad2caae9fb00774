"""Commands in instances whose output is collected; `routes/streams.py` has those with an input."""

import asyncio
import codecs

from fastapi import APIRouter
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from mooring.api.auth.authorization import CurrentLiveAccess
from mooring.api.context import Context, Ctx
from mooring.api.http import responses, transactions
from mooring.api.http.body import StrictRoute
from mooring.api.http.transactions import CurrentCall
from mooring.api.openapi.responses import errors
from mooring.auth.credentials import LiveAccess
from mooring.control import idempotency
from mooring.schemas.agent_streams import ExecRequest, StreamError, StreamStatus
from mooring.streams.node_streams import ERRORS, NodeStream
from mooring_client.errors import (
    MooringError,
    NodeUnreachable,
    NotFound,
    NotRunning,
    TooManyStreamsOnNode,
)
from mooring_client.schemas.base import Json
from mooring_client.schemas.instances import MAX_OUTPUT_BYTES, ExecBody, ExecResult
from mooring_client.stream_messages import Channel

router = APIRouter(prefix="/v1/instances", tags=["instances"], route_class=StrictRoute)

# Errors after which the command cannot have run.
_NOTHING_RAN = (NotFound, NotRunning, NodeUnreachable, TooManyStreamsOnNode)


@router.post(
    "/{instance_id}/exec",
    response_model=ExecResult,
    responses=errors(NodeUnreachable, TooManyStreamsOnNode, *ERRORS.values()),
    operation_id="exec_in_instance",
)
async def exec_in_instance(
    instance_id: str, body: ExecBody, context: Ctx, call: CurrentCall, live: CurrentLiveAccess
) -> Response:
    """Run a command in an instance. Waits for its end and returns at most 1 MiB of its output."""
    key = call.idempotency_key
    if key is not None:
        # A command runs outside any transaction: the key is claimed before it, the answer stored after it.
        stored = await run_in_threadpool(_claim, context, call)
        if stored is not None:
            return responses.respond(stored, replayed=True)
    try:
        # The output may contain secrets, so it is stored encrypted.
        answer = responses.json_answer(await _exec(context, live, instance_id, body), encrypted=True)
    except MooringError as error:
        # The key is free again only if the command cannot have run.
        if key is not None and isinstance(error, _NOTHING_RAN):
            await asyncio.shield(run_in_threadpool(_abandon, context, call.access.caller.id, key))
        raise
    if key is not None:
        await run_in_threadpool(_store, context, call, answer)
    return responses.respond(answer)


def _claim(context: Context, call: transactions.Call) -> idempotency.StoredAnswer | None:
    with context.database.write() as session:
        return transactions.claim(context, session, call)


def _store(context: Context, call: transactions.Call, answer: idempotency.StoredAnswer) -> None:
    with context.database.write() as session:
        transactions.store(context, session, call, answer)


def _abandon(context: Context, caller: str, key: str) -> None:
    with context.database.write() as session:
        idempotency.abandon(session, caller, key)


async def _exec(context: Context, live: LiveAccess, instance_id: str, body: ExecBody) -> Json:
    request = ExecRequest(command=body.command, timeout_s=body.timeout_s, max_output_bytes=MAX_OUTPUT_BYTES)
    target = await context.streams.find(live.access, instance_id, request)
    stream = await context.streams.open(live, target, request, context.limit_of(live.access))
    try:
        return await _collected(stream)
    finally:
        await stream.close()


async def _collected(stream: NodeStream) -> Json:
    output = {Channel.STDOUT: _Text(), Channel.STDERR: _Text()}
    left = MAX_OUTPUT_BYTES
    while not isinstance(found := await stream.receive(), StreamStatus):
        channel, data = found
        if channel in output:
            # A node limits the output too, but may be an attacker's.
            output[channel].add(data[:left])
            left -= len(data[:left])
    if found.exit_code is None:
        raise stream.error_of(found.reason or _NO_EXIT_CODE)
    return {
        "exit_code": found.exit_code,
        "stdout": output[Channel.STDOUT].whole(),
        "stderr": output[Channel.STDERR].whole(),
        "truncated": found.truncated,
    }


_NO_EXIT_CODE = StreamError(
    code="node_timeout", message="the node ended the stream without an exit code; the command may have run"
)


class _Text:
    """Bytes decoded as UTF-8, with replacements for what is invalid."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._parts: list[str] = []

    def add(self, data: bytes) -> None:
        self._parts.append(self._decoder.decode(data))

    def whole(self) -> str:
        return "".join(self._parts) + self._decoder.decode(b"", final=True)
