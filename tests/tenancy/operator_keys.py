"""Services with keys that the operator sets, for the tests of the encryption key and the audit key."""

from pathlib import Path

from cryptography.fernet import Fernet
from pydantic import SecretStr

from mooring.server import open_control_plane
from mooring.settings import Settings
from tests.service import settings_for

OLD, NEW = (Fernet.generate_key().decode() for _ in range(2))


def settings_with(setting: str, keys: tuple[str, ...], database_url: str, folder: Path) -> Settings:
    """Settings in which `setting` (`encryption_keys`, `audit_keys`) has these keys."""
    return settings_for(database_url, folder, **{setting: SecretStr(",".join(keys))})


def start_and_stop(settings: Settings) -> None:
    open_control_plane(settings).database.dispose()
