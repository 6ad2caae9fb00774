"""The context that every endpoint receives; `server.py` creates it once and stores it on the app."""

from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Annotated, Any

from fastapi import Depends
from starlette.requests import HTTPConnection

from mooring.api.auth.audited_reads import AuditedReads
from mooring.api.http.batches import Batches
from mooring.api.http.heartbeats import HeartbeatBatches
from mooring.api.http.shared_reads import SharedReads
from mooring.api.http.turns import (
    MAX_CONCURRENT_WRITES,
    MAX_CONCURRENT_WRITES_OF_ADMIN,
    ProjectTurns,
    SchedulerTurns,
)
from mooring.api.streaming.event_pages import EventPages
from mooring.api.views.rendered import RenderedInstances
from mooring.auth.credentials import Credentials
from mooring.auth.rate_limits import DelayedAnswers, NodeStreams, OpenStreams, RequestRates
from mooring.control.audit.rejected_requests import RejectedRequests
from mooring.control.bootstrap import ControlPlaneIdentity
from mooring.control.scheduling.cache import SchedulerCache
from mooring.control.tenants.encryption import Encryptor
from mooring.control.tenants.storage import StorageLimits
from mooring.control.webhooks.webhooks import TargetRules
from mooring.core.access import Access
from mooring.core.port_urls import PortUrls
from mooring.db.readiness import WriteProbe
from mooring.db.session import Database
from mooring.settings import Settings
from mooring.streams.node_streams import Limit, StreamOpener

_MIB = 1024 * 1024


@dataclass(frozen=True)
class Context:
    settings: Settings
    database: Database
    identity: ControlPlaneIdentity
    credentials: Credentials
    encryptor: Encryptor
    streams: StreamOpener
    rates: RequestRates
    scheduler_cache: SchedulerCache
    open_streams: OpenStreams = field(default_factory=OpenStreams)
    rejected_requests: RejectedRequests = field(default_factory=RejectedRequests)
    audited_reads: AuditedReads = field(default_factory=AuditedReads)
    delayed_answers: DelayedAnswers = field(default_factory=DelayedAnswers)
    node_streams: NodeStreams = field(default_factory=NodeStreams)
    event_pages: EventPages = field(default_factory=EventPages)
    scheduler_turns: SchedulerTurns = field(default_factory=SchedulerTurns)
    write_turns: ProjectTurns = field(default_factory=lambda: ProjectTurns(MAX_CONCURRENT_WRITES))
    admin_write_turns: ProjectTurns = field(
        default_factory=lambda: ProjectTurns(MAX_CONCURRENT_WRITES_OF_ADMIN)
    )
    # Separate, because a transaction that locks projects must do so before it locks nodes.
    creates: Batches[Any] = field(default_factory=Batches)
    deletes: Batches[Any] = field(default_factory=Batches)
    heartbeats: HeartbeatBatches = field(default_factory=HeartbeatBatches)
    lists: SharedReads[bytes] = field(default_factory=SharedReads)
    rendered: RenderedInstances = field(default_factory=RenderedInstances)
    # With `mooring up`, /readyz waits until this many local nodes have reported.
    awaited_nodes: int = 0
    reporting_nodes: set[str] = field(default_factory=set)

    def limit_of(self, access: Access) -> Limit:
        """The limit on a caller's open streams on a node."""
        return partial(self.node_streams.opened, is_admin=access.caller.is_admin)

    @cached_property
    def port_urls(self) -> PortUrls | None:
        return self.settings.port_urls

    @cached_property
    def webhook_targets(self) -> TargetRules:
        return TargetRules(self.settings.webhook_addresses, mail=self.settings.smtp_host is not None)

    @cached_property
    def write_probe(self) -> WriteProbe:
        return WriteProbe(self.database)

    @property
    def storage_limits(self) -> StorageLimits:
        settings = self.settings
        return StorageLimits(settings.project_stored_mib * _MIB, settings.project_written_mib_per_day * _MIB)


async def _context(connection: HTTPConnection) -> Context:
    context: Context = connection.app.state.context
    return context


Ctx = Annotated[Context, Depends(_context)]
