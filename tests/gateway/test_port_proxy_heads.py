"""What the port proxy believes of a client, and what cookies become."""

from ipaddress import ip_network

import pytest

from mooring.gateway.ports import cookies
from mooring.gateway.ports.heads import client_addresses
from mooring.settings import Settings

TRUSTED = [ip_network("10.0.0.0/8")]


@pytest.mark.parametrize(
    ("peer", "sent", "client", "passed"),
    [
        ("10.0.0.1", b"198.51.100.7", "198.51.100.7", "198.51.100.7, 10.0.0.1"),
        ("10.0.0.1", b"1.2.3.4, 198.51.100.7", "198.51.100.7", "198.51.100.7, 10.0.0.1"),
        ("10.0.0.1", b"198.51.100.7, 10.0.0.2", "198.51.100.7", "198.51.100.7, 10.0.0.2, 10.0.0.1"),
        ("10.0.0.1", b"nonsense\xff", "10.0.0.1", "10.0.0.1"),
        ("203.0.113.9", b"198.51.100.7", "203.0.113.9", "203.0.113.9"),
    ],
)
def test_only_trusted_proxies_name_the_client(peer: str, sent: bytes, client: str, passed: str) -> None:
    assert client_addresses(peer, [(b"x-forwarded-for", sent)], TRUSTED) == (client, passed)
    assert client_addresses(peer, [(b"x-forwarded-for", sent)], []) == (peer, peer)


def test_our_cookie_has_a_name_that_only_this_host_can_set() -> None:
    made = cookies.made("v", secure=True, path="/", max_age_s=5)
    assert made == b"__Host-mooring-port=v; Path=/; Max-Age=5; HttpOnly; SameSite=Lax; Secure"
    assert cookies.ours([b"a=1; __Host-mooring-port=v; mooring-port=w"]) == ["v", "w"]
    assert cookies.without_ours([b"a; b=; mooring-port=w", b"c=d=e"]) == b"a; b=; c=d=e"
    assert cookies.without_ours([b"mooring-port=w"]) is None


def test_a_program_cannot_set_our_cookie_without_a_name() -> None:
    assert cookies.of_program(b"=mooring-port=stolen", None) is None
    assert cookies.of_program(b"a=1; DOMAIN = x.test ; Secure", None) == b"a=1; Secure"


def test_plain_http_is_served_on_loopback_only() -> None:
    with pytest.raises(ValueError, match="keys and cookies would be sent in the clear"):
        Settings(proxy_host="0.0.0.0")
    assert Settings(proxy_host="0.0.0.0", behind_tls_proxy=True).port_urls is not None
    assert Settings(proxy_host="0.0.0.0", proxy_port=0).port_urls is None
    with pytest.raises(ValueError, match="MOORING_PROXY_URL"):
        Settings(proxy_url="https://apps.example.org/path")


def test_urls_are_https_except_on_this_machine() -> None:
    urls = [Settings(proxy_domain=domain).port_urls for domain in ("apps.example.org", "apps.localhost", "")]
    assert [each.base for each in urls if each] == [
        "https://apps.example.org", "http://apps.localhost:8721", "http://127.0.0.1:8721",
    ]  # fmt: skip
