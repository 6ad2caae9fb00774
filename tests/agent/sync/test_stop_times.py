"""The times of stop signals, as the next agent reads them."""

import json
import time
from pathlib import Path

import pytest

from mooring.agent.sync.identity import StateDirectory
from mooring.agent.sync.stop_times import FILE, StopTimes


@pytest.fixture
def boot_id(tmp_path: Path) -> Path:
    path = tmp_path / "boot_id"
    path.write_text("boot-1\n")
    return path


@pytest.fixture
def stops(tmp_path: Path, boot_id: Path) -> StopTimes:
    return StopTimes(StateDirectory(tmp_path), boot_id)


def test_saved_times_are_loaded_by_the_next_agent(stops: StopTimes, tmp_path: Path, boot_id: Path) -> None:
    assert stops.load() == {}
    stops.note({"c-1": 1.0})
    stops.note({"c-1": 1.0, "c-2": 2.0})
    stops.save()
    assert StopTimes(StateDirectory(tmp_path), boot_id).load() == {"c-1": 1.0, "c-2": 2.0}


def test_times_from_before_a_reboot_are_ignored(stops: StopTimes, boot_id: Path) -> None:
    stops.note({"c-1": 1.0})
    stops.save()
    boot_id.write_text("boot-2\n")
    assert stops.load() == {}


def test_a_time_in_the_future_is_ignored(stops: StopTimes) -> None:
    stops.note({"c-1": 1.0, "c-2": time.monotonic() + 3600, "c-3": float("nan")})
    stops.save()
    assert stops.load() == {"c-1": 1.0}


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", '{"boot_id": "boot-1", "since": 1}', '{"boot_id": "boot-1", "since": {"c": "x"}}'],
)
def test_a_damaged_file_has_no_times(stops: StopTimes, tmp_path: Path, content: str) -> None:
    StateDirectory(tmp_path).write(FILE, content.encode())
    assert stops.load() == {}


def test_a_full_disk_is_logged_and_raises_nothing(
    stops: StopTimes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(StateDirectory, "write", full)
    stops.note({"c-1": 1.0})
    stops.save()
    assert "cannot save the times of stop signals" in caplog.text


def test_the_file_of_a_thousand_stops_is_small(stops: StopTimes, tmp_path: Path) -> None:
    stops.note({f"{number:064x}": 1234567.123456 for number in range(1000)})
    stops.save()
    content = (tmp_path / FILE).read_bytes()
    assert len(content) < 100_000
    assert set(json.loads(content)) == {"boot_id", "since"}
