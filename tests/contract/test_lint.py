"""Two linters of other people's read the document and find nothing, errors or warnings."""

from pathlib import Path

from tests.contract.tools import FOLDER, linter, run


def test_spectral_finds_nothing(document_file: Path) -> None:
    done = run(
        linter("spectral"),
        "lint",
        # The exceptions for single paths in the rules are told by the file's name next to them.
        f"--stdin-filepath={FOLDER / 'openapi.json'}",
        f"--ruleset={FOLDER / 'spectral.yaml'}",
        "--fail-severity=warn",
        stdin=document_file,
    )
    assert done.returncode == 0, done.stdout[-6000:]


def test_redocly_finds_nothing(document_file: Path) -> None:
    done = run(
        linter("redocly"),
        "lint",
        document_file,
        f"--config={FOLDER / 'redocly.yaml'}",
        # It would otherwise ask the network for its own newest version and say that it ran.
        REDOCLY_SUPPRESS_UPDATE_NOTICE="true",
        REDOCLY_TELEMETRY="off",
    )
    assert done.returncode == 0, done.stdout[-6000:]
