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

from mooring.core.policy import Policy
from mooring.core.port_urls import PortUrls
from mooring.core.registry_hosts import parse_listed
from mooring.core.sign_on import RoleGrant, parse_grants
from mooring.core.webhooks import AddressRules, Network, parse_networks
from mooring_client.schemas.text import ImageReference


class Settings(Policy, BaseSettings):
    """Each field is read from the variable `MOORING_<FIELD>`; docs/operating.md describes each."""

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
        Field(description="comma-separated Fernet keys, newest first; null: a file in data_dir"),
    ] = None
    audit_keys: Annotated[
        SecretStr | None,
        Field(description="keys for the audit log, like encryption_keys; null: a file in data_dir"),
    ] = None
    audit_head_file: Annotated[
        Path | None, Field(description="file that gets each new head of the audit log; null: log lines only")
    ] = None
    database_owner_url: Annotated[
        SecretStr | None, Field(description="URL of the role that owns the tables; null: database_url")
    ] = None
    rate_limits: Literal["on", "off"] = "on"
    metrics_public: bool = False
    behind_tls_proxy: bool = False
    trusted_proxies: Annotated[
        str, Field(description="comma-separated addresses and networks whose X-Forwarded-For is trusted")
    ] = "127.0.0.1,::1"
    advertise_url: Annotated[
        str | None, Field(description="URL where agents reach this replica for streams; null: their sync URL")
    ] = None
    gateway_host: str = "127.0.0.1"
    gateway_port: Annotated[
        int, Field(ge=0, le=65535, description="where nodes connect to the gateway for streams")
    ] = 8720
    gateway_url: Annotated[
        str | None,
        Field(description="URL where nodes reach this gateway; null: its address, on loopback"),
    ] = None
    gateway_drain_s: Annotated[
        float, Field(ge=0, description="how long open sessions may continue after SIGTERM")
    ] = 30.0
    ssh_host: str = "127.0.0.1"
    ssh_port: Annotated[int, Field(ge=0, le=65535, description="0: no SSH")] = 8722
    ssh_public_host: Annotated[
        str | None, Field(description="name under which clients reach the SSH port; null: ssh_host")
    ] = None
    ssh_idle_s: Annotated[
        float, Field(ge=0, description="an SSH connection without data for so long is closed; 0: never")
    ] = 86_400.0
    ssh_longest_s: Annotated[
        float, Field(ge=0, description="an SSH connection is closed after this time; 0: never")
    ] = 604_800.0
    proxy_host: str = "127.0.0.1"
    proxy_port: Annotated[
        int, Field(ge=0, le=65535, description="where the port proxy serves HTTP; 0: no proxy")
    ] = 8721
    proxy_domain: Annotated[
        str,
        Field(
            max_length=189,
            pattern=r"^([a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?(\.[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)*)?$",
            description="the domain whose subdomains lead to the proxy; empty: paths, for trusted use",
        ),
    ] = ""
    proxy_url: Annotated[
        str | None,
        Field(description="URL at which clients reach the proxy, without a subdomain; null: see docs"),
    ] = None
    docker_host: str = "127.0.0.1"
    docker_port: Annotated[int, Field(ge=0, le=65535, description="0: no Docker clients")] = 0
    docker_public_url: Annotated[
        str | None,
        Field(description="tcp:// URL under which Docker clients reach the gateway; null: its address"),
    ] = None
    skypilot_image: Annotated[
        ImageReference | None, Field(description="image of SkyPilot's pods; null: SkyPilot creates none")
    ] = None
    api_url: Annotated[
        str | None, Field(description="URL at which the gateway calls the API; null: host and port")
    ] = None
    allowed_registries: Annotated[
        tuple[str, ...],
        NoDecode,
        Field(description="allowed registries outside the public internet: host, host:port, *.domain"),
    ] = ()
    template_mirror: Annotated[
        str | None,
        Field(
            max_length=200,
            pattern=r"^[a-z0-9.-]+(:[0-9]{1,5})?(/[a-z0-9]+([._-]+[a-z0-9]+)*)*$",
            description="where the images of global templates come from: host[:port][/path]; null: as named",
        ),
    ] = None
    webhook_allowed_networks: Annotated[
        tuple[Network, ...],
        NoDecode,
        Field(description="networks that webhooks may reach besides public addresses, also without TLS"),
    ] = ()
    smtp_host: Annotated[str | None, Field(description="where e-mails are handed over; null: none are")] = (
        None
    )
    smtp_port: Annotated[int, Field(ge=1, le=65535)] = 587
    smtp_security: Literal["starttls", "tls", "none"] = "starttls"
    smtp_user: str | None = None
    smtp_password: SecretStr | None = None
    smtp_from: Annotated[str | None, Field(description="the sender's address; needed with smtp_host")] = None
    oidc_issuer: Annotated[
        str | None, Field(description="accepted token issuer, exactly as in `iss`, final slash included")
    ] = None
    oidc_audience: Annotated[str | None, Field(description="required in a token's `aud`")] = None
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
    lost_after_s: Annotated[
        float, Field(gt=0, description="silence after which `on_node_loss: replace` takes effect")
    ] = 300.0
    fence_command: Annotated[
        str | None, Field(description="powers a lost node off, before its instances are replaced")
    ] = None
    fence_timeout_s: Annotated[float, Field(gt=0)] = 60.0
    start_timeout_s: Annotated[int, Field(ge=1)] = 3600
    events_kept_days: Annotated[int, Field(ge=1)] = 30
    deleted_kept_days: Annotated[
        float, Field(gt=0, le=36_500, description="days until deleted, revoked and used-up rows are purged")
    ] = 30.0
    idempotency_kept_hours: Annotated[float, Field(gt=0, le=876_000)] = 24.0
    project_stored_mib: Annotated[
        int, Field(ge=1, description="limit of a project's specs and labels, of deleted instances too")
    ] = 1024
    project_written_mib_per_day: Annotated[int, Field(ge=1)] = 2048

    @field_validator("bootstrap_admin_key")
    @classmethod
    def _long_enough(cls, key: SecretStr | None) -> SecretStr | None:
        if key is not None and len(key.get_secret_value()) < 32:
            raise ValueError("MOORING_BOOTSTRAP_ADMIN_KEY needs at least 32 characters")
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
                    "create one with: openssl rand -base64 32 | tr '+/' '-_'"
                )
        return keys

    @field_validator("oidc_roles", mode="before")
    @classmethod
    def _parse_roles(cls, given: Any) -> Any:
        try:
            return parse_grants(given) if isinstance(given, str) else given
        except ValueError as error:
            raise ValueError(f"MOORING_OIDC_ROLES: {error}") from None

    @field_validator("allowed_registries", mode="before")
    @classmethod
    def _parse_registries(cls, given: Any) -> Any:
        return parse_listed(given) if isinstance(given, str) else given

    @field_validator("webhook_allowed_networks", mode="before")
    @classmethod
    def _parse_networks(cls, given: Any) -> Any:
        return parse_networks(given) if isinstance(given, str) else given

    @model_validator(mode="after")
    def _complete_mail(self) -> Self:
        if self.smtp_host is not None and self.smtp_from is None:
            raise ValueError("MOORING_SMTP_HOST needs MOORING_SMTP_FROM, the address that e-mails come from")
        if self.smtp_security == "none" and self.smtp_password is not None:
            raise ValueError("MOORING_SMTP_SECURITY=none would send MOORING_SMTP_PASSWORD in the clear")
        return self

    @field_validator("oidc_issuer")
    @classmethod
    def _issuer_url(cls, issuer: str | None) -> str | None:
        if issuer is not None and (set("?#") & set(issuer) or not is_private_channel(issuer)):
            raise ValueError(
                "MOORING_OIDC_ISSUER needs an https URL (http on loopback only) without query or fragment: "
                "anyone who can change its responses can sign on as any user"
            )
        return issuer

    @model_validator(mode="after")
    def _complete_sign_on(self) -> Self:
        if (self.oidc_issuer is None) != (self.oidc_audience is None):
            raise ValueError(
                "set both MOORING_OIDC_ISSUER and MOORING_OIDC_AUDIENCE: without the audience, tokens "
                "issued for other services would be accepted"
            )
        if self.oidc_roles and self.oidc_issuer is None:
            raise ValueError("MOORING_OIDC_ROLES needs MOORING_OIDC_ISSUER")
        return self

    @field_validator("trusted_proxies")
    @classmethod
    def _normalize_proxies(cls, proxies: str) -> str:
        # uvicorn accepts `*`, with which any client could forge its address.
        return ",".join(str(ip_network(proxy.strip())) for proxy in proxies.split(","))

    @property
    def ssh_address(self) -> tuple[str, int] | None:
        """Host and port where SSH clients connect; None: there is no SSH gateway."""
        return (self.ssh_public_host or self.ssh_host, self.ssh_port) if self.ssh_port else None

    @property
    def docker_url(self) -> str:
        """Where Docker clients connect."""
        return self.docker_public_url or f"tcp://{bracketed(self.docker_host)}:{self.docker_port}"

    @property
    def resolved_api_url(self) -> str:
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)  # noqa: S104 - compared
        return self.api_url or f"http://{bracketed(host)}:{self.port}"

    @model_validator(mode="after")
    def _no_public_plain_http(self) -> Self:
        if self.docker_port and not (is_loopback(self.docker_host) or self.behind_tls_proxy):
            raise ValueError(
                f"refusing to serve Docker clients on {self.docker_host} without TLS: their API keys would "
                "be sent in the clear. Put a TLS proxy in front, and set MOORING_BEHIND_TLS_PROXY=true"
            )
        if not (is_loopback(self.host) or self.behind_tls_proxy):
            raise ValueError(
                f"refusing to serve plain HTTP on {self.host}: API keys would be sent in the clear. "
                "Put a TLS proxy in front and set MOORING_BEHIND_TLS_PROXY=true, or use 127.0.0.1"
            )
        return self

    @model_validator(mode="after")
    def _no_public_plain_proxy(self) -> Self:
        if self.proxy_port and not (is_loopback(self.proxy_host) or self.behind_tls_proxy):
            raise ValueError(
                f"refusing to serve plain HTTP on {self.proxy_host}: keys and cookies would be sent in the "
                "clear. Put a TLS proxy in front and set MOORING_BEHIND_TLS_PROXY=true, or set "
                "MOORING_PROXY_HOST=127.0.0.1"
            )
        return self

    @field_validator("proxy_url")
    @classmethod
    def _proxy_url_of_a_host(cls, url: str | None) -> str | None:
        if url is None:
            return None
        parts = urlsplit(url)
        has_more = parts.path.strip("/") or parts.query or parts.fragment or parts.username
        if parts.scheme not in {"http", "https"} or not parts.hostname or has_more:
            raise ValueError("MOORING_PROXY_URL needs http://host or https://host, with a port if necessary")
        return url.rstrip("/")

    @property
    def port_urls(self) -> PortUrls | None:
        """How ports are addressed through the proxy; None: there is none."""
        if not self.proxy_port:
            return None
        return PortUrls(self.proxy_domain, self.proxy_url or self._usual_proxy_url)

    @property
    def _usual_proxy_url(self) -> str:
        domain = self.proxy_domain
        if domain and domain.rpartition(".")[2] != "localhost":
            return f"https://{domain}"
        host = f"[{self.proxy_host}]" if ":" in self.proxy_host else self.proxy_host
        return f"http://{domain or host}:{self.proxy_port}"

    @property
    def webhook_addresses(self) -> AddressRules:
        return AddressRules(self.webhook_allowed_networks)

    @property
    def serves_this_machine_only(self) -> bool:
        """Whether only users of this machine can reach the API."""
        return is_loopback(self.host) and not self.behind_tls_proxy

    @property
    def deleted_kept(self) -> timedelta:
        return timedelta(days=self.deleted_kept_days)

    @property
    def idempotency_kept(self) -> timedelta:
        return timedelta(hours=self.idempotency_kept_hours)

    @property
    def resolved_database_url(self) -> str:
        """`database_url`, or SQLite in the data directory."""
        return self.database_url or f"sqlite:///{self.data_dir.resolve() / 'mooring.db'}"

    @property
    def migration_url(self) -> str:
        """The database URL with the role that owns the tables."""
        owner = self.database_owner_url
        return owner.get_secret_value() if owner else self.resolved_database_url


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def is_private_channel(url: str) -> bool:
    """Whether nobody on the network path can read or change this URL's responses (security rule R22)."""
    try:
        parts = urlsplit(url)
        host = parts.hostname
    except ValueError:
        return False
    return bool(host) and (parts.scheme == "https" or (parts.scheme == "http" and is_loopback(host or "")))


def bracketed(host: str) -> str:
    """The host as a URL shows it."""
    return f"[{host}]" if ":" in host else host
