"""The server's settings: read once from the environment (`MOORING_*`), frozen, passed in."""

import base64
from collections.abc import Mapping
from datetime import timedelta
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, ValidationInfo, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from mooring.core.registry_hosts import parse_listed
from mooring.core.sign_on import RoleGrant, parse_grants


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
    audit_keys: Annotated[
        SecretStr | None,
        Field(
            description="keys that sign the audit log, as encryption_keys; null: a file in the data directory"
        ),
    ] = None
    audit_head_file: Annotated[
        Path | None, Field(description="where each new head of the audit log is appended; null: logged only")
    ] = None
    database_owner_url: Annotated[
        SecretStr | None,
        Field(description="whose role migrates and owns the tables; null: that of database_url does it all"),
    ] = None
    rate_limits: Literal["on", "off"] = "on"
    metrics_public: bool = False
    behind_tls_proxy: bool = False
    trusted_proxies: Annotated[
        str, Field(description="whose X-Forwarded-For is believed: addresses and networks, comma-separated")
    ] = "127.0.0.1,::1"
    advertise_url: Annotated[
        str | None, Field(description="where agents reach this replica for streams; null: where they sync")
    ] = None
    allowed_registries: Annotated[
        tuple[str, ...],
        NoDecode,
        Field(description="registries that are not on the public internet: host, host:port, *.domain, …"),
    ] = ()
    oidc_issuer: Annotated[
        str | None, Field(description="whose tokens are taken; exactly as it writes itself, slash included")
    ] = None
    oidc_audience: Annotated[str | None, Field(description="what `aud` of a token must hold")] = None
    oidc_roles: Annotated[
        Mapping[str, tuple[RoleGrant, ...]],
        NoDecode,
        Field(description="VALUE=admin, VALUE=PROJECT:ROLE, …, or the same as JSON"),
    ] = {}
    oidc_roles_claim: str = "groups"
    oidc_name_claim: str = "name"
    oidc_email_claim: str = "email"
    report_interval_s: Annotated[float, Field(gt=0, le=60)] = 5.0
    unreachable_after_s: Annotated[float, Field(gt=0)] = 30.0
    start_timeout_s: Annotated[int, Field(ge=1)] = 3600
    events_kept_days: Annotated[int, Field(ge=1)] = 30
    deleted_kept_days: Annotated[
        float, Field(gt=0, le=36_500, description="until what was deleted, revoked or used up is purged")
    ] = 30.0
    idempotency_kept_hours: Annotated[float, Field(gt=0, le=876_000)] = 24.0
    project_stored_mib: Annotated[
        int, Field(ge=1, description="specs and labels of a project's instances, until they are purged")
    ] = 1024
    project_written_mib_per_day: Annotated[int, Field(ge=1)] = 2048
    backfill: Annotated[
        Literal["easy", "conservative"],
        Field(description="whether only the first that waits is kept a place, or each one"),
    ] = "easy"
    usage_half_life_s: Annotated[float, Field(gt=0)] = 7 * 86_400.0
    overdue_after_s: Annotated[float, Field(ge=0)] = 86_400.0
    preemption_min_run_s: Annotated[float, Field(ge=0)] = 300.0

    @field_validator("bootstrap_admin_key")
    @classmethod
    def _long_enough(cls, key: SecretStr | None) -> SecretStr | None:
        if key is not None and len(key.get_secret_value()) < 32:
            raise ValueError("MOORING_BOOTSTRAP_ADMIN_KEY needs 32 characters or more")
        return key

    @field_validator("encryption_keys", "audit_keys")
    @classmethod
    def _keys_of_32_bytes(cls, keys: SecretStr | None, info: ValidationInfo) -> SecretStr | None:
        for key in keys.get_secret_value().split(",") if keys else ():
            try:
                decoded = base64.urlsafe_b64decode(key.strip())
            except ValueError:
                decoded = b""
            if len(decoded) != 32:
                raise ValueError(
                    f"MOORING_{str(info.field_name).upper()} needs keys of 32 bytes in URL-safe base64; "
                    "make one with: "
                    "openssl rand -base64 32 | tr '+/' '-_'"
                )
        return keys

    @field_validator("oidc_roles", mode="before")
    @classmethod
    def _grants(cls, given: Any) -> Any:
        try:
            return parse_grants(given) if isinstance(given, str) else given
        except ValueError as error:
            raise ValueError(f"MOORING_OIDC_ROLES: {error}") from None

    @field_validator("allowed_registries", mode="before")
    @classmethod
    def _registries(cls, given: Any) -> Any:
        return parse_listed(given) if isinstance(given, str) else given

    @field_validator("oidc_issuer")
    @classmethod
    def _issuer_url(cls, issuer: str | None) -> str | None:
        if issuer is not None and (set("?#") & set(issuer) or not is_private_channel(issuer)):
            raise ValueError(
                "MOORING_OIDC_ISSUER needs an https URL (http on loopback only) without query or fragment: "
                "who can change its answers can sign on as anybody"
            )
        return issuer

    @model_validator(mode="after")
    def _sign_on_is_whole(self) -> Self:
        if (self.oidc_issuer is None) != (self.oidc_audience is None):
            raise ValueError(
                "MOORING_OIDC_ISSUER and MOORING_OIDC_AUDIENCE belong together: without the audience, "
                "tokens that other services are given would be good here"
            )
        if self.oidc_roles and self.oidc_issuer is None:
            raise ValueError("MOORING_OIDC_ROLES does nothing without MOORING_OIDC_ISSUER")
        return self

    @field_validator("trusted_proxies")
    @classmethod
    def _addresses(cls, proxies: str) -> str:
        # uvicorn would take `*`, and with it anybody's word for where they are.
        return ",".join(str(ip_network(proxy.strip())) for proxy in proxies.split(","))

    @model_validator(mode="after")
    def _no_plain_http_to_the_world(self) -> Self:
        if not (is_loopback(self.host) or self.behind_tls_proxy):
            raise ValueError(
                f"refusing to serve plain HTTP on {self.host}: keys would cross the network in the clear. "
                "Put a TLS proxy in front and set MOORING_BEHIND_TLS_PROXY=true, or use 127.0.0.1"
            )
        return self

    @property
    def serves_this_machine_only(self) -> bool:
        """Whether whoever can ask for containers is on this machine already."""
        return is_loopback(self.host) and not self.behind_tls_proxy

    @property
    def deleted_kept(self) -> timedelta:
        return timedelta(days=self.deleted_kept_days)

    @property
    def idempotency_kept(self) -> timedelta:
        return timedelta(hours=self.idempotency_kept_hours)

    @property
    def resolved_database_url(self) -> str:
        """The database asked for, else SQLite in the data directory."""
        return self.database_url or f"sqlite:///{self.data_dir.resolve() / 'mooring.db'}"

    @property
    def migration_url(self) -> str:
        """The database, as the role that owns its tables."""
        owner = self.database_owner_url
        return owner.get_secret_value() if owner else self.resolved_database_url


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the address."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def is_private_channel(url: str) -> bool:
    """Whether nobody in between can read or change what this URL answers (R22)."""
    try:
        parts = urlsplit(url)
        host = parts.hostname
    except ValueError:
        return False
    return bool(host) and (parts.scheme == "https" or (parts.scheme == "http" and is_loopback(host or "")))
