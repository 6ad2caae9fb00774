"""The check of concurrent downloads in `mooring doctor`."""

from pathlib import Path

import pytest

from mooring.agent.host.preflight_pulls import downloads


@pytest.mark.parametrize(
    ("content", "ok", "detail"),
    [
        (None, None, "3 layers"),
        ("", None, "3 layers"),
        ("{}", None, "3 layers"),
        ('{"max-concurrent-downloads": 15}', None, "15 layers"),
        ('{"max-concurrent-downloads": 16}', True, "16 layers"),
        ('{"max-concurrent-downloads": "many"}', None, "many layers"),
        ("{", None, "cannot be read"),
        ("[]", None, "cannot be read"),
    ],
)
def test_few_concurrent_downloads_are_a_warning(
    tmp_path: Path, content: str | None, ok: bool | None, detail: str
) -> None:
    config = tmp_path / "daemon.json"
    if content is not None:
        config.write_text(content)
    check = downloads(config)
    assert check.ok is ok
    assert detail in check.detail
