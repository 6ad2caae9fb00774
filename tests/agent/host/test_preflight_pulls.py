"""The check of concurrent downloads in `mooring doctor`."""

from pathlib import Path

import pytest

from mooring.agent.host.preflight import Check
from mooring.agent.host.preflight_pulls import downloads


def check_with(folder: Path, content: str) -> Check:
    """Check a Docker configuration file with this content."""
    config = folder / "daemon.json"
    config.write_text(content)
    return downloads(config)


def is_warning(check: Check) -> bool:
    return check.ok is None and bool(check.remedy)


@pytest.mark.parametrize(
    ("content", "limit"),
    [
        ("", "3"),  # Docker's default
        ("{}", "3"),
        ('{"max-concurrent-downloads": 15}', "15"),
        ('{"max-concurrent-downloads": "many"}', "many"),
    ],
)
def test_too_few_concurrent_downloads_are_a_warning(tmp_path: Path, content: str, limit: str) -> None:
    check = check_with(tmp_path, content)
    assert is_warning(check)
    assert check.detail.startswith(f"{limit} layers at a time")


def test_without_a_configuration_file_dockers_default_is_a_warning(tmp_path: Path) -> None:
    check = downloads(tmp_path / "daemon.json")
    assert is_warning(check)
    assert check.detail.startswith("3 layers at a time")


def test_enough_concurrent_downloads_pass(tmp_path: Path) -> None:
    check = check_with(tmp_path, '{"max-concurrent-downloads": 16}')
    assert (check.ok, check.detail) == (True, "16 layers")


@pytest.mark.parametrize("content", ["{", "[]"])
def test_an_invalid_configuration_file_is_a_warning(tmp_path: Path, content: str) -> None:
    check = check_with(tmp_path, content)
    assert is_warning(check)
    assert "cannot be read" in check.detail
