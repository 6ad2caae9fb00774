"""Processes with the same SQLite file wake each other's waiters after a commit."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mooring.db import migrate
from mooring.db.file_lock import beside
from mooring.db.file_notifications import FOLDER_SUFFIX, FileListener
from mooring.db.session import Database, notify
from mooring.db.signals import AnyTopic, Signals, Topic

_WAIT_S = 30

# Listens, says so, and waits for a topic, or to be killed.
_LISTEN = """
import sys, threading
from mooring.db.file_notifications import FileListener
from mooring.db.session import Database
from mooring.db.signals import Signals, Topic

database = Database(sys.argv[1], Signals())
woken = threading.Event()
with database.signals.waking(woken, Topic.instance("ins_1")):
    listener = FileListener(database.file_notifications, database.signals)
    listener.start()
    assert woken.wait(30)  # a start wakes all waiters
    woken.clear()
    print("listening", flush=True)
    print("woken" if woken.wait(30) else "not woken", flush=True)
    listener.stop()
database.dispose()
"""


@pytest.fixture
def url(tmp_path: Path) -> str:
    path = f"sqlite:///{tmp_path / 'mooring.db'}"
    migrate.upgrade(path)
    return path


@contextmanager
def opened(url: str, *, listens: bool) -> Iterator[Database]:
    database = Database(url, Signals())
    assert database.file_notifications is not None
    listener = FileListener(database.file_notifications, database.signals)
    if listens:
        started = threading.Event()
        with database.signals.waking(started, Topic.QUEUE):
            listener.start()
            assert started.wait(_WAIT_S), "a start wakes all waiters, since earlier notifications are lost"
    try:
        yield database
    finally:
        listener.stop()
        database.dispose()


@contextmanager
def listening_process(url: str) -> Iterator[subprocess.Popen[str]]:
    argv = [sys.executable, "-c", _LISTEN, url]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "listening\n"
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def gateway_beside_server(url: str, topic: AnyTopic) -> Iterator[tuple[Database, threading.Event]]:
    """The database of a gateway, and an event that a commit with the topic sets in the server."""
    woken = threading.Event()
    with (
        opened(url, listens=True) as server,
        opened(url, listens=True) as gateway,
        server.signals.waking(woken, topic),
    ):
        yield gateway, woken


def commit(database: Database, *topics: AnyTopic) -> None:
    with database.write() as session:
        notify(session, *topics)


def _sockets(url: str) -> list[str]:
    return [each.name for each in beside(Path(url.removeprefix("sqlite:///")), FOLDER_SUFFIX).iterdir()]


def test_a_commit_wakes_waiters_of_another_process(url: str) -> None:
    with opened(url, listens=True) as database, listening_process(url) as process:
        commit(database, Topic.instance("ins_1"))
        assert process.stdout is not None
        assert process.stdout.readline() == "woken\n"
        assert process.wait(_WAIT_S) == 0
        assert len(_sockets(url)) == 1, "a process that ended has left its socket"


def test_a_process_that_does_not_listen_notifies_those_that_do(url: str) -> None:
    woken = threading.Event()
    with (
        opened(url, listens=True) as server,
        opened(url, listens=False) as command,
        server.signals.waking(woken, Topic.QUEUE),
    ):
        commit(command, Topic.QUEUE)
        assert woken.wait(_WAIT_S)


def test_only_the_topics_of_the_commit_are_woken(url: str) -> None:
    first, second = threading.Event(), threading.Event()
    with (
        opened(url, listens=True) as server,
        opened(url, listens=True) as gateway,
        server.signals.waking(first, Topic.node("a")),
        server.signals.waking(second, Topic.node("b")),
    ):
        commit(gateway, Topic.node("a"))
        assert first.wait(_WAIT_S)
        assert not second.is_set()


def test_too_many_topics_for_one_message_wake_all_waiters(url: str) -> None:
    with gateway_beside_server(url, Topic.node("a")) as (gateway, woken):
        commit(gateway, *(Topic.node(f"{number:_>30}") for number in range(5000)))
        assert woken.wait(_WAIT_S)


def test_the_socket_of_a_killed_process_is_removed(url: str) -> None:
    with opened(url, listens=True) as database:
        with listening_process(url):
            assert len(_sockets(url)) == 2
        commit(database, Topic.QUEUE)
        assert len(_sockets(url)) == 1


def test_a_process_that_receives_nothing_delays_no_commit(url: str) -> None:
    with opened(url, listens=True) as database:
        assert database.file_notifications is not None
        other = Database(url, Signals())
        assert other.file_notifications is not None
        with other.file_notifications.bind():
            for number in range(1000):
                commit(database, Topic.node(str(number)))
        other.dispose()


def test_it_works_in_a_folder_with_a_long_path(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 120)
    folder.mkdir()
    url = f"sqlite:///{folder / 'mooring.db'}"
    migrate.upgrade(url)
    with gateway_beside_server(url, Topic.QUEUE) as (gateway, woken):
        commit(gateway, Topic.QUEUE)
        assert woken.wait(_WAIT_S)


def test_a_folder_that_cannot_be_read_fails_no_commit(url: str) -> None:
    beside(Path(url.removeprefix("sqlite:///")), FOLDER_SUFFIX).touch()
    with opened(url, listens=False) as database:
        commit(database, Topic.QUEUE)
