"""The port proxy without a domain: ports are paths of one origin."""

import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from tests.gateway.port_proxy import Proxy, running_proxy
from tests.gateway.test_port_proxy import echo_request
from tests.gateway.test_port_proxy_access import link, path_of
from tests.testbed.waiting import wait_until
from tests.testbed.workspace import Workspace

SETTINGS = {"MOORING_UNREACHABLE_AFTER_S": "3"}


@pytest.fixture(scope="module")
def shared(workspace: Workspace, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    with running_proxy(workspace, tmp_path_factory.mktemp("proxy"), "", SETTINGS) as made:
        yield made


def host_of(proxy: Proxy) -> str:
    return f"127.0.0.1:{proxy.gateway.proxy_port}"


def test_a_path_names_the_port(proxy: Proxy) -> None:
    program = proxy.program(echo_request)
    made = proxy.instance("one", ports=[{"container": program.port, "expose": "proxy"}])
    prefix = f"/p/{made['id']}/{program.port}"
    (endpoint,) = made["endpoints"]
    assert endpoint["url"] == f"http://{host_of(proxy)}{prefix}/"
    with proxy.client(host_of(proxy)) as client:
        head = client.get(f"{prefix}/a?b=1").json()
        assert head[0] == "GET /a?b=1 HTTP/1.1"
        assert f"x-forwarded-prefix: {prefix}" in head
        redirect = client.get(f"{prefix}?x=1")
        assert (redirect.status_code, redirect.headers["location"]) == (308, f"{prefix}/?x=1")
        for path in ("/", "/p/", f"/p/{made['id']}/", f"/p/{made['id']}/0/", "/p/../x/80/", "/v1/instances"):
            assert client.get(path).status_code == 404, path


def test_a_link_sets_a_cookie_for_its_path(proxy: Proxy) -> None:
    program = proxy.program(echo_request)
    made = proxy.instance("linked")
    url = link(proxy.admin, made, program.port)
    prefix = f"/p/{made['id']}/{program.port}/"
    assert urlsplit(url).path == prefix
    with proxy.client(host_of(proxy), None) as client:
        first = client.get(path_of(url))
        assert (first.status_code, first.headers["location"]) == (303, prefix)
        assert f"; Path={prefix};" in first.headers["set-cookie"]
        assert client.get(prefix).status_code == 200  # with the cookie


def test_a_program_affects_its_own_path_only(proxy: Proxy) -> None:
    program = proxy.answering(
        b"HTTP/1.1 302 Found\r\nContent-Length: 0\r\nLocation: /login\r\nSet-Cookie: a=1; Path=/; Secure\r\n"
        b'Set-Cookie: __Host-b=1; Path=/; Secure\r\nService-Worker-Allowed: /\r\nClear-Site-Data: "*"\r\n'
        b"Strict-Transport-Security: max-age=1000\r\n\r\n"
    )
    made = proxy.instance("own")
    prefix = f"/p/{made['id']}/{program.port}"
    with proxy.client(host_of(proxy)) as client:
        answer = client.get(f"{prefix}/")
    assert answer.headers["location"] == f"{prefix}/login"
    assert answer.headers.get_list("set-cookie") == [f"a=1; Secure; Path={prefix}/"]
    kept = set(answer.headers)
    assert not {"service-worker-allowed", "clear-site-data", "strict-transport-security"} & kept


def test_public_ports_need_a_domain(proxy: Proxy) -> None:
    project = next(iter(proxy.admin.items("/v1/projects")))["id"]
    proxy.admin.patch(f"/v1/projects/{project}", json={"public_ports": True})
    program = proxy.program(echo_request)
    port = {"container": program.port, "expose": "proxy", "auth": "public"}
    made = proxy.instance("public", ports=[port])
    with proxy.client(host_of(proxy), None) as client:
        assert client.get(f"/p/{made['id']}/{program.port}/").status_code == 401
    assert not program.connections


def test_an_instance_on_a_silent_node_is_refused_at_once(proxy: Proxy) -> None:
    """The last test: it ends the node's agent."""
    program = proxy.program(echo_request)
    made = proxy.instance("silent")
    proxy.node.agent.stop()
    wait_until(lambda: proxy.admin.instance(made["id"])["state"] == "unreachable", 30)
    with proxy.client(host_of(proxy)) as client:
        began = time.monotonic()
        answer = client.get(f"/p/{made['id']}/{program.port}/")
        assert answer.status_code == 503
        assert "node is unreachable" in answer.text
        assert time.monotonic() - began < 2
