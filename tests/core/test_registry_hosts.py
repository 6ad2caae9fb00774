"""Which registry hosts are public by name, and which an admin's list adds."""

import pytest

from mooring.core.registry_hosts import RegistryRules, is_internal, parse_listed

PROJECT, OTHER = "prj_default", "prj_other"


@pytest.mark.parametrize(
    "registry",
    [
        "localhost", "localhost:5000", "LOCALHOST:5000", "localhost.:5000", "registry.localhost",
        "127.0.0.1:2375", "127.1:5000", "127.0.0.1.:80", "0.0.0.0:1", "0:80",
        "169.254.169.254", "10.0.0.1:5000", "172.16.0.1", "172.31.255.255", "192.168.1.1", "100.64.0.1",
        "100.100.100.200", "192.0.0.192", "168.63.129.16", "198.18.0.1", "224.0.0.1", "255.255.255.255",
        "2130706433:80", "0x7f000001:80", "0x7f.0.0.1", "0177.0.0.1", "017700000001:80", "10.1",
        "0xa9fea9fe:80", "1.2.3.4.5", "999.1.1.1", "08.0.0.1", "metadata.google.internal",
        "registry.corp.internal:5000",
        "nas.local", "printer.lan", "router.home.arpa", "registry:5000", "registry", ".", "a..b", "-",
        "[::1]:5000", "[fd00:ec2::254]", "[fe80::1%eth0]:80", "[::ffff:10.0.0.1]:80", "[2002:7f00:1::]",
        "[64:ff9b::a9fe:a9fe]", "[::]", "[ff02::1]",
    ],
)  # fmt: skip
def test_internal_registries_are_rejected_in_any_spelling(registry: str) -> None:
    assert is_internal(registry)
    assert not RegistryRules().allows(registry, PROJECT)


@pytest.mark.parametrize(
    "registry",
    [
        "docker.io", "index.docker.io", "registry-1.docker.io", "ghcr.io", "nvcr.io", "quay.io:443",
        "registry.example.com:5000", "8.8.8.8", "8.8.8.8:5000", "172.32.0.1", "134744072:80",
        "123456789012.dkr.ecr.eu-central-1.amazonaws.com", "[2606:4700::1111]:443", "localhost.example.com",
        "internal.example.com", "0x7f.example.com",
    ],
)  # fmt: skip
def test_public_registries_are_allowed(registry: str) -> None:
    assert RegistryRules().allows(registry, PROJECT)


@pytest.mark.parametrize(
    ("listed", "registry", "allowed"),
    [
        ("10.0.0.5:5000", "10.0.0.5:5000", True),
        ("10.0.0.5:5000", "10.0.0.5:5001", False),
        ("10.0.0.5", "10.0.0.5:5001", True),
        ("registry.corp.internal", "REGISTRY.corp.internal:5000", True),
        ("*.corp.internal", "registry.corp.internal:5000", True),
        ("*.corp.internal", "corp.internal", False),
        ("*.corp.internal", "evilcorp.internal", False),
        ("localhost:5000, *.corp.internal", "localhost:5000", True),
        ("", "localhost:5000", False),
    ],
)
def test_registries_listed_by_an_admin_are_allowed(listed: str, registry: str, allowed: bool) -> None:
    assert RegistryRules(parse_listed(listed)).allows(registry, OTHER) is allowed


@pytest.mark.parametrize("listed", ["*", "https://registry", "user@registry", "a b", "reg*try.example.com"])
def test_invalid_entries_of_the_list_are_rejected(listed: str) -> None:
    with pytest.raises(ValueError, match="not a registry"):
        parse_listed(listed)


@pytest.mark.parametrize("registry", ["localhost:5000", "127.0.0.1:5000", "127.1:5000", "[::1]:5000"])
def test_loopback_is_allowed_for_one_project_only(registry: str) -> None:
    rules = RegistryRules(loopback_project=PROJECT)
    assert rules.allows(registry, PROJECT)
    assert not rules.allows(registry, OTHER)
    assert not rules.allows("10.0.0.1:5000", PROJECT)
