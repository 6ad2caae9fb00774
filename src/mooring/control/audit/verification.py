"""Verifies the audit log: signatures, chains, heads, and heads that were kept outside (R32)."""

from collections.abc import Collection, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import RowMapping, func, select
from sqlalchemy.orm import Session

from mooring.control.audit import signing_keys
from mooring.control.audit.audit_log import FIRST_HASH, KEY_ACTION
from mooring.control.audit.chains import BATCH, SERVICE_CHAIN, LinksDigest, chain_of
from mooring.control.audit.signing_keys import SIGNED, AuditKeys, SignatureStatus
from mooring.db.tables import AuditEntry, AuditHead, AuditLink

_MAX_PROBLEMS = 1000


@dataclass(slots=True)
class VerificationReport:
    """The result of a verification.

    Attributes:
        rows: all rows. Of them `unkeyed` are of older releases, and `unlinked` are in no chain yet: the
            deletion of an unlinked row cannot be detected.
        newest_head: to be kept outside the database; None if there is none yet.
        problems: the problems found, as sentences; empty if the log is intact as far as can be verified.
    """

    rows: int = 0
    unkeyed: int = 0
    unlinked: int = 0
    links: int = 0
    heads: int = 0
    newest_head: str | None = None
    problems: list[str] = field(default_factory=list)

    def found(self, problem: str) -> None:
        if len(self.problems) < _MAX_PROBLEMS:
            self.problems.append(problem)


@dataclass(slots=True)
class _Unkeyed:
    """The chain of rows of older releases, as far as it has been read."""

    rows: int = 0
    head: str = FIRST_HASH
    last_seq: int = 0


def verify(session: Session, keys: AuditKeys, kept_heads: Collection[str] = ()) -> VerificationReport:
    """Verify the whole log in one snapshot.

    Args:
        kept_heads: hashes of heads that were kept outside; the log must contain each.
    """
    if session.get_bind().dialect.name == "postgresql":
        session.connection(execution_options={"isolation_level": "REPEATABLE READ"})
    report = VerificationReport()
    unkeyed = _verify_rows(session, keys, report)
    _verify_unique(session, report)
    _verify_first_key(session, unkeyed, report)
    known = _verify_links(session, keys, report)
    for head in kept_heads:
        if head not in known and not _is_unkeyed_hash(session, head):
            report.found(
                f"the log does not contain the head {head}: it was truncated, or it is a different log"
            )
    return report


def _streamed(session: Session, query: Any) -> Iterator[RowMapping]:
    result = session.execute(query.execution_options(yield_per=BATCH))
    with closing(result):
        yield from result.mappings()


def _verify_rows(session: Session, keys: AuditKeys, report: VerificationReport) -> _Unkeyed:
    """Verify each row on its own."""
    unkeyed = _Unkeyed()
    query = (
        select(*AuditEntry.__table__.c, AuditLink.number.label("link"))
        .outerjoin(AuditLink, AuditLink.entry_seq == AuditEntry.seq)
        .order_by(AuditEntry.seq)
    )
    previous = FIRST_HASH
    for row in _streamed(session, query):
        report.rows += 1
        if row["hash"].startswith(SIGNED):
            _verify_signature(keys, row, report)
        else:
            _verify_unkeyed(row, previous, report)
            unkeyed = _Unkeyed(unkeyed.rows + 1, row["hash"], row["seq"])
        previous = row["hash"]
    report.unkeyed = unkeyed.rows
    return unkeyed


def _verify_signature(keys: AuditKeys, row: RowMapping, report: VerificationReport) -> None:
    status = keys.verify(row["hash"], signing_keys.row_text(row))
    if status is SignatureStatus.BAD:
        report.found(f"row {row['seq']} was changed or not written by the service: its signature is wrong")
    elif status is SignatureStatus.UNKNOWN_KEY:
        key_id = row["hash"].removeprefix(SIGNED).partition(":")[0]
        report.found(f"row {row['seq']} is signed with a key that is not here: {key_id[:16]}")
    if row["link"] is None:
        report.unlinked += 1


def _verify_unkeyed(row: RowMapping, previous: str, report: VerificationReport) -> None:
    if row["previous_hash"] != previous or row["hash"] != signing_keys.unkeyed_hash(previous, row):
        report.found(f"row {row['seq']} does not follow from the row before it")


def _verify_unique(session: Session, report: VerificationReport) -> None:
    """Find copied rows. Their signatures are valid, since a signature covers the id and not `seq`."""
    query = select(AuditEntry.id).group_by(AuditEntry.id).having(func.count() > 1).limit(_MAX_PROBLEMS)
    for entry_id in session.scalars(query):
        report.found(f"the log contains the row {entry_id} more than once")


def _verify_first_key(session: Session, unkeyed: _Unkeyed, report: VerificationReport) -> None:
    """Verify the row of the first key: that it is the first, and what it says about the rows before it."""
    query = select(AuditEntry).where(AuditEntry.action == KEY_ACTION, AuditEntry.hash.startswith(SIGNED))
    starts = [row for row in session.scalars(query.order_by(AuditEntry.seq)) if row.before is None]
    if not starts:
        report.found("no row records the first signing key: the log was replaced, or its start was deleted")
        return
    first, *others = starts
    for other in others:
        report.found(f"row {other.seq} starts the signed log a second time")
    recorded = first.after or {}
    if (recorded.get("unkeyed_rows"), recorded.get("unkeyed_head")) != (unkeyed.rows, unkeyed.head):
        report.found(
            f"the rows of older releases differ from those that row {first.seq} recorded at the first signing"
        )
    if unkeyed.last_seq > first.seq:
        report.found(
            f"row {unkeyed.last_seq} has no signature, though the log is signed since row {first.seq}"
        )


@dataclass(slots=True)
class _Links:
    """The chains as far as they have been read."""

    newest: dict[str, tuple[int, str]] = field(default_factory=dict)
    digest: LinksDigest = field(default_factory=LinksDigest)


def _verify_links(session: Session, keys: AuditKeys, report: VerificationReport) -> set[str]:
    """Verify each link, and each head after the links that it covers. Returns the hashes of valid heads."""
    heads = list(session.scalars(select(AuditHead).order_by(AuditHead.number)))
    checker = _Heads(keys, report, heads)
    links = _Links()
    query = (
        select(
            AuditLink.__table__, AuditEntry.hash.label("row_hash"), AuditEntry.project_id, AuditEntry.action
        )
        .outerjoin(AuditEntry, AuditEntry.seq == AuditLink.entry_seq)
        .order_by(AuditLink.number)
    )
    for row in _streamed(session, query):
        checker.verify_before(row["number"], links.digest)
        _verify_link(keys, row, links, report)
        links.digest.add(row["hash"])
        report.links += 1
    checker.verify_before(None, links.digest)
    return checker.good


def _verify_link(keys: AuditKeys, row: RowMapping, links: _Links, report: VerificationReport) -> None:
    chain, position = row["chain"], row["position"]
    before, previous = links.newest.get(chain, (0, FIRST_HASH))
    links.newest[chain] = position, row["hash"]
    where = f"place {position} of the chain {chain}"
    if position != before + 1:
        report.found(f"{where} does not follow place {before}: rows between them were deleted")
        return
    if row["row_hash"] is None:
        report.found(f"row {row['entry_seq']}, at {where}, was deleted")
        return
    if chain != chain_of(row["project_id"]):
        report.found(f"row {row['entry_seq']}, at {where}, belongs to another chain")
    if chain == SERVICE_CHAIN and position == 1 and row["action"] != KEY_ACTION:
        report.found(f"{where} is not the row of the first signing key")
    text = signing_keys.link_text(previous, chain, position, row["row_hash"])
    if keys.verify(row["hash"], text) is not SignatureStatus.GOOD:
        report.found(f"{where} does not follow from the place before it and from row {row['entry_seq']}")


class _Heads:
    """Compares each head with the links that it covers, while the links are read."""

    def __init__(self, keys: AuditKeys, report: VerificationReport, heads: list[AuditHead]) -> None:
        self._keys, self._report = keys, report
        self._left = iter(heads)
        self._next = next(self._left, None)
        self._previous, self._number, self._links = FIRST_HASH, 0, 0
        self.good: set[str] = set()

    def verify_before(self, link: int | None, digest: LinksDigest) -> None:
        """Verify the heads that end before a link (None: all left). `digest`: of the links since the last."""
        while self._next is not None and (link is None or self._next.last_link < link):
            self._verify(self._next, digest)
            self._next = next(self._left, None)

    def _verify(self, head: AuditHead, digest: LinksDigest) -> None:
        self._report.heads += 1
        self._links += digest.count
        text = signing_keys.head_text(self._previous, self._number + 1, self._links, digest.hex())
        signed = self._keys.verify(head.hash, text) is SignatureStatus.GOOD
        if signed and (head.number, head.links) == (self._number + 1, self._links):
            self.good.add(head.hash)
        else:
            self._report.found(
                f"head {head.number} is not over the {self._links} links before it: "
                "some were changed or deleted"
            )
        self._previous, self._number, self._links = head.hash, head.number, head.links
        self._report.newest_head = head.hash
        digest.restart()


def _is_unkeyed_hash(session: Session, kept: str) -> bool:
    """Whether it is a hash that `mooring audit verify` of an older release printed."""
    unkeyed = select(AuditEntry.seq).where(AuditEntry.hash == kept, ~AuditEntry.hash.startswith(SIGNED))
    return session.execute(unkeyed.limit(1)).first() is not None
