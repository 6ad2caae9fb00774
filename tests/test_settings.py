"""The server's settings: defaults, environment variables, and values that are rejected at the start."""

import os
from pathlib import Path

import pytest
from pydantic import ValidationError

from mooring.settings import Settings, is_loopback


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("MOORING_"):
            monkeypatch.delenv(name)


def test_important_defaults(tmp_path: Path) -> None:
    settings = Settings()
    assert (settings.host, settings.port, settings.data_dir) == ("127.0.0.1", 8700, Path(".mooring"))
    assert (settings.rate_limits, settings.metrics_public, settings.behind_tls_proxy) == ("on", False, False)
    assert Settings(data_dir=tmp_path).resolved_database_url == f"sqlite:///{tmp_path / 'mooring.db'}"


def test_settings_are_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "PORT": "9000",
        "RATE_LIMITS": "off",
        "METRICS_PUBLIC": "true",
        "DATABASE_URL": "postgresql://x/y",
        "BOOTSTRAP_ADMIN_KEY": "k" * 32,
        "HOST": "",
    }.items():
        monkeypatch.setenv(f"MOORING_{name}", value)
    settings = Settings()
    assert (settings.port, settings.rate_limits, settings.metrics_public) == (9000, "off", True)
    assert settings.resolved_database_url == "postgresql://x/y"
    assert settings.host == "127.0.0.1"  # an empty variable counts as unset
    assert "kkk" not in repr(settings)


@pytest.mark.parametrize("key", ["k", "k" * 31])
def test_a_short_admin_key_is_rejected(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.setenv("MOORING_BOOTSTRAP_ADMIN_KEY", key)
    with pytest.raises(ValidationError, match="32 characters"):
        Settings()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "gpu.example", "192.168.1.1"])
def test_plain_http_beyond_loopback_needs_a_tls_proxy(host: str) -> None:
    with pytest.raises(ValidationError, match="MOORING_BEHIND_TLS_PROXY"):
        Settings(host=host)
    assert Settings(host=host, behind_tls_proxy=True).host == host


def test_docker_clients_beyond_loopback_need_a_tls_proxy() -> None:
    with pytest.raises(ValidationError, match="MOORING_BEHIND_TLS_PROXY"):
        Settings(docker_host="10.0.0.7", docker_port=8723)
    assert Settings(docker_host="10.0.0.7", docker_port=8723, behind_tls_proxy=True).docker_port == 8723
    assert Settings(docker_host="10.0.0.7").docker_port == 0


def test_addresses_of_docker_clients_and_of_the_api() -> None:
    settings = Settings(docker_host="::1", docker_port=8723)
    assert (settings.docker_url, settings.resolved_api_url) == ("tcp://[::1]:8723", "http://127.0.0.1:8700")
    everywhere = Settings(host="0.0.0.0", behind_tls_proxy=True)
    assert everywhere.resolved_api_url == "http://127.0.0.1:8700"


@pytest.mark.parametrize("proxies", ["*", "proxy.example", "10.0.0.1/8", "10.0.0.1,,10.0.0.2"])
def test_only_addresses_and_networks_are_trusted_as_proxies(proxies: str) -> None:
    with pytest.raises(ValidationError, match="trusted_proxies"):
        Settings(trusted_proxies=proxies)
    assert Settings(trusted_proxies="10.0.0.0/8, ::1").trusted_proxies == "10.0.0.0/8,::1/128"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_plain_http_on_loopback_is_allowed(host: str) -> None:
    assert is_loopback(host)
    assert Settings(host=host).host == host


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PORT", "-1"),
        ("PORT", "65536"),
        ("PORT", "x"),
        ("RATE_LIMITS", "maybe"),
        ("METRICS_PUBLIC", "perhaps"),
        ("START_TIMEOUT_S", "0"),
        ("EVENTS_KEPT_DAYS", "0"),
        ("REPORT_INTERVAL_S", "0"),
        ("UNREACHABLE_AFTER_S", "-1"),
    ],
)
def test_invalid_values_are_rejected(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(f"MOORING_{name}", value)
    with pytest.raises(ValidationError):
        Settings()
