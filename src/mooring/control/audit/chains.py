"""The hash chains of the audit log: one for each project and one for the service, built after the commits.

A transaction inserts its rows, each signed on its own, without a lock. About a second later one linker for
all replicas adds the committed rows to their chains. Once a minute a signed head covers all links; operators
keep the heads outside the database.
"""

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import RowMapping, func, insert, select
from sqlalchemy.orm import Session

from mooring.control import locks
from mooring.control.audit import signing_keys
from mooring.control.audit.audit_log import FIRST_HASH
from mooring.control.audit.signing_keys import SIGNED, AuditKeys, SignatureStatus
from mooring.db.tables import AuditEntry, AuditHead, AuditLink
from mooring.db.types import now
from mooring_client.schemas.base import timestamp

log = logging.getLogger(__name__)

SERVICE_CHAIN: Final = "service"
BATCH: Final = 1000

_ENTRIES = AuditEntry.__table__.c
_LINK: Final = insert(AuditLink.__table__)  # type: ignore[arg-type]
_LINKED = select(AuditLink.number).where(AuditLink.entry_seq == AuditEntry.seq).exists()


def chain_of(project_id: str | None) -> str:
    return project_id or SERVICE_CHAIN


def unlinked(session: Session, after: int, limit: int = BATCH) -> Sequence[RowMapping]:
    """Signed rows with a `seq` above `after` that are in no chain yet, ordered by `seq`."""
    query = (
        select(*_ENTRIES)
        .where(AuditEntry.seq > after, AuditEntry.hash.startswith(SIGNED), ~_LINKED)
        .order_by(AuditEntry.seq)
        .limit(limit)
    )
    return session.execute(query).mappings().all()


def link(session: Session, keys: AuditKeys, after: int) -> Sequence[int]:
    """Link up to `BATCH` rows and return their `seq`. Links none while another replica links rows.

    A row with a wrong signature is not linked; `mooring audit verify` reports it.
    """
    if not locks.linking_audit_log(session):
        return []
    rows = unlinked(session, after)
    newest: dict[str, tuple[int, str]] = {}
    links = []
    for row in rows:
        if keys.verify(row["hash"], signing_keys.row_text(row)) is not SignatureStatus.GOOD:
            log.error(
                "row %s of the audit log has a wrong signature: this service did not write it",
                row["seq"],
            )
            continue
        chain = chain_of(row["project_id"])
        position, previous = newest.get(chain) or _newest(session, chain)
        signed = keys.sign(signing_keys.link_text(previous, chain, position + 1, row["hash"]))
        newest[chain] = position + 1, signed
        links.append({"entry_seq": row["seq"], "chain": chain, "position": position + 1, "hash": signed})
    if links:
        session.connection().execute(_LINK, links)
    return [row["seq"] for row in rows]


def _newest(session: Session, chain: str) -> tuple[int, str]:
    """The last position of a chain and its hash."""
    query = select(AuditLink.position, AuditLink.hash).where(AuditLink.chain == chain)
    row = session.execute(query.order_by(AuditLink.position.desc()).limit(1)).one_or_none()
    return (0, FIRST_HASH) if row is None else (row.position, row.hash)


@dataclass(frozen=True, slots=True)
class Head:
    """A signed hash of the whole log. If it is kept outside, a later truncation of the log is detected."""

    number: int
    links: int
    hash: str
    at: str

    def line(self) -> str:
        """A line of the file of heads, as JSON."""
        return json.dumps({"number": self.number, "hash": self.hash, "links": self.links, "at": self.at})


def newest_head(session: Session) -> Head | None:
    row = session.scalar(select(AuditHead).order_by(AuditHead.number.desc()).limit(1))
    return None if row is None else Head(row.number, row.links, row.hash, timestamp(row.at) or "")


def make_head(session: Session, keys: AuditKeys) -> None:
    """Add a head over the links since the last head, if there are any and no other replica is doing so."""
    if not locks.linking_audit_log(session):
        return
    last = session.scalar(select(AuditHead).order_by(AuditHead.number.desc()).limit(1))
    if last is None:
        last = AuditHead(number=0, last_link=0, links=0, hash=FIRST_HASH)
    newest = session.scalar(select(func.max(AuditLink.number)))
    if newest is None or newest <= last.last_link:
        return
    digest = LinksDigest()
    query = select(AuditLink.hash).where(AuditLink.number > last.last_link).order_by(AuditLink.number)
    for linked in session.scalars(query.execution_options(yield_per=BATCH)):
        digest.add(linked)
    number, links = last.number + 1, last.links + digest.count
    text = signing_keys.head_text(last.hash, number, links, digest.hex())
    session.add(AuditHead(number=number, at=now(), last_link=newest, links=links, hash=keys.sign(text)))


class LinksDigest:
    """SHA-256 over the hashes of links, in order."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self.count = 0
        self._digest = hashlib.sha256()

    def add(self, link_hash: str) -> None:
        self.count += 1
        self._digest.update(f"{link_hash}\n".encode())

    def hex(self) -> str:
        return self._digest.hexdigest()


def links_of(session: Session, seqs: Sequence[int]) -> Mapping[int, dict[str, Any]]:
    """The links of rows, by the row's `seq`, as the API shows them."""
    query = select(AuditLink).where(AuditLink.entry_seq.in_(seqs))
    return {
        row.entry_seq: {"chain": row.chain, "position": row.position, "hash": row.hash}
        for row in session.scalars(query)
    }
