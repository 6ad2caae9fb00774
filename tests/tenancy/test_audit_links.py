"""The linker: links over several replicas, forged rows, and the export of heads."""

import json
import logging
import stat
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session

from mooring.control.audit import audit_log, chains, verification
from mooring.control.audit.chains import Head
from mooring.core.access import on_host
from mooring.db.session import Database, Ending, at_end
from mooring.db.signals import Signals
from mooring.loops import audit_links as loop
from mooring.loops.audit_links import AuditLinks, SearchStart, heads_in, last_exported
from mooring.server import ControlPlane, open_control_plane
from tests.concurrency import run_concurrently
from tests.service import Client, RunningService, running, settings_for
from tests.tenancy.audit_logs import await_links, mooring, verified, without_triggers
from tests.tenancy.tenants import post
from tests.testbed.waiting import wait_until

pytestmark = pytest.mark.both_databases

FORGED = (
    "INSERT INTO audit_log (id, at, actor, action, previous_hash, hash)"
    " VALUES ('aud_x', '2026-01-01 00:00:00', '{}', 'user.delete', '', :hash)"
)


def test_a_row_with_a_forged_signature_is_not_linked(
    service: RunningService, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    """The serving role may insert rows but cannot sign them without the key."""
    hash_ = f"hmac:{service.plane.audit_keys.newest_id}:{'0' * 64}"
    with service.plane.database.engine.begin() as connection:
        connection.execute(text(FORGED), {"hash": hash_})
    post(client, "/v1/users", name="Ada")
    wait_until(lambda: "has a wrong signature: this service did not write it" in caplog.text, 10)
    wait_until(lambda: client.items("/v1/audit-log", action="user.create")[0]["link"] is not None, 10)
    (forged,) = client.items("/v1/audit-log", action="user.delete")
    assert forged["link"] is None
    report = verified(service)
    assert [problem for problem in report.problems if "its signature is wrong" in problem]
    assert report.unlinked == 1


def _await_lines(file: Path, count: int) -> None:
    wait_until(lambda: file.exists() and file.read_text().count("\n") == count, 10)


def test_each_head_is_logged_served_and_appended_to_the_file(
    database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(loop, "HEAD_EVERY_S", 0.1)
    file = tmp_path / "heads.jsonl"
    settings = settings_for(database_url, tmp_path / "data", audit_head_file=file)
    with caplog.at_level(logging.INFO), running(settings) as service, service.client as client:
        for number in (1, 2):
            _await_lines(file, number)
            post(client, "/v1/users", name="Ada")
        _await_lines(file, 3)
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        assert [line["number"] for line in lines] == [1, 2, 3]
        assert [line["links"] for line in lines] == [1, 2, 3]
        assert client.get("/v1/audit-log/head").json() == lines[2]
        assert all(f"audit log head {line['number']}: {line['hash']}" in caplog.text for line in lines)
        assert json.loads(mooring(service, "audit", "head").output) == lines[2]
        assert verified(service, *(line["hash"] for line in lines)).problems == []
        assert mooring(service, "audit", "verify", "--heads", str(file)).exit_code == 0
        assert mooring(service, "audit", "verify", "--head", lines[0]["hash"]).exit_code == 0
        result = mooring(service, "audit", "verify", "--head", lines[0]["hash"][:-1] + "x")
        assert result.exit_code == 1
        assert "does not contain the head" in result.output
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_no_head_is_created_without_new_rows(service: RunningService) -> None:
    await_links(service)
    with service.plane.database.write() as session:
        chains.make_head(session, service.plane.audit_keys)
    with service.plane.database.read() as session:
        head = chains.newest_head(session)
    assert head is not None
    assert head.number == 1


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_a_start_with_a_truncated_log_is_logged(
    database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(loop, "HEAD_EVERY_S", 0.1)
    file = tmp_path / "heads.jsonl"
    settings = settings_for(database_url, tmp_path / "data", audit_head_file=file)
    with running(settings) as service, service.client as client:
        _await_lines(file, 1)
        post(client, "/v1/users", name="Ada")
        _await_lines(file, 2)
    with caplog.at_level(logging.ERROR), running(settings) as service:
        await_links(service)
    assert "does not contain head" not in caplog.text
    database = Database(database_url, Signals())
    without_triggers(
        database,
        "DELETE FROM audit_heads WHERE number = 2",
        "DELETE FROM audit_links WHERE position = 2",
        "DELETE FROM audit_log WHERE seq = 2",
    )
    database.dispose()
    with caplog.at_level(logging.ERROR), running(settings):
        wait_until(lambda: "the audit log does not contain head 2" in caplog.text, 10)


def test_an_incomplete_line_of_the_head_file_is_ignored(tmp_path: Path) -> None:
    head = Head(7, 3, "hmac:x:y", "2026-01-01T00:00:00.000Z")
    assert heads_in(f'{head.line()}\n{{"number": 8, "ha') == [head]
    assert last_exported(tmp_path / "none") is None


def _plane(database_url: str, folder: Path) -> ControlPlane:
    return open_control_plane(settings_for(database_url, folder))


def test_linkers_of_several_replicas_link_each_row_once(database_url: str, tmp_path: Path) -> None:
    # Two replicas with two linkers each; SQLite allows one replica, and here it has one linker.
    count = 1 if database_url.startswith("sqlite") else 2
    replicas = [_plane(database_url, tmp_path) for _ in range(count)]
    linkers = [AuditLinks(plane.database, plane.audit_keys, None) for plane in replicas * count]

    def write_and_link(number: int) -> None:
        plane, linker = replicas[number % len(replicas)], linkers[number % len(linkers)]
        for turn in range(10):
            with plane.database.write() as session:
                audit_log.record(session, on_host("user.create"), f"{number}-{turn}", f"prj_{turn % 3}")
            linker.tick()

    run_concurrently(4, write_and_link)
    linkers[0].tick()
    with replicas[0].database.read() as session:
        report = verification.verify(session, replicas[0].audit_keys)
    # The row of the key, and ten rows of each writer.
    assert (report.rows, report.links, report.unlinked, report.problems) == (41, 41, 0, [])
    for plane in replicas:
        plane.database.dispose()


def test_a_row_that_was_committed_late_is_linked() -> None:
    clock = [0.0]
    start = SearchStart(60.0, lambda: clock[0])
    for timestamp, newest in ((0.0, 10), (30.0, 20), (59.0, 30)):
        clock[0] = timestamp
        start.searched(newest)
        assert start.seq == 0  # a row below 10 may still be committed
    clock[0] = 60.0
    start.searched(40)
    assert start.seq == 10
    clock[0] = 95.0
    start.searched(40)
    assert start.seq == 20
    clock[0] = 3600.0
    start.searched(40)
    assert start.seq == 0  # the whole log is searched periodically


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_writers_of_audit_rows_do_not_block_each_other(database_url: str, tmp_path: Path) -> None:
    """Both transactions have inserted before either commits, which a common lock would prevent."""
    plane = _plane(database_url, tmp_path)

    def commit_another(_session: Session) -> None:
        with plane.database.write() as second:
            second.execute(text("SET LOCAL lock_timeout = '1s'"))
            audit_log.record(second, on_host("user.create"), "usr_2", None)

    with plane.database.write() as first:
        audit_log.record(first, on_host("user.create"), "usr_1", None)
        at_end(first, Ending.COUNTS, commit_another)
    AuditLinks(plane.database, plane.audit_keys, None).tick()
    with plane.database.read() as session:
        order = session.execute(
            text("SELECT target_id FROM audit_log JOIN audit_links ON entry_seq = seq ORDER BY number")
        ).scalars()
        # In the order of their sequence numbers, since both were committed before the linker ran.
        assert list(order)[1:] == ["usr_1", "usr_2"]
    plane.database.dispose()
