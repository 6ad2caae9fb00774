"""The operator's keys: another key is refused, key files are private, a new key is added in two steps."""

import stat
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mooring.cli.main import app
from mooring.control.audit import signing_keys
from mooring.control.tenants import encryption
from mooring.settings import Settings
from tests.service import settings_for
from tests.tenancy.operator_keys import NEW, OLD, settings_with, start_and_end

pytestmark = pytest.mark.both_databases


@dataclass(frozen=True)
class Kind:
    """A key that the operator keeps outside the database."""

    setting: str
    file: str
    refusal: type[Exception]
    message: str

    @property
    def variable(self) -> str:
        return f"MOORING_{self.setting.upper()}"

    def settings(self, database_url: str, folder: Path, *keys: str) -> Settings:
        return settings_with(self.setting, keys, database_url, folder)


ENCRYPTION = Kind(
    "encryption_keys", encryption.KEY_FILE, encryption.WrongEncryptionKey, "the encryption key is not the one"
)
AUDIT = Kind(
    "audit_keys",
    signing_keys.KEY_FILE,
    signing_keys.WrongAuditKey,
    "the audit log is signed with another key",
)


@pytest.fixture(params=[ENCRYPTION, AUDIT], ids=["encryption", "audit"])
def kind(request: pytest.FixtureRequest) -> Kind:
    made: Kind = request.param
    return made


def test_another_key_is_refused_and_changes_nothing(kind: Kind, database_url: str, tmp_path: Path) -> None:
    start_and_end(kind.settings(database_url, tmp_path, OLD))
    with pytest.raises(kind.refusal, match=kind.variable):
        start_and_end(kind.settings(database_url, tmp_path, NEW))
    start_and_end(kind.settings(database_url, tmp_path, OLD))


@pytest.mark.parametrize("command", ["server", "up"])
def test_the_operator_is_told_how_to_mend_it(kind: Kind, tmp_path: Path, command: str) -> None:
    url = f"sqlite:///{tmp_path / 'mooring.db'}"
    start_and_end(kind.settings(url, tmp_path, OLD))
    environment = {
        "MOORING_DATABASE_URL": url, "MOORING_DATA_DIR": str(tmp_path), kind.variable: NEW,
        "MOORING_PORT": "0",
    }  # fmt: skip
    ended = CliRunner().invoke(app, [command], env=environment)
    assert ended.exit_code == 2
    assert ended.stderr.startswith(f"{kind.variable}: {kind.message}")
    assert "Traceback" not in ended.stderr
    assert NEW not in ended.output


def test_a_replica_may_know_the_new_key_before_it_is_used(kind: Kind, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'mooring.db'}"
    for keys in ((OLD,), (OLD, NEW), (OLD,)):
        start_and_end(kind.settings(url, tmp_path, *keys))


def test_the_key_file_is_its_owners_alone_and_stays_the_same(kind: Kind, tmp_path: Path) -> None:
    settings = settings_for(f"sqlite:///{tmp_path / 'mooring.db'}", tmp_path / "data")
    start_and_end(settings)
    file = tmp_path / "data" / kind.file
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    kept = file.read_text()
    start_and_end(settings)
    assert file.read_text() == kept
    file.unlink()
    with pytest.raises(kind.refusal, match=kind.file):
        start_and_end(settings)


def test_the_two_keys_differ(tmp_path: Path) -> None:
    start_and_end(settings_for(f"sqlite:///{tmp_path / 'mooring.db'}", tmp_path))
    assert (tmp_path / encryption.KEY_FILE).read_text() != (tmp_path / signing_keys.KEY_FILE).read_text()
