"""The composition root: builds database, app, loops and uvicorn from the settings."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import uvicorn
from anyio.to_thread import current_default_thread_limiter
from pydantic import SecretStr

from mooring.api.app import create_app
from mooring.api.context import Context
from mooring.api.frequent_calls import FrequentCalls
from mooring.api.http.problems import raw_answer
from mooring.api.views.rendered import RenderedInstances
from mooring.auth import oidc
from mooring.auth.credentials import Credentials
from mooring.auth.rate_limits import FailedAttempts, RequestRates
from mooring.control import bootstrap, gateway_keys
from mooring.control.audit import audit_log, signing_keys
from mooring.control.audit.signing_keys import AuditKeys
from mooring.control.bootstrap import ControlPlaneIdentity
from mooring.control.retention import RetentionTimes
from mooring.control.scheduling.cache import SchedulerCache
from mooring.control.tenants import encryption, registry_rules, storage
from mooring.control.tenants.encryption import Encryptor
from mooring.core.policy import Policy
from mooring.core.registry_hosts import RegistryRules
from mooring.core.webhooks import SCHEDULE
from mooring.db import migrate, roles, serving, space, sqlite_backup, timekeeping
from mooring.db.file_lock import file_of, in_use
from mooring.db.notifications import AnyListener, listeners
from mooring.db.operator_errors import DatabaseProblem
from mooring.db.session import Database, normalized
from mooring.db.signals import Signals
from mooring.loops.audit_links import AuditLinks
from mooring.loops.clock import ClockComparison
from mooring.loops.deadlines import Deadlines
from mooring.loops.fencing import Fencing
from mooring.loops.garbage import GarbageCollection
from mooring.loops.groups import Groups
from mooring.loops.loop import Loop
from mooring.loops.node_health import NodeHealth
from mooring.loops.notices import Notices
from mooring.loops.rejected_requests import RejectionAudit
from mooring.loops.reservations import ReservationRepair
from mooring.loops.retention import Retention
from mooring.loops.scheduling import Scheduling
from mooring.loops.webhook_mails import MailServer
from mooring.loops.webhook_requests import RequestSender
from mooring.loops.webhooks import Webhooks
from mooring.settings import Settings
from mooring.streams.http_protocol import (
    ConnectionLimits,
    max_connections,
    set_kernel_timeouts,
    url_of,
    uvicorn_options,
)
from mooring.streams.node_streams import StreamOpener
from mooring.streams.websockets import StreamProtocol

# How long open requests may continue after SIGTERM; long polls and streams end at once.
_GRACE_S = 2
# A thread has one connection to the database at most (tests/connections.py checks it). So ten of the
# pool's 40 remain for the loops while all threads wait, such as for a locked row.
REQUEST_THREADS = 30
# By default a thread that processes a query keeps the interpreter for 5 ms while the event loop waits to send
# an answer or a notification; every step of a create would pay for that.
_SWITCH_INTERVAL_S = 0.0005


@dataclass(frozen=True)
class ControlPlane:
    """A migrated and open database with its identity and keys. `Service` serves it."""

    settings: Settings
    database: Database
    identity: ControlPlaneIdentity
    encryptor: Encryptor
    audit_keys: AuditKeys
    new_admin_key: str | None


def open_control_plane(settings: Settings) -> ControlPlane:
    """Migrate and open the database, and create the rows that the first request needs.

    Raises:
        DatabaseProblem: the database is damaged or being restored.
        DBAPIError, OSError: cannot reach the database, or create a file.
    """
    database = _opened_database(settings)
    timekeeping.start(database, settings.data_dir)
    encryptor = Encryptor(_keys(settings.encryption_keys, settings.data_dir, encryption.KEY_FILE))
    audit_keys = AuditKeys(_keys(settings.audit_keys, settings.data_dir, signing_keys.KEY_FILE))
    audit_log.sign_with(database, audit_keys)
    admin_key = settings.bootstrap_admin_key
    try:
        with database.write() as session:
            identity, new_key = bootstrap.ensure(session, admin_key.get_secret_value() if admin_key else None)
            encryption.check(session, encryptor)
            gateway_keys.ensure(session, encryptor)
            audit_log.start(session, audit_keys)
        roles.warn_of_serving_role(database.engine)
    except BaseException:
        database.dispose()
        raise
    registry_rules.install(
        database,
        RegistryRules(
            listed=settings.allowed_registries,
            loopback_project=identity.default_project_id if settings.serves_this_machine_only else None,
        ),
    )
    return ControlPlane(settings, database, identity, encryptor, audit_keys, new_key)


def _opened_database(settings: Settings) -> Database:
    """Check, migrate and open the database. No restore can replace it meanwhile."""
    url = settings.resolved_database_url
    path = file_of(normalized(url))
    with in_use(path):
        if path is None:
            serving.require_no_restore(normalized(url))
        elif path.exists():
            sqlite_backup.require_undamaged(path)
        space.make_private(settings.data_dir, url)
        _migrate(settings)
        space.make_shrinkable(url)
        return Database(url, Signals())


def _migrate(settings: Settings) -> None:
    """Migrate. If another role owns the tables, grant the serving role its rights on new tables."""
    if settings.database_owner_url is None and migrate.is_newest(settings.resolved_database_url):
        return  # the serving role may lack the right to change the schema
    migrate.upgrade(settings.migration_url)
    if settings.database_owner_url is not None:
        roles.grant(settings.migration_url, roles.role_of(settings.resolved_database_url))


def _keys(configured: SecretStr | None, data_dir: Path, file: str) -> list[str]:
    return configured.get_secret_value().split(",") if configured else encryption.keys_in(data_dir, file)


class Service:
    """Serves the control plane: loops and HTTP in one process.

    Args:
        awaited_nodes: /readyz waits until this many nodes have reported.
        on_started: called with the URL once the server answers requests.
        connection_limits: timeouts for slow clients, and how many connections may be open.
        webhook_schedule: seconds before each attempt of a delivery.
    """

    def __init__(
        self,
        plane: ControlPlane,
        *,
        awaited_nodes: int = 0,
        on_started: Callable[[str], None] | None = None,
        connection_limits: ConnectionLimits | None = None,
        webhook_schedule: Sequence[float] = SCHEDULE,
    ) -> None:
        connection_limits = connection_limits or ConnectionLimits(connections=max_connections())
        policy = plane.settings.model_dump(include=set(Policy.model_fields))
        self.scheduler_cache = SchedulerCache(Policy(**policy))
        limited = plane.settings.rate_limits == "on"
        context = Context(
            settings=plane.settings,
            database=plane.database,
            identity=plane.identity,
            credentials=Credentials(
                plane.database, FailedAttempts(on=limited), oidc.from_settings(plane.settings)
            ),
            encryptor=plane.encryptor,
            streams=StreamOpener(plane.database, plane.settings.advertise_url),
            rates=RequestRates(on=limited),
            scheduler_cache=self.scheduler_cache,
            rendered=RenderedInstances(plane.settings.port_urls),
            awaited_nodes=awaited_nodes,
        )
        self._database = plane.database
        self._write_probe = context.write_probe
        self._problem: DatabaseProblem | None = None
        self._parts: tuple[Loop | AnyListener, ...] = (
            *_loops(plane, self.scheduler_cache, context.storage_limits),
            Webhooks(
                plane.database,
                plane.encryptor,
                RequestSender(plane.settings.webhook_addresses),
                _mail_server(plane.settings),
                webhook_schedule,
            ),
            RejectionAudit(plane.database, context.rejected_requests),
            *listeners(plane.database, self._end_because),
        )
        self._server = _Server(_config(context, connection_limits), context, on_started, connection_limits)

    def run(self) -> None:
        """Serve until SIGTERM, SIGINT or `stop`.

        Raises:
            DatabaseProblem: the database was restored or failed over, so this process must start again.
        """
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        for part in self._parts:
            part.start()
        self._write_probe.check()  # logs why the server will not be ready
        try:
            self._server.run()
        finally:
            for part in self._parts:
                part.stop()
            self._database.dispose()
        if self._problem is not None:
            raise self._problem

    def stop(self) -> None:
        """Make `run` return; called from another thread."""
        self._server.should_exit = True

    def _end_because(self, problem: DatabaseProblem) -> None:
        self._problem = problem
        self.stop()


def _fencing(settings: Settings) -> Fencing | None:
    return Fencing(settings.fence_command, settings.fence_timeout_s) if settings.fence_command else None


def _loops(plane: ControlPlane, cache: SchedulerCache, limits: storage.StorageLimits) -> tuple[Loop, ...]:
    settings = plane.settings
    kept = RetentionTimes(
        settings.deleted_kept, settings.idempotency_kept, timedelta(days=settings.events_kept_days)
    )
    return (
        Scheduling(plane.database, cache),
        NodeHealth(plane.database, settings.unreachable_after_s, settings.lost_after_s, _fencing(settings)),
        Deadlines(plane.database, settings.start_timeout_s),
        Groups(plane.database),
        ReservationRepair(plane.database, cache),
        Retention(plane.database, kept, limits),
        ClockComparison(plane.database, settings.data_dir),
        AuditLinks(plane.database, plane.audit_keys, settings.audit_head_file),
        GarbageCollection(plane.database),
        Notices(plane.database),
    )


def _mail_server(settings: Settings) -> MailServer | None:
    if settings.smtp_host is None or settings.smtp_from is None:
        return None
    password = settings.smtp_password.get_secret_value() if settings.smtp_password else None
    return MailServer(
        settings.smtp_host, settings.smtp_port, settings.smtp_from, settings.smtp_user, password,
        settings.smtp_security,
    )  # fmt: skip


def _config(context: Context, connection_limits: ConnectionLimits) -> uvicorn.Config:
    return uvicorn.Config(
        FrequentCalls(create_app(context)),
        host=context.settings.host,
        port=context.settings.port,
        ws=StreamProtocol,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=_GRACE_S,
        **uvicorn_options(context.settings, connection_limits, raw_answer),
    )


class _Server(uvicorn.Server):
    """uvicorn that calls `on_started` with its URL, and ends long polls and streams at shutdown."""

    def __init__(
        self,
        config: uvicorn.Config,
        context: Context,
        on_started: Callable[[str], None] | None,
        connection_limits: ConnectionLimits,
    ) -> None:
        super().__init__(config)
        self._connection_limits = connection_limits
        self._on_started = on_started
        self._context = context

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        # Otherwise uvicorn would raise the signal again after its shutdown: the loops would not be stopped,
        # and a requested shutdown would look like a crash.
        with super().capture_signals():
            yield
            self._captured_signals.clear()

    async def shutdown(self, sockets: list[object] | None = None) -> None:  # type: ignore[override]
        # End long polls and streams now, so that the shutdown does not wait for them.
        self._context.database.signals.close()
        self._context.streams.channels.abort()
        await super().shutdown(sockets)  # type: ignore[arg-type]

    async def startup(self, sockets: list[object] | None = None) -> None:  # type: ignore[override]
        current_default_thread_limiter().total_tokens = REQUEST_THREADS
        await super().startup(sockets)  # type: ignore[arg-type]
        if not self.started:
            return
        for server in self.servers:
            for socket in server.sockets:
                set_kernel_timeouts(socket, self._connection_limits)
        if self._on_started is not None:
            port = self.servers[0].sockets[0].getsockname()[1]  # config.port may be 0, any free port
            host = "127.0.0.1" if self.config.host in {"0.0.0.0", "localhost"} else self.config.host  # noqa: S104
            self._on_started(url_of(host, port))
