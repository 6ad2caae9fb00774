"""Replicas of the control plane: the product's loops and operations, on one database."""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import SecretStr
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from mooring import server
from mooring.api.context import Context
from mooring.api.routes import agent as agent_routes
from mooring.auth.credentials import Credentials, NodeCaller
from mooring.auth.rate_limits import FailedAttempts, RequestRates
from mooring.control import bootstrap
from mooring.control.audit import audit_log
from mooring.control.audit.signing_keys import AuditKeys
from mooring.control.nodes import heartbeats, joins, nodes
from mooring.control.nodes.heartbeats import HeartbeatOutcome, NodeHeartbeat
from mooring.control.scheduling.cache import SchedulerCache
from mooring.control.tenants import encryption
from mooring.control.tenants.encryption import Encryptor
from mooring.core import credentials
from mooring.core.node_loss import self_fence_s
from mooring.core.policy import Policy
from mooring.db import failures
from mooring.db.session import Database
from mooring.db.signals import AnyTopic, Signals, Topic
from mooring.schemas.agent import (
    CredentialAnswer,
    Heartbeat,
    HeartbeatAnswer,
    JoinAnswer,
    JoinRequest,
    SessionAnswer,
    SyncRequest,
)
from mooring.schemas.agent_streams import StreamRequests, StreamRequestsQuery
from mooring.server import ControlPlane
from mooring.settings import Settings
from mooring.streams.node_streams import StreamOpener
from mooring_client.errors import MooringError
from tests.simulation.virtual import Killed, Process, hub

if TYPE_CHECKING:
    from tests.simulation.world import World

KEY = "c2ltdWxhdGlvbi1zaW11bGF0aW9uLXNpbXVsYXRpb24="
ADMIN_KEY = "an-admin-key-of-the-simulation-0123456789"
REPORT_INTERVAL_S, UNREACHABLE_AFTER_S, LOST_AFTER_S = 4.0, 6.5, 14.0
# As on PostgreSQL: a call to a frozen database fails after this time (db/postgresql.py).
_DATABASE_DEADLINE_S = 4.0

Answer = tuple[int, bytes]


def settings(folder: Path) -> Settings:
    return Settings(
        data_dir=folder,
        database_url=f"sqlite:///{folder / 'mooring.db'}",
        bootstrap_admin_key=SecretStr(ADMIN_KEY),
        encryption_keys=SecretStr(KEY),
        audit_keys=SecretStr(KEY),
        report_interval_s=REPORT_INTERVAL_S,
        unreachable_after_s=UNREACHABLE_AFTER_S,
        lost_after_s=LOST_AFTER_S,
        start_timeout_s=40,
    )


class SimulatedDatabase(Database):
    """A database that may be frozen. Around each transaction a process may be killed, or delayed."""

    def __init__(self, url: str, signals: Signals, world: "World") -> None:
        super().__init__(url, signals)
        self._world = world

    @contextmanager
    def read(self) -> Iterator[Session]:
        self._reach()
        with super().read() as session:
            yield session

    @contextmanager
    def write(self, *, commit: bool = True) -> Iterator[Session]:
        self._reach()
        with super().write(commit=commit) as session:
            yield session
            hub().step()  # killed before the commit
        hub().step(0.02)  # killed after the commit, before anybody knows of it

    def _reach(self) -> None:
        until = hub().now + _DATABASE_DEADLINE_S
        while self._world.database_is_frozen:
            hub().sleep(0.25)
            if hub().now >= until:
                raise OperationalError("the database is frozen", None, TimeoutError("no answer"))
        hub().step(0.02)


class _ForwardedSignals(Signals):
    """Notifications also reach the other replicas, like those of PostgreSQL; some are lost."""

    def __init__(self, forward: Callable[[Iterable[AnyTopic]], None]) -> None:
        super().__init__()
        self._forward = forward

    def fire(self, topics: Iterable[AnyTopic]) -> None:
        found = sorted(topics)
        super().fire(found)
        if found:
            self._forward(found)

    def receive(self, topics: Iterable[AnyTopic]) -> None:
        super().fire(topics)


class Replica:
    """A server process and its successors."""

    def __init__(self, world: "World", number: int) -> None:
        self.world, self.name = world, f"server-{number}"
        self.process: Process | None = None
        self.context: Context | None = None
        self._database: SimulatedDatabase | None = None

    @property
    def is_up(self) -> bool:
        return self.process is not None and self.process.is_alive and self.context is not None

    def start(self) -> None:
        self.process = self.world.process(self.name, self.world.control_machine, self._ended)
        self.process.spawn(self._boot, "main")

    def receive(self, topics: Iterable[AnyTopic]) -> None:
        if self._database is not None:
            signals = self._database.signals
            assert isinstance(signals, _ForwardedSignals)
            signals.receive(topics)

    def _ended(self, failure: BaseException | None) -> None:
        self.context = None
        if self._database is not None:
            self._database.dispose()
            self._database = None
        self.world.on_process_end(self.name, failure)

    def _boot(self) -> None:
        chosen = self.world.settings
        while self.world.database_is_frozen:
            hub().sleep(1)
        signals = _ForwardedSignals(lambda topics: self.world.forward(self, topics))
        database = SimulatedDatabase(chosen.resolved_database_url, signals, self.world)
        self._database = database
        encryptor, audit_keys = Encryptor([KEY]), AuditKeys([KEY])
        audit_log.sign_with(database, audit_keys)
        with database.write() as session:
            identity, _new = bootstrap.ensure(session, ADMIN_KEY)
            encryption.check(session, encryptor)
            audit_log.start(session, audit_keys)
        plane = ControlPlane(chosen, database, identity, encryptor, audit_keys, None)
        cache = SchedulerCache(Policy(**chosen.model_dump(include=set(Policy.model_fields))))
        context = Context(
            settings=chosen,
            database=database,
            identity=identity,
            credentials=Credentials(database, FailedAttempts(on=False)),
            encryptor=encryptor,
            streams=StreamOpener(database, None),
            rates=RequestRates(on=False),
            scheduler_cache=cache,
        )
        database.leads = self is self.world.replicas[0] or hub().random.random() < 0.2
        for loop in server._loops(plane, cache, context.storage_limits):
            if type(loop).__name__ in self.world.loops:
                loop.interval_s = max(2.5, loop.interval_s)  # fewer ticks in which nothing happens
                loop.start()
        self.context = context

    # --- requests of agents

    def handle(self, path: str, credential: str, body: bytes) -> Answer:
        """The status and the body of the response to a request of an agent."""
        context = self.context
        if context is None:
            raise Killed
        try:
            answer = self._dispatch(context, path, credential, body)
        except MooringError as error:
            return error.status, b'{"code": "%s"}' % error.code.encode()
        except failures.DATABASE_ERRORS as error:
            if not failures.is_unavailable(error):
                raise
            return 503, b'{"code": "database_unavailable"}'
        return 200, answer.encode()

    def _dispatch(self, context: Context, path: str, credential: str, body: bytes) -> str:
        identity = context.identity.control_plane_id
        if path == "/agent/v1/join":
            request = agent_routes._parsed(JoinRequest, body)
            with context.database.write() as session:
                node, _made = joins.join(session, request.token, request.node_name, request.credential_hash)
            return JoinAnswer(
                node_id=node.id, node_name=node.name, credential="", control_plane_id=identity
            ).model_dump_json()
        caller = self._node_of(context, credential)
        match path.removeprefix("/agent/v1/"):
            case "session":
                with context.database.write() as session:
                    number = nodes.open_session(session, caller.id, caller.credential_hash).session
                return SessionAnswer(
                    session=number, control_plane_id=identity, node_id=caller.id
                ).model_dump_json()
            case "credential":
                with context.database.write() as session:
                    renewed = nodes.renew_credential(session, caller.id, caller.credential_hash)
                return CredentialAnswer(credential=renewed, node_id=caller.id).model_dump_json()
            case "sync":
                return self._sync(context, caller, agent_routes._parsed(SyncRequest, body))
            case "heartbeat":
                return self._heartbeat(context, caller, agent_routes._parsed(Heartbeat, body))
            case "stream-requests":
                hub().sleep(agent_routes._parsed(StreamRequestsQuery, body).wait_s)
                return StreamRequests(
                    control_plane_id=identity, node_id=caller.id, streams=[]
                ).model_dump_json()
        raise AssertionError(f"the simulation has no {path}")

    def _node_of(self, context: Context, credential: str) -> NodeCaller:
        """As `Credentials.node`, in a thread."""
        known = context.credentials._nodes.get(credentials.hashed(credential))
        return known or context.credentials._look_up_node(credential, credentials.hashed(credential))

    def _sync(self, context: Context, caller: NodeCaller, report: SyncRequest) -> str:
        """As `sync` in api/routes/agent.py, in a thread."""
        until = hub().now + report.wait_s
        applied = agent_routes._apply(context, caller, report)
        while applied.left:
            applied = agent_routes._apply_rest(context, caller, report, applied.left)
        woken, answer = threading.Event(), None
        with context.database.signals.waking(woken, Topic.node(caller.id)):
            while hub().now < until and answer is None:
                answer = agent_routes._news(context, caller.id, report, applied.revision)
                if answer is None:
                    woken.wait(until - hub().now)
                    woken.clear()
        answer = answer or agent_routes._answer(context, caller.id, report, applied.revision)
        return answer.model_dump_json()

    def _heartbeat(self, context: Context, caller: NodeCaller, body: Heartbeat) -> str:
        """As `heartbeat` in api/routes/agent.py, in a thread, and without batches."""
        until = hub().now + body.wait_s
        woken = threading.Event()
        with context.database.signals.waking(woken, Topic.node(caller.id)):
            with context.database.write() as session:
                outcomes = heartbeats.store(session, {caller.id: NodeHeartbeat(caller.credential_hash, body)})
            wanted = outcomes[caller.id] is not HeartbeatOutcome.STORED
            if not wanted and hub().now < until:
                wanted = woken.wait(until - hub().now)
        return HeartbeatAnswer(
            control_plane_id=context.identity.control_plane_id,
            node_id=caller.id,
            report_interval_s=context.settings.report_interval_s,
            self_fence_s=self_fence_s(context.settings.lost_after_s),
            report_wanted=wanted,
        ).model_dump_json()
