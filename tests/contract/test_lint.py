"""Two third-party linters find no errors or warnings in the document."""

from pathlib import Path

import pytest

from tests.contract.tools import FOLDER, linter, run

# Node.js uses ten seconds of CPU time, and the machine may be busy.
pytestmark = pytest.mark.timeout(300)


def test_spectral_finds_nothing(document_file: Path) -> None:
    result = run(
        linter("spectral"),
        "lint",
        # The path-specific exceptions in the ruleset refer to this file name.
        f"--stdin-filepath={FOLDER / 'openapi.json'}",
        f"--ruleset={FOLDER / 'spectral.yaml'}",
        "--fail-severity=warn",
        stdin=document_file,
    )
    assert result.returncode == 0, result.stdout[-6000:]


def test_redocly_finds_nothing(document_file: Path) -> None:
    result = run(
        linter("redocly"),
        "lint",
        document_file,
        f"--config={FOLDER / 'redocly.yaml'}",
        # Otherwise it checks for a newer version over the network and sends telemetry.
        REDOCLY_SUPPRESS_UPDATE_NOTICE="true",
        REDOCLY_TELEMETRY="off",
    )
    assert result.returncode == 0, result.stdout[-6000:]
