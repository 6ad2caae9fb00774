"""What the gateway makes of the answers of programs in a container, which may print anything."""

import pytest

from mooring.gateway.docker.archives import stat_document
from mooring.gateway.docker.filters import nanoseconds_of
from mooring_client.errors import BadRequest, Conflict


def test_the_description_of_a_file_is_dockers() -> None:
    assert stat_document("/data/file", "12 81a4 1700000000\n") == {
        "name": "file", "size": 12, "mode": 0o644, "mtime": "2023-11-14T22:13:20Z", "linkTarget": "",
    }  # fmt: skip
    assert stat_document("/", "4096 41ed -1\n/target\n") == {
        "name": "/", "size": 4096, "mode": 0o755 | 1 << 31, "mtime": "1970-01-01T00:00:00Z",
        "linkTarget": "/target",
    }  # fmt: skip


@pytest.mark.parametrize(
    "text", ["", "nonsense", "12 81a4", f"{'9' * 5000} 81a4 0", "12 81a4 999999999999", "12 zz 0", "1 2 3 4"]
)
def test_what_stat_cannot_have_printed_is_refused(text: str) -> None:
    with pytest.raises(Conflict, match="stat does not work"):
        stat_document("/file", text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, None),
        ("0", 0),
        ("1700000000", 1_700_000_000 * 10**9),
        ("1700000000.123456789", 1_700_000_000_123_456_789),
        ("2023-11-14T22:13:20.000000001Z", 1_700_000_000_000_000_001),
        ("2023-11-14T23:13:20.5+01:00", 1_700_000_000_500_000_000),
        ("2023-11-14T22:13:20", 1_700_000_000 * 10**9),
        ("2023-11-14", 1_699_920_000 * 10**9),
    ],
)
def test_times_are_exact(text: str | None, expected: int | None) -> None:
    assert nanoseconds_of(text) == expected


@pytest.mark.parametrize("text", ["yesterday", "1e9", "-5", "9" * 40, "2023-13-01", "1700000000.5Z", "Z"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(BadRequest, match="invalid time"):
        nanoseconds_of(text)
