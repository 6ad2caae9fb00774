"""What `mooring ssh` gives to OpenSSH: nothing that OpenSSH or a shell could take for more than a value."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from mooring_client import Mooring
from mooring_client.cli.ssh import access as ssh_access
from mooring_client.cli.ssh.options import configuration, include_in, options, user_of
from mooring_client.failures import BadAnswer, ClientFailure, NotConfigured

KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJPIFcToRv3HpBO9CtLs3mTMlNqUNFe7Uh3JbJy9IFn4"
ADDRESS = {"host": "ssh.example.org", "port": 22, "host_keys": [KEY], "known_hosts": ""}
CERTIFICATE = {
    "certificate": KEY.replace("ed25519", "ed25519-cert-v01@openssh.com", 1),
    "expires_at": "2099-01-01T00:00:00.000Z",
}


@pytest.fixture(autouse=True)
def config_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return tmp_path / "mooring" / "ssh"


def renewed(public: str = KEY, **changed: Any) -> ssh_access.GatewayAccess:
    """The access from answers of which some fields are changed."""

    def answer(request: httpx.Request) -> httpx.Response:
        whole = CERTIFICATE if request.method == "POST" else ADDRESS
        return httpx.Response(200, json={**whole, **changed})

    http = httpx.Client(transport=httpx.MockTransport(answer))
    with Mooring("https://mooring.example.org", "key", http=http) as client:
        return ssh_access.renewed_access(client, ssh_access.LocalKey(Path("/keys/own"), public))


@pytest.mark.parametrize(
    "host", ["box.mooring", "a-b.team-1.mooring", "ins_01m8ep0zk5bak3377ahwj8qapq.mooring"]
)
def test_a_host_name_means_an_instance(host: str) -> None:
    assert user_of(host) == host.removesuffix(".mooring")


@pytest.mark.parametrize(
    "host",
    [
        "-oProxyCommand=x.mooring", "a b.mooring", "a\nUser root.mooring", "../a.mooring", "a.b.c.mooring",
        ".mooring", "mooring", "box", "Box.mooring", "box.mooring\n", "a'.mooring", "$(id).mooring",
    ],
)  # fmt: skip
def test_another_host_name_is_refused(host: str) -> None:
    with pytest.raises(ClientFailure, match="names no instance"):
        user_of(host)


@pytest.mark.parametrize(
    "changed",
    [
        {"host": "-oProxyCommand=touch x"}, {"host": "a\nProxyCommand x"}, {"host": ""}, {"host": None},
        {"port": -1}, {"port": "22\nUser root"}, {"port": 65_536}, {"port": None},
        {"host_keys": [f"{KEY}\n@cert-authority * {KEY}"]}, {"host_keys": None}, {"host_keys": [None]},
        {"websocket_url": "wss://a/$(touch x)"}, {"websocket_url": "wss://a' b"}, {"websocket_url": "https://a"},
        {"certificate": f"{KEY}\n{KEY}"}, {"certificate": ""}, {"expires_at": "soon"}, {"expires_at": None},
    ],
    ids=str,
)  # fmt: skip
def test_an_answer_that_openssh_could_misread_is_refused(
    changed: dict[str, Any], config_folder: Path
) -> None:
    with pytest.raises(BadAnswer, match="SSH"):
        renewed(**changed)
    assert not config_folder.exists()


def test_the_websocket_is_the_one_that_the_server_names_or_of_its_own_host() -> None:
    assert renewed().websocket_url == "wss://mooring.example.org/v1/ssh"
    assert renewed(websocket_url="wss://gw.example.org/v1/ssh").websocket_url == "wss://gw.example.org/v1/ssh"


def test_a_security_key_is_used_without_a_certificate(config_folder: Path) -> None:
    key = ssh_access.LocalKey(Path("/keys/own"), f"sk-{KEY}")
    access = renewed(key.public, certificate=None)
    assert not access.certificate.exists()
    assert not any("CertificateFile" in line for line in options(access, key, "box", None))


@pytest.mark.parametrize("folder", ["a'b", 'a"b', "a%h", "a$b", "a\\b", "a\nb", "a*", "[a]"])
def test_a_path_that_the_configuration_cannot_hold_is_refused(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    access, key = renewed(), ssh_access.LocalKey(tmp_path / folder / "key", KEY)
    with pytest.raises(NotConfigured, match="cannot hold"):
        options(access, key, "box", None)
    with pytest.raises(NotConfigured, match="cannot hold"):
        configuration([], ["--identity", str(key.private)])
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / folder))
    with pytest.raises(NotConfigured, match="cannot hold"):
        configuration([], [])
    with pytest.raises(NotConfigured, match="cannot hold"):
        include_in(tmp_path / "config", tmp_path / folder / "config")
    assert not (tmp_path / "config").exists()


def test_a_missing_key_is_named(tmp_path: Path) -> None:
    with pytest.raises(ClientFailure, match=r"there is no key .*/absent"):
        ssh_access.local_key(tmp_path / "absent")
