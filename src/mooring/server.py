"""The composition root: settings -> database -> app and loops -> uvicorn."""

import logging
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import uvicorn

from mooring.api.app import create_app
from mooring.api.auth import oidc
from mooring.api.auth.credentials import Credentials
from mooring.api.auth.rate_limits import FailedAttempts, RequestRates
from mooring.api.context import Context
from mooring.api.http.server import HttpProtocol, Patience, listen_patiently
from mooring.api.streaming.channels import Channels
from mooring.control import bootstrap
from mooring.control.audit import audit_log
from mooring.control.audit.signing_keys import KEY_FILE, AuditKeys
from mooring.control.bootstrap import ControlPlaneIdentity
from mooring.control.retention import Kept
from mooring.control.scheduling.cache import SchedulerCache
from mooring.control.tenants import encryption, registry_rules, storage
from mooring.control.tenants.encryption import Encryptor
from mooring.core.registry_hosts import RegistryRules
from mooring.db import migrate, roles, space
from mooring.db.notifications import Listener
from mooring.db.session import Database
from mooring.db.signals import Signals
from mooring.loops.audit_links import AuditLinks
from mooring.loops.deadlines import Deadlines
from mooring.loops.groups import Groups
from mooring.loops.loop import Loop
from mooring.loops.node_health import NodeHealth
from mooring.loops.refusals import RefusedRequests
from mooring.loops.reservations import ReservationRepair
from mooring.loops.retention import Retention
from mooring.loops.scheduling import Scheduling
from mooring.scheduler.model import Policy
from mooring.settings import Settings

log = logging.getLogger(__name__)

# How long a request may go on once the process has been told to end; long polls are cut off then.
_GRACE_S = 2
_FILES = 16_384
# A thread in the middle of a query keeps the interpreter for Python's 5 ms while the event loop waits to pass
# on what just happened; every step of a create pays for that.
_SWITCH_INTERVAL_S = 0.0005


@dataclass(frozen=True)
class ControlPlane:
    """An open database with its identity, before anything is served."""

    settings: Settings
    database: Database
    identity: ControlPlaneIdentity
    encryptor: Encryptor
    audit_keys: AuditKeys
    new_admin_key: str | None


def open_control_plane(settings: Settings) -> ControlPlane:
    """Migrate the database and make sure of what the first request needs."""
    space.make_private(settings.data_dir, settings.resolved_database_url)
    _migrate(settings)
    space.make_shrinkable(settings.resolved_database_url)
    database = Database(settings.resolved_database_url, Signals())
    given, keys = settings.bootstrap_admin_key, settings.encryption_keys
    encryptor = Encryptor(
        keys.get_secret_value().split(",") if keys else encryption.keys_in(settings.data_dir)
    )
    audit_keys = _audit_keys(settings)
    audit_log.sign_with(database, audit_keys)
    try:
        with database.write() as session:
            identity, new_key = bootstrap.ensure(session, given.get_secret_value() if given else None)
            encryption.check(session, encryptor)
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


def _migrate(settings: Settings) -> None:
    """With a role of its own for the migrations, the serving role is given what it needs of new tables."""
    if settings.database_owner_url is None and migrate.is_newest(settings.resolved_database_url):
        return  # a serving role that may not change the schema need not
    migrate.upgrade(settings.migration_url)
    if settings.database_owner_url is not None:
        roles.grant(settings.migration_url, roles.role_of(settings.resolved_database_url))


def _audit_keys(settings: Settings) -> AuditKeys:
    given = settings.audit_keys
    return AuditKeys(
        given.get_secret_value().split(",") if given else encryption.keys_in(settings.data_dir, KEY_FILE)
    )


class Service:
    """The control plane, serving: loops and HTTP in one process.

    Args:
        awaited_nodes: /readyz waits for the first report of so many nodes.
        on_started: called with the URL once requests are answered.
        patience: with slow clients.
    """

    def __init__(
        self,
        plane: ControlPlane,
        *,
        awaited_nodes: int = 0,
        on_started: Callable[[str], None] | None = None,
        patience: Patience | None = None,
    ) -> None:
        patience = patience or Patience(connections=_connections())
        self.world = SchedulerCache(_policy(plane.settings))
        limited = plane.settings.rate_limits == "on"
        context = Context(
            settings=plane.settings,
            database=plane.database,
            identity=plane.identity,
            credentials=Credentials(
                plane.database, FailedAttempts(on=limited), oidc.from_settings(plane.settings)
            ),
            encryptor=plane.encryptor,
            channels=Channels(),
            rates=RequestRates(on=limited),
            world=self.world,
            awaited_nodes=awaited_nodes,
        )
        self._database = plane.database
        self._parts: tuple[Loop | Listener, ...] = (
            *_loops(plane, self.world, context.storage_limits),
            RefusedRequests(plane.database, context.refusals),
        )
        if not plane.database.is_sqlite:
            self._parts += (Listener(plane.database),)
        self._server = _Server(_config(context, patience), context, on_started, patience)

    def run(self) -> None:
        """Serve until SIGTERM, SIGINT or `stop`."""
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        for part in self._parts:
            part.start()
        try:
            self._server.run()
        finally:
            for part in self._parts:
                part.stop()
            self._database.dispose()

    def stop(self) -> None:
        """End `run`, from another thread."""
        self._server.should_exit = True


def _loops(plane: ControlPlane, world: SchedulerCache, limits: storage.StorageLimits) -> tuple[Loop, ...]:
    settings = plane.settings
    kept = Kept(settings.deleted_kept, settings.idempotency_kept, timedelta(days=settings.events_kept_days))
    return (
        Scheduling(plane.database, world),
        NodeHealth(plane.database, settings.unreachable_after_s),
        Deadlines(plane.database, settings.start_timeout_s),
        Groups(plane.database),
        ReservationRepair(plane.database, world),
        Retention(plane.database, kept, limits),
        AuditLinks(plane.database, plane.audit_keys, settings.audit_head_file),
    )


def _policy(settings: Settings) -> Policy:
    return Policy(
        backfill=settings.backfill,
        usage_half_life_s=settings.usage_half_life_s,
        overdue_after_s=settings.overdue_after_s,
        preemption_min_run_s=settings.preemption_min_run_s,
    )


def _connections() -> int:
    """How many connections there is room for, having made as much as the system allows."""
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = _FILES if hard == resource.RLIM_INFINITY else min(_FILES, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
    return min(Patience().connections, files // 2)


def _config(context: Context, patience: Patience) -> uvicorn.Config:
    return uvicorn.Config(
        create_app(context),
        host=context.settings.host,
        port=context.settings.port,
        log_level="warning",
        access_log=False,
        http=partial(HttpProtocol, patience=patience),  # type: ignore[arg-type]  # any maker will do
        ws="none",
        server_header=False,
        proxy_headers=context.settings.behind_tls_proxy,
        forwarded_allow_ips=context.settings.trusted_proxies,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=_GRACE_S,
    )


class _Server(uvicorn.Server):
    """uvicorn, telling where it listens once it does (port 0 is any free one)."""

    def __init__(
        self,
        config: uvicorn.Config,
        context: Context,
        on_started: Callable[[str], None] | None,
        patience: Patience,
    ) -> None:
        super().__init__(config)
        self._patience = patience
        self._on_started = on_started
        self._context = context

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        # uvicorn raises the signal anew once it has ended: parts would not be stopped, and an end that was
        # asked for would look like a crash.
        with super().capture_signals():
            yield
            self._captured_signals.clear()

    async def shutdown(self, sockets: list[object] | None = None) -> None:  # type: ignore[override]
        # Long polls and streams end now, so that closing need not wait for them.
        self._context.database.signals.close()
        self._context.channels.break_off()
        await super().shutdown(sockets)  # type: ignore[arg-type]

    async def startup(self, sockets: list[object] | None = None) -> None:  # type: ignore[override]
        await super().startup(sockets)  # type: ignore[arg-type]
        if not self.started:
            return
        for listener in (listener for server in self.servers for listener in server.sockets):
            listen_patiently(listener, self._patience)
        if self._on_started is not None:
            port = self.servers[0].sockets[0].getsockname()[1]
            host = "127.0.0.1" if self.config.host in {"0.0.0.0", "localhost"} else self.config.host  # noqa: S104
            self._on_started(f"http://{f'[{host}]' if ':' in host else host}:{port}")
