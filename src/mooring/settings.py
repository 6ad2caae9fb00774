"""The server's settings: read once from the environment (`MOORING_*`), frozen, passed in."""

import base64
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict


class Settings(BaseSettings):
    """Names are api.md's, less the prefix; docs/operating.md explains each."""

    model_config = SettingsConfigDict(
        env_prefix="MOORING_", frozen=True, env_ignore_empty=True, extra="ignore"
    )

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8700
    data_dir: Path = Path(".mooring")
    database_url: str | None = None
    bootstrap_admin_key: SecretStr | None = None
    encryption_keys: Annotated[
        SecretStr | None,
        Field(description="Fernet keys, comma-separated, newest first; null: a file in the data directory"),
    ] = None
    rate_limits: Literal["on", "off"] = "on"
    metrics_public: bool = False
    behind_tls_proxy: bool = False
    advertise_url: Annotated[
        str | None, Field(description="where agents reach this replica for streams; null: where they sync")
    ] = None
    report_interval_s: Annotated[float, Field(gt=0, le=60)] = 5.0
    unreachable_after_s: Annotated[float, Field(gt=0)] = 30.0
    start_timeout_s: Annotated[int, Field(ge=1)] = 3600
    events_kept_days: Annotated[int, Field(ge=1)] = 30

    @field_validator("bootstrap_admin_key")
    @classmethod
    def _long_enough(cls, key: SecretStr | None) -> SecretStr | None:
        if key is not None and len(key.get_secret_value()) < 32:
            raise ValueError("MOORING_BOOTSTRAP_ADMIN_KEY needs 32 characters or more")
        return key

    @field_validator("encryption_keys")
    @classmethod
    def _fernet_keys(cls, keys: SecretStr | None) -> SecretStr | None:
        for key in keys.get_secret_value().split(",") if keys else ():
            try:
                decoded = base64.urlsafe_b64decode(key.strip())
            except ValueError:
                decoded = b""
            if len(decoded) != 32:
                raise ValueError(
                    "MOORING_ENCRYPTION_KEYS needs keys of 32 bytes in URL-safe base64; make one with: "
                    "openssl rand -base64 32 | tr '+/' '-_'"
                )
        return keys

    @model_validator(mode="after")
    def _no_plain_http_to_the_world(self) -> Self:
        if not (is_loopback(self.host) or self.behind_tls_proxy):
            raise ValueError(
                f"refusing to serve plain HTTP on {self.host}: keys would cross the network in the clear. "
                "Put a TLS proxy in front and set MOORING_BEHIND_TLS_PROXY=true, or use 127.0.0.1"
            )
        return self

    @property
    def resolved_database_url(self) -> str:
        """The database asked for, else SQLite in the data directory."""
        return self.database_url or f"sqlite:///{self.data_dir.resolve() / 'mooring.db'}"


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the address."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
