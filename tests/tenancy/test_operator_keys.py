"""The operator's keys: rejection of other keys, key files, and replacement in two steps."""

import stat
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mooring.control.audit import signing_keys
from mooring.control.tenants import encryption
from mooring.settings import Settings
from mooring_client.cli.main import app
from tests.service import settings_for
from tests.tenancy.operator_keys import NEW, OLD, settings_with, start_and_stop

pytestmark = pytest.mark.both_databases


@dataclass(frozen=True)
class OperatorKey:
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


ENCRYPTION = OperatorKey(
    "encryption_keys", encryption.KEY_FILE, encryption.WrongEncryptionKey, "the encryption key is not the one"
)
AUDIT = OperatorKey(
    "audit_keys",
    signing_keys.KEY_FILE,
    signing_keys.WrongAuditKey,
    "the audit log is signed with another key",
)


@pytest.fixture(params=[ENCRYPTION, AUDIT], ids=["encryption", "audit"])
def operator_key(request: pytest.FixtureRequest) -> OperatorKey:
    made: OperatorKey = request.param
    return made


def test_another_key_is_rejected_and_changes_nothing(
    operator_key: OperatorKey, database_url: str, tmp_path: Path
) -> None:
    start_and_stop(operator_key.settings(database_url, tmp_path, OLD))
    with pytest.raises(operator_key.refusal, match=operator_key.variable):
        start_and_stop(operator_key.settings(database_url, tmp_path, NEW))
    start_and_stop(operator_key.settings(database_url, tmp_path, OLD))


@pytest.mark.parametrize("command", ["server", "up"])
def test_the_error_message_names_the_variable(
    operator_key: OperatorKey, tmp_path: Path, command: str
) -> None:
    url = f"sqlite:///{tmp_path / 'mooring.db'}"
    start_and_stop(operator_key.settings(url, tmp_path, OLD))
    environment = {
        "MOORING_DATABASE_URL": url, "MOORING_DATA_DIR": str(tmp_path), operator_key.variable: NEW,
        "MOORING_PORT": "0",
    }  # fmt: skip
    result = CliRunner().invoke(app, [command], env=environment)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"{operator_key.variable}: {operator_key.message}")
    assert "Traceback" not in result.stderr
    assert NEW not in result.output


def test_a_replica_may_have_the_new_key_before_its_first_use(
    operator_key: OperatorKey, tmp_path: Path
) -> None:
    url = f"sqlite:///{tmp_path / 'mooring.db'}"
    for keys in ((OLD,), (OLD, NEW), (OLD,)):
        start_and_stop(operator_key.settings(url, tmp_path, *keys))


def test_the_key_file_is_private_and_never_replaced(operator_key: OperatorKey, tmp_path: Path) -> None:
    settings = settings_for(f"sqlite:///{tmp_path / 'mooring.db'}", tmp_path / "data")
    start_and_stop(settings)
    file = tmp_path / "data" / operator_key.file
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    content = file.read_text()
    start_and_stop(settings)
    assert file.read_text() == content
    file.unlink()
    with pytest.raises(operator_key.refusal, match=operator_key.file):
        start_and_stop(settings)


def test_the_two_keys_differ(tmp_path: Path) -> None:
    start_and_stop(settings_for(f"sqlite:///{tmp_path / 'mooring.db'}", tmp_path))
    assert (tmp_path / encryption.KEY_FILE).read_text() != (tmp_path / signing_keys.KEY_FILE).read_text()
