"""Forgeries of the audit log by an attacker who can write to the database but lacks the key.

In a log without a key, verification found none of them. The attacker works on a copy without triggers. Some
forgeries can be found only with a head that was saved elsewhere; tests show this too, so that
docs/security.md does not claim more.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cryptography.fernet import Fernet
from sqlalchemy import delete, insert, select, text

from mooring.control.audit import audit_log, chains, signing_keys, verification
from mooring.control.audit.audit_log import FIRST_HASH
from mooring.control.audit.signing_keys import AuditKeys, WrongAuditKey
from mooring.control.audit.verification import VerificationReport
from mooring.core.access import on_host
from mooring.db.session import Database
from mooring.db.signals import Signals
from mooring.db.tables import AuditEntry, AuditLink, ControlPlane
from mooring.server import open_control_plane
from tests.api.conftest import copied
from tests.conftest import DATABASES
from tests.service import running, settings_for
from tests.tenancy.audit_logs import without_triggers
from tests.tenancy.tenants import post


@dataclass(frozen=True)
class History:
    """A linked log with chains of two projects and the service, two heads, and the server's keys."""

    url: str
    folder: Path
    keys: AuditKeys
    older_head: str
    head: str
    alpha: str
    beta: str


@pytest.fixture(scope="module", params=DATABASES)
def history(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    migrated_template: Callable[[str], str],
) -> Iterator[History]:
    folder = tmp_path_factory.mktemp("history")
    with copied(request, migrated_template(request.param), folder) as url:
        with running(settings_for(url, folder)) as service, service.client as client:
            projects = [post(client, "/v1/projects", name=name)["id"] for name in ("alpha", "beta")]
            for project in projects:
                for number in range(2):
                    post(client, "/v1/secrets", name=f"s-{number}", value="x", project_id=project)
            keys = service.plane.audit_keys
            older = _linked(service.plane.database, keys)
            post(client, "/v1/users", name="Ada")
            newest = _linked(service.plane.database, keys)
        yield History(url, folder, keys, older, newest, *projects)


def _linked(database: Database, keys: AuditKeys) -> str:
    """Link all rows and create a head, as the loop does; return the head's hash."""
    with database.write() as session:
        chains.link(session, keys, 0)
    with database.write() as session:
        chains.make_head(session, keys)
    with database.read() as session:
        head = chains.newest_head(session)
    assert head is not None
    return head.hash


@contextmanager
def _copied(request: pytest.FixtureRequest, history: History, folder: Path) -> Iterator[str]:
    request.param = "sqlite" if history.url.startswith("sqlite") else "postgresql"
    with copied(request, history.url, folder) as url:
        yield url


@pytest.fixture
def copy(request: pytest.FixtureRequest, history: History, tmp_path: Path) -> Iterator[Database]:
    """A copy of the database, without triggers."""
    with _copied(request, history, tmp_path) as url:
        database = Database(url, Signals())
        without_triggers(database)
        yield database
        database.dispose()


def _verified(database: Database, history: History, *saved_heads: str) -> VerificationReport:
    with database.read() as session:
        return verification.verify(session, history.keys, saved_heads)


def test_the_original_log_verifies(history: History, copy: Database) -> None:
    report = _verified(copy, history, history.older_head, history.head)
    assert report.problems == []
    # The rows of the key, two projects, four secrets and a user.
    assert (report.rows, report.links, report.unlinked, report.unkeyed) == (8, 8, 0, 0)
    assert report.newest_head == history.head


OF_ALPHA = "(SELECT min(seq) FROM audit_log WHERE project_id = :alpha)"

ATTACKS = {
    "change what was done": (
        [f"UPDATE audit_log SET action = 'user.delete' WHERE seq = {OF_ALPHA}"],
        r"row 2 was changed",
    ),
    "change when": (
        [f"UPDATE audit_log SET at = '2020-01-01 00:00:00' WHERE seq = {OF_ALPHA}"],
        r"row 2 was changed",
    ),
    "change details": (
        [f"UPDATE audit_log SET after = '{{}}' WHERE seq = {OF_ALPHA}"],
        r"row 2 was changed",
    ),
    "give a row the signature of another": (
        [f"UPDATE audit_log SET hash = (SELECT hash FROM audit_log WHERE seq = 3) WHERE seq = {OF_ALPHA}"],
        r"row 2 was changed",
    ),
    "delete a row": (
        [f"DELETE FROM audit_log WHERE seq = {OF_ALPHA}"],
        r"row 2, at place 1 of the chain prj_\w+, was deleted",
    ),
    "delete a row and its link": (
        [
            "DELETE FROM audit_links WHERE chain = :alpha AND position = 2",
            "DELETE FROM audit_log WHERE seq NOT IN (SELECT entry_seq FROM audit_links)",
        ],
        r"place 3 of the chain prj_\w+ does not follow place 1: rows between them were deleted",
    ),
    "delete a row and its link, and close the gap": (
        [
            "DELETE FROM audit_links WHERE chain = :alpha AND position = 2",
            "DELETE FROM audit_log WHERE seq NOT IN (SELECT entry_seq FROM audit_links)",
            "UPDATE audit_links SET position = 2 WHERE chain = :alpha AND position = 3",
            "DELETE FROM audit_heads",
        ],
        r"place 2 of the chain prj_\w+ does not follow from the place before it",
    ),
    "delete the last row of a project and its link": (
        [
            "DELETE FROM audit_links WHERE chain = :alpha AND position = 3",
            "DELETE FROM audit_log WHERE seq NOT IN (SELECT entry_seq FROM audit_links)",
        ],
        r"head \d+ is not over the",
    ),
    "delete a whole chain": (
        ["DELETE FROM audit_links WHERE chain = :alpha", "DELETE FROM audit_log WHERE project_id = :alpha"],
        r"head \d+ is not over the",
    ),
    "swap two chains": (
        [
            "UPDATE audit_links SET chain = 'x' WHERE chain = :alpha",
            "UPDATE audit_links SET chain = :alpha WHERE chain = :beta",
            "UPDATE audit_links SET chain = :beta WHERE chain = 'x'",
        ],
        r"row \d+, at place 1 of the chain prj_\w+, belongs to another chain",
    ),
    "swap the rows of two chains": (
        [
            "UPDATE audit_log SET project_id = 'x' WHERE project_id = :alpha",
            "UPDATE audit_log SET project_id = :alpha WHERE project_id = :beta",
            "UPDATE audit_log SET project_id = :beta WHERE project_id = 'x'",
        ],
        r"row 2 was changed",
    ),
    "swap two rows of a chain": (
        [
            "UPDATE audit_links SET position = 1002 WHERE chain = :alpha AND position = 2",
            "UPDATE audit_links SET position = 2 WHERE chain = :alpha AND position = 3",
            "UPDATE audit_links SET position = 3 WHERE chain = :alpha AND position = 1002",
        ],
        r"place 3 of the chain prj_\w+ does not follow place 1",
    ),
    "repeat a row": (
        [
            "INSERT INTO audit_log SELECT seq + 1000, id, at, actor, address, request_id, action, project_id,"
            " target_id, before, after, previous_hash, hash FROM audit_log WHERE seq = 2"
        ],
        r"the log contains the row aud_\w+ more than once",
    ),
    "add a row without a signature": (
        [
            "INSERT INTO audit_log SELECT seq + 1000, 'aud_x', at, actor, address, request_id, action,"
            " project_id, target_id, before, after, '', 'x' FROM audit_log WHERE seq = 2"
        ],
        r"row 1002 has no signature, though the log is signed since row 1",
    ),
    "add a row with another row's signature": (
        [
            "INSERT INTO audit_log SELECT seq + 1000, 'aud_x', at, actor, address, request_id, action,"
            " project_id, target_id, before, after, '', hash FROM audit_log WHERE seq = 2"
        ],
        r"row 1002 was changed or not written by the service",
    ),
    "change a head": (["UPDATE audit_heads SET links = links + 1 WHERE number = 1"], r"head \d+ is not over"),
    "delete a head": (["DELETE FROM audit_heads WHERE number = 1"], r"head \d+ is not over"),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_forgery_without_the_key_is_found(history: History, copy: Database, attack: str) -> None:
    statements, expected = ATTACKS[attack]
    _execute(copy, history, *statements)
    report = _verified(copy, history)
    assert any(re.search(expected, problem) for problem in report.problems), report.problems


def _execute(database: Database, history: History, *statements: str) -> None:
    projects = {"alpha": history.alpha, "beta": history.beta}
    with database.engine.begin() as connection:
        for statement in statements:
            named = {name: value for name, value in projects.items() if f":{name}" in statement}
            assert connection.execute(text(statement), named).rowcount > 0, statement


@pytest.fixture
def other_copy(history: History, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Database]:
    """A second copy with different later rows, such as a restored backup that was in use for a while."""
    folder = tmp_path / "other"
    folder.mkdir()
    with _copied(request, history, folder) as url:
        database = Database(url, Signals())
        yield database
        database.dispose()


def _append_row(database: Database, history: History, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Append a row to alpha's chain, link it and create a head; return the row and its link."""
    audit_log.sign_with(database, history.keys)
    with database.write() as session:
        audit_log.record(session, on_host("secret.create"), name, history.alpha)
    _linked(database, history.keys)
    with database.read() as session:
        row = session.execute(select(*AuditEntry.__table__.c).where(AuditEntry.target_id == name)).mappings()
        found = dict(row.one())
        link = select(*AuditLink.__table__.c).where(AuditLink.entry_seq == found["seq"])
        return found, dict(session.execute(link).mappings().one())


@pytest.mark.parametrize(
    ("later_rows", "expected"),
    [
        (0, r"head \d+ is not over"),
        (1, r"place 5 of the chain prj_\w+ does not follow from the place before it"),
    ],
    ids=["newest", "followed"],
)
def test_a_row_from_another_copy_is_found(
    history: History, copy: Database, other_copy: Database, later_rows: int, expected: str
) -> None:
    """The signature of the row is valid, and its link has the position of the one that it replaces."""
    replaced, link = _append_row(copy, history, "sec_of_this_copy")
    for number in range(later_rows):
        _append_row(copy, history, f"sec_later_{number}")
    other, other_link = _append_row(other_copy, history, "sec_of_the_other_copy")
    with copy.write() as session:
        session.execute(delete(AuditLink).where(AuditLink.number == link["number"]))
        session.execute(delete(AuditEntry).where(AuditEntry.seq == replaced["seq"]))
        session.execute(insert(AuditEntry).values({**other, "seq": replaced["seq"]}))
        session.execute(
            insert(AuditLink).values({**other_link, "number": link["number"], "entry_seq": replaced["seq"]})
        )
    problems = _verified(copy, history).problems
    assert any(re.search(expected, problem) for problem in problems), problems


CUT = (
    "DELETE FROM audit_heads WHERE number = (SELECT max(number) FROM audit_heads)",
    "DELETE FROM audit_links WHERE number > (SELECT max(last_link) FROM audit_heads)",
    "DELETE FROM audit_log WHERE seq NOT IN (SELECT entry_seq FROM audit_links)",
)


def test_a_truncated_log_is_found_only_with_a_saved_head(history: History, copy: Database) -> None:
    _execute(copy, history, *CUT)
    assert _verified(copy, history, history.older_head).problems == []
    (problem,) = _verified(copy, history, history.older_head, history.head).problems
    assert f"does not contain the head {history.head}" in problem


def _recompute_without_a_key(database: Database) -> None:
    """Finding 11: delete rows, and recompute the older releases' chain over the remaining rows."""
    with database.write() as session:
        session.execute(text("DELETE FROM audit_heads"))
        session.execute(text("DELETE FROM audit_links"))
        session.execute(text("DELETE FROM audit_log WHERE action IN ('secret.create', 'audit.key')"))
        previous = FIRST_HASH
        for row in session.scalars(select(AuditEntry).order_by(AuditEntry.seq)):
            row.previous_hash = previous
            row.hash = previous = signing_keys.unkeyed_hash(previous, _Row(row))
        session.scalars(select(ControlPlane)).one().audit_key_id = None


class _Row:
    """Columns by name, as `signing_keys` reads them."""

    def __init__(self, row: AuditEntry) -> None:
        self._row = row

    def __getitem__(self, name: str, /) -> object:
        return getattr(self._row, name)


def test_a_log_recomputed_without_the_key_is_found(history: History, copy: Database) -> None:
    _recompute_without_a_key(copy)
    report = _verified(copy, history)
    assert [problem for problem in report.problems if "first signing key" in problem]


def test_a_recomputed_log_signed_at_the_next_start_is_found_with_a_saved_head(
    history: History, copy: Database
) -> None:
    """The server cannot distinguish such a database from one of an older release (docs/security.md)."""
    _recompute_without_a_key(copy)
    audit_log.sign_with(copy, history.keys)
    with copy.write() as session:
        audit_log.start(session, history.keys)
    assert _linked(copy, history.keys)
    assert _verified(copy, history).problems == []
    (problem,) = _verified(copy, history, history.head).problems
    assert "does not contain the head" in problem


def test_a_log_signed_with_an_attackers_key_is_found(
    history: History, copy: Database, tmp_path: Path
) -> None:
    attackers_keys = AuditKeys([Fernet.generate_key().decode()])
    with copy.write() as session:
        for row in session.scalars(select(AuditEntry).where(AuditEntry.action != "secret.create")):
            row.hash = attackers_keys.sign(signing_keys.row_text(_Row(row)))
        session.execute(text("DELETE FROM audit_log WHERE action = 'secret.create'"))
        for table in ("audit_links", "audit_heads"):
            session.execute(text(f"DELETE FROM {table}"))
        session.scalars(select(ControlPlane)).one().audit_key_id = attackers_keys.newest_id
    _linked(copy, attackers_keys)
    report = _verified(copy, history)
    assert len(report.problems) >= report.rows
    assert "signed with a key that is not here" in report.problems[0]
    # With its own key, the server does not start on this database.
    url = copy.url.render_as_string(hide_password=False)
    with pytest.raises(WrongAuditKey, match=attackers_keys.newest_id):
        open_control_plane(settings_for(url, history.folder))


# --- the log of a release without signing keys


def _write_unkeyed(database: Database, count: int) -> None:
    """Write rows as the release without signing keys did, with a copy of its code."""
    with database.write() as session:
        previous = "0" * 64
        for number in range(count):
            fields = {
                "id": f"aud_old{number}", "at": "2026-01-01T00:00:00.000Z", "action": "user.create",
                "actor": {"kind": "key", "id": "k", "name": "n", "user_id": None}, "address": None,
                "request_id": None, "project_id": None, "target_id": f"usr_{number}", "before": None,
                "after": {"name": "Zoë"},
            }  # fmt: skip
            text_of_row = json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
            own = hashlib.sha256(f"{previous}\n{text_of_row}".encode()).hexdigest()
            session.execute(
                text(
                    "INSERT INTO audit_log (id, at, actor, action, target_id, after, previous_hash, hash)"
                    " VALUES (:id, '2026-01-01 00:00:00', :actor, :action, :target_id, :after, :prev, :hash)"
                ),
                {
                    "id": fields["id"], "actor": json.dumps(fields["actor"]), "action": fields["action"],
                    "target_id": fields["target_id"], "after": json.dumps(fields["after"]),
                    "prev": previous, "hash": own,
                },
            )  # fmt: skip
            previous = own


@pytest.fixture
def upgraded(database_url: str, tmp_path: Path) -> Iterator[tuple[Database, AuditKeys]]:
    """A log with five rows of an older release and later rows of this release."""
    database = Database(database_url, Signals())
    _write_unkeyed(database, 5)
    plane = open_control_plane(settings_for(database_url, tmp_path / "data"))
    _linked(plane.database, plane.audit_keys)
    plane.database.dispose()
    yield database, plane.audit_keys
    database.dispose()


def _problems(database: Database, keys: AuditKeys, *saved_heads: str) -> list[str]:
    with database.read() as session:
        return verification.verify(session, keys, saved_heads).problems


def test_the_first_signed_row_covers_the_log_of_the_older_release(
    upgraded: tuple[Database, AuditKeys],
) -> None:
    database, keys = upgraded
    with database.read() as session:
        report = verification.verify(session, keys)
        rows = session.scalars(select(AuditEntry).order_by(AuditEntry.seq)).all()
    assert (report.problems, report.rows, report.unkeyed, report.links) == ([], 6, 5, 1)
    assert rows[5].action == "audit.key"
    assert rows[5].after == {"key": keys.newest_id, "unkeyed_rows": 5, "unkeyed_head": rows[4].hash}
    # The hash that the older release's `mooring audit verify` printed can serve as a saved head too.
    assert _problems(database, keys, rows[4].hash) == []
    assert len(_problems(database, keys, "1" * 64)) == 1


@pytest.mark.parametrize("deleted", ["seq = 3", "seq = 5", "seq = 1"])
def test_a_recomputed_log_of_the_older_release_is_found(
    upgraded: tuple[Database, AuditKeys], deleted: str
) -> None:
    database, keys = upgraded
    without_triggers(database, f"DELETE FROM audit_log WHERE {deleted}")
    with database.write() as session:
        previous = FIRST_HASH
        for row in session.scalars(select(AuditEntry).where(AuditEntry.seq <= 5).order_by(AuditEntry.seq)):
            row.previous_hash = previous
            row.hash = previous = signing_keys.unkeyed_hash(previous, _Row(row))
    assert any("differ from those that row 6 recorded" in problem for problem in _problems(database, keys))


def test_a_changed_row_of_the_older_release_is_found(upgraded: tuple[Database, AuditKeys]) -> None:
    database, keys = upgraded
    without_triggers(database, "UPDATE audit_log SET target_id = 'usr_x' WHERE seq = 2")
    assert "row 2 does not follow from the row before it" in _problems(database, keys)
