"""The port proxy: who may use which port."""

import re
import subprocess
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from mooring.control.instances.port_tokens import PortToken, PortTokens, TokenKind
from tests.gateway.port_proxy import DOMAIN, WITHIN_S, Program, Proxy, get, running_proxy
from tests.gateway.test_port_proxy import OK, echo_request
from tests.service import Client
from tests.testbed.waiting import wait_until
from tests.testbed.workspace import Workspace
from tests.walk.product import MOORING


@pytest.fixture(scope="module")
def shared(workspace: Workspace, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    with running_proxy(workspace, tmp_path_factory.mktemp("proxy"), DOMAIN) as made:
        yield made


def with_port(proxy: Proxy, name: str, auth: str, **fields: Any) -> tuple[Program, dict[str, Any]]:
    program = proxy.program(echo_request)
    port = {"container": program.port, "expose": "proxy", "auth": auth}
    return program, proxy.instance(name, ports=[port], **fields)


def link(client: Client, instance: dict[str, Any], port: int, ttl_s: int = 60) -> str:
    made = client.post(f"/v1/instances/{instance['id']}/ports/{port}/links", json={"ttl_s": ttl_s})
    assert made.status_code == 201, made.text
    url: str = made.json()["url"]
    return url


def path_of(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.path}?{parts.query}"


def key_of(admin: Client, **fields: Any) -> dict[str, Any]:
    made = admin.post("/v1/api-keys", json={"name": "k", "role": "member", **fields})
    assert made.status_code == 201, made.text
    key: dict[str, Any] = made.json()
    return key


def signed_in(
    proxy: Proxy, instance: dict[str, Any], port: int, client: Client | None = None
) -> httpx.Client:
    """A browser that has opened a link."""
    host = proxy.host(port, instance["name"])
    with proxy.client(host, None) as browser:
        answer = browser.get(path_of(link(client or proxy.admin, instance, port)))
    assert answer.status_code == 303, answer.text
    return proxy.client(host, None, Cookie=answer.headers["set-cookie"].partition(";")[0])


def test_endpoints_show_the_url(proxy: Proxy) -> None:
    program, made = with_port(proxy, "shown", "private")
    (endpoint,) = made["endpoints"]
    host, port = proxy.host(program.port, "shown"), proxy.gateway.proxy_port
    assert endpoint == {
        "container": program.port, "protocol": "tcp", "host": host, "port": port,
        "url": f"http://{host}:{port}/",
    }  # fmt: skip
    listed = next(each for each in proxy.admin.items("/v1/instances") if each["id"] == made["id"])
    assert listed["endpoints"] == made["endpoints"]


def test_a_port_on_the_node_has_a_url_too(proxy: Proxy) -> None:
    made = proxy.instance("both", ports=[{"container": 80}, {"container": 53, "protocol": "udp"}])
    tcp, udp = sorted(made["endpoints"], key=lambda each: str(each["protocol"]))
    assert tcp["host"] == "127.0.0.1"
    assert tcp["url"].startswith("http://80-both-default.apps.test:")
    assert udp["url"] is None


def test_a_long_name_is_replaced_by_the_id(proxy: Proxy) -> None:
    program, made = with_port(proxy, "a" * 60, "private")
    url = made["endpoints"][0]["url"]
    label = f"{program.port}-{made['id'].replace('_', '-')}"
    assert urlsplit(url).netloc.partition(".")[0] == label
    with proxy.client(f"{label}.{DOMAIN}") as client:
        assert client.get("/").status_code == 200


def test_a_renamed_project_changes_the_urls(proxy: Proxy) -> None:
    project = proxy.admin.post("/v1/projects", json={"name": "before"}).json()
    _program, made = with_port(proxy, "box", "private", project_id=project["id"])
    assert "-box-before." in made["endpoints"][0]["url"]
    proxy.admin.patch(f"/v1/projects/{project['id']}", json={"name": "after"})
    shown = next(each for each in proxy.admin.items("/v1/instances", project_id=project["id"]))
    assert "-box-after." in shown["endpoints"][0]["url"]
    assert proxy.admin.instance(made["id"])["endpoints"] == shown["endpoints"]


def test_a_port_without_a_key_or_link_is_refused(proxy: Proxy) -> None:
    for auth in ("private", "token"):
        program, _made = with_port(proxy, f"closed-{auth}", auth)
        with proxy.client(proxy.host(program.port, f"closed-{auth}"), None) as client:
            answer = client.get("/")
            assert answer.status_code == 401
            assert "needs a key or a link" in answer.text
            assert answer.headers["www-authenticate"].startswith("Bearer")
        assert not program.connections


def test_a_refusal_does_not_show_whether_the_instance_exists(proxy: Proxy) -> None:
    program, _made = with_port(proxy, "exists", "private")
    with (
        proxy.client(proxy.host(program.port, "exists"), None) as one,
        proxy.client(proxy.host(program.port, "nothing"), None) as other,
    ):
        assert one.get("/").text == other.get("/").text


def test_a_wrong_key_is_refused_and_not_passed_on(proxy: Proxy) -> None:
    program = proxy.program(echo_request)
    proxy.instance("wrong")
    with proxy.client(proxy.host(program.port, "wrong"), "mk_wrong") as client:
        assert client.get("/").status_code == 401
    assert not program.connections


def test_a_key_of_another_project_sees_no_port(proxy: Proxy) -> None:
    program, _made = with_port(proxy, "theirs", "private")
    project = proxy.admin.post("/v1/projects", json={"name": "other"}).json()
    key = key_of(proxy.admin, project_id=project["id"])
    with proxy.client(proxy.host(program.port, "theirs"), key["key"]) as client:
        assert client.get("/").status_code == 404
    viewer = key_of(proxy.admin, role="viewer")
    with proxy.client(proxy.host(program.port, "theirs"), viewer["key"]) as client:
        assert client.get("/").status_code == 403
    assert not program.connections


def test_a_link_works_once_and_signs_the_browser_in(proxy: Proxy) -> None:
    program, made = with_port(proxy, "linked", "private")
    host = proxy.host(program.port, "linked")
    url = link(proxy.admin, made, program.port)
    with proxy.client(host, None) as client:
        assert client.head(path_of(url)).status_code == 401  # such as a preview of the link
        first = client.get(path_of(url) + "&x=1")
        assert (first.status_code, first.headers["location"]) == (303, "/?x=1")
        assert first.headers["referrer-policy"] == "no-referrer"
        cookie = first.headers["set-cookie"]
        assert re.fullmatch(r"mooring-port=[\w.-]+; Path=/; Max-Age=\d+; HttpOnly; SameSite=Lax", cookie), (
            cookie
        )
        client.cookies.clear()
        assert "was used" in client.get(path_of(url)).text
        head = client.get("/", headers={"Cookie": cookie.partition(";")[0]}).json()
    assert not [line for line in head if "mooring" in line]


def test_a_cookie_is_of_one_port_of_one_instance(proxy: Proxy) -> None:
    program, made = with_port(proxy, "first", "private")
    other = proxy.program(echo_request)
    proxy.instance("second")
    with signed_in(proxy, made, program.port) as browser:
        assert browser.get("/").status_code == 200
        for host in (proxy.host(program.port, "second"), proxy.host(other.port, "first")):
            assert browser.get("/", headers={"Host": host}).status_code == 401


def test_a_link_of_a_token_port_works_until_it_expires(proxy: Proxy) -> None:
    program, made = with_port(proxy, "shared", "token")
    url = link(proxy.admin, made, program.port)
    with proxy.client(proxy.host(program.port, "shared"), None) as client:
        for _ in range(2):
            client.cookies.clear()
            answer = client.get(path_of(url))
            assert answer.json()[0] == "GET / HTTP/1.1"
        cookie = answer.headers["set-cookie"].partition(";")[0]
        assert client.get("/a", headers={"Cookie": cookie}).status_code == 200
        navigated = client.get(path_of(url), headers={"Sec-Fetch-Mode": "navigate"})
        assert navigated.status_code == 303


def test_links_that_are_changed_expired_or_cookies_do_not_work(proxy: Proxy) -> None:
    program, made = with_port(proxy, "signed", "token")
    token = link(proxy.admin, made, program.port).partition("=")[2]
    with proxy.client(proxy.host(program.port, "signed"), None) as client:
        payload, _, signature = token.partition(".")
        swapped = signature[:-2] + ("A" if signature[-2] != "A" else "B") + signature[-1]
        for bad in (f"{payload}.{swapped}", f"{payload}x.{signature}", payload, "", "a.b", "ä.ö", "x" * 5000):
            assert client.get("/", params={"mooring_token": bad}).status_code == 401, bad
        assert client.get("/", headers={"Cookie": f"mooring-port={token}"}).status_code == 401


def test_an_expired_or_foreign_token_is_not_verified() -> None:
    old, new = b"a" * 32, b"b" * 32
    signer, other, rotated = PortTokens([old]), PortTokens([new]), PortTokens([old, new])
    token = PortToken("ins_x", 80, "key_x/prj_x", "token", 1000)
    text = signer.sign(TokenKind.LINK, token)
    assert signer.verify(TokenKind.LINK, text, 999.9) == token
    assert signer.verify(TokenKind.LINK, text, 1000.0) is None
    assert signer.verify(TokenKind.COOKIE, text, 0.0) is None
    assert other.verify(TokenKind.LINK, text, 0.0) is None
    assert rotated.verify(TokenKind.LINK, text, 0.0) == token
    assert other.verify(TokenKind.LINK, rotated.sign(TokenKind.LINK, token), 0.0) == token


def test_links_and_sessions_stay_valid_until_the_old_key_is_retired(proxy: Proxy) -> None:
    program, made = with_port(proxy, "rotated", "token")
    own, private = with_port(proxy, "rotated-private", "private")
    old = link(proxy.admin, made, program.port)
    host = proxy.host(program.port, "rotated")
    with signed_in(proxy, private, own.port) as browser, proxy.client(host, None) as client:

        def status_of(url: str) -> int:
            client.cookies.clear()
            return client.get(path_of(url)).status_code

        change_link_key(proxy, "rotate")
        new = link(proxy.admin, made, program.port)
        wait_until(lambda: status_of(new) == 200, WITHIN_S)
        assert (status_of(old), browser.get("/").status_code) == (200, 200)
        change_link_key(proxy, "retire")
        wait_until(lambda: status_of(old) == 401, WITHIN_S)
        assert (status_of(new), browser.get("/").status_code) == (200, 401)


def change_link_key(proxy: Proxy, command: str) -> None:
    argv = [*MOORING, "gateway-keys", command, "--link"]
    done = subprocess.run(argv, env=proxy.server.environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_session_ends_with_the_key_that_made_the_link(proxy: Proxy) -> None:
    """Also while an answer is being sent."""
    program = proxy.program(endless)
    made = proxy.instance("revoked")
    key = key_of(proxy.admin)
    with Client(proxy.server.url, key=key["key"]) as member:
        browser = signed_in(proxy, made, program.port, member)
    with browser:
        with browser.stream("GET", "/") as answer:
            assert answer.status_code == 200
            proxy.admin.delete(f"/v1/api-keys/{key['id']}")
            began = time.monotonic()
            with pytest.raises(httpx.TransportError):
                for _piece in answer.iter_raw():
                    assert time.monotonic() - began < 8
        assert browser.get("/").status_code == 401


def endless(connection: Any) -> None:
    """Sends a little, again and again."""
    connection.recv(65536)
    connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
    connection.settimeout(0.05)
    while True:
        connection.sendall(b"x")
        try:
            if not connection.recv(1):
                return
        except TimeoutError:
            continue


def test_a_revoked_key_ends_a_client_that_reads_nothing(proxy: Proxy) -> None:
    def flood(connection: Any) -> None:
        connection.recv(65536)
        connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            connection.sendall(bytes(1024 * 1024))

    program = proxy.program(flood)
    proxy.instance("flooded")
    key = key_of(proxy.admin)
    with proxy.raw(get(proxy.host(program.port, "flooded"), "/", key=key["key"])) as connection:
        assert connection.recv(4).startswith(b"HTTP")
        proxy.admin.delete(f"/v1/api-keys/{key['id']}")
        wait_until(lambda: program.connections[0].fileno() == -1, 15)


def test_pages_of_other_origins_cannot_use_the_session(proxy: Proxy) -> None:
    """A page of another instance is of the same site, so that browsers send our cookie with its requests."""
    program, made = with_port(proxy, "victim", "private")
    host = proxy.host(program.port, "victim")
    foreign = {"Origin": f"http://80-evil-default.{DOMAIN}"}
    with signed_in(proxy, made, program.port) as browser:
        link_followed = {"Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
        cases: list[tuple[int, str, dict[str, str]]] = [
            (200, "GET", {}),
            (200, "POST", {"Origin": f"http://{host}", "Sec-Fetch-Site": "same-origin"}),
            (200, "GET", {"Sec-Fetch-Site": "none", **link_followed}),
            (200, "GET", {"Sec-Fetch-Site": "cross-site", **link_followed}),
            (403, "POST", foreign),
            (403, "GET", foreign),
            (403, "POST", {"Origin": "null"}),
            (403, "GET", {"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "no-cors"}),
            (403, "POST", {"Sec-Fetch-Site": "same-site", **link_followed}),
            (403, "GET", {**foreign, "Connection": "Upgrade", "Upgrade": "websocket"}),
        ]
        for expected, method, headers in cases:
            assert browser.request(method, "/", headers=headers).status_code == expected, (method, headers)


def test_a_public_port_needs_an_admin(proxy: Proxy) -> None:
    project = proxy.admin.post("/v1/projects", json={"name": "open"}).json()
    owner = key_of(proxy.admin, project_id=project["id"], role="owner")
    program = proxy.program(echo_request)
    port = {"container": program.port, "expose": "proxy", "auth": "public"}
    body = {"image": "a", "name": "web", "gpus": {"count": 0}, "cpus": 1, "memory_mib": 64, "ports": [port]}
    with Client(proxy.server.url, key=owner["key"]) as client:
        refused = client.post("/v1/instances", json=body)
        assert (refused.status_code, refused.json()["code"]) == (403, "public_ports_not_allowed")
        change = {"public_ports": True}
        assert client.patch(f"/v1/projects/{project['id']}", json=change).status_code == 403
        proxy.admin.patch(f"/v1/projects/{project['id']}", json=change)
        made = client.post("/v1/instances", json=body).json()
        client.wait(made["id"], "running")
    host = proxy.host(program.port, "web", "open")
    with proxy.client(host, None, Authorization="Bearer of-the-program", Origin="http://x") as anybody:
        assert "authorization: Bearer of-the-program" in anybody.get("/").json()
        proxy.admin.patch(f"/v1/projects/{project['id']}", json={"public_ports": False})
        wait_until(lambda: anybody.get("/").status_code == 401, 5)
    links = f"/v1/instances/{made['id']}/ports/{program.port}/links"
    assert proxy.admin.post(links, json={}).json()["code"] == "not_proxied"


def test_a_name_that_may_mean_several_instances_is_refused(proxy: Proxy) -> None:
    program = proxy.program(echo_request)
    made = []
    for name, project in (("x", "y-z"), ("x-y", "z")):
        project_id = proxy.admin.post("/v1/projects", json={"name": project}).json()["id"]
        made.append(proxy.instance(name, project_id=project_id))
    with proxy.client(f"{program.port}-x-y-z.{DOMAIN}") as client:
        refused = client.get("/")
        assert refused.status_code == 409
        assert "-ins-" in refused.text
    key = key_of(proxy.admin, project_id=made[0]["project_id"])
    with proxy.client(f"{program.port}-x-y-z.{DOMAIN}", key["key"]) as client:
        assert client.get("/").status_code == 200  # the key sees one of them
    for each in made:
        with proxy.client(f"{program.port}-{each['id'].replace('_', '-')}.{DOMAIN}") as client:
            assert client.get("/").status_code == 200


def test_hosts_that_name_no_port_are_refused(proxy: Proxy) -> None:
    for host in (
        "apps.test", "box-default.apps.test", "0-box-default.apps.test", "65536-box-default.apps.test",
        "80-box.apps.test", "80-box-default.other.test", "80-box-default.x.apps.test", "127.0.0.1",
        "80-box-default.apps.test.evil",
    ):  # fmt: skip
        with proxy.client(host) as client:
            answer = client.get("/p/ins_01k0000000000000000000000a/80/")
            assert (answer.status_code, answer.headers["content-type"]) == (404, "text/plain; charset=utf-8")


def test_a_stopped_instance_is_refused_at_once(proxy: Proxy) -> None:
    program = proxy.answering(OK)
    made = proxy.instance("stopped")
    with proxy.client(proxy.host(program.port, "stopped")) as client:
        assert client.get("/").status_code == 200
        proxy.admin.post(f"/v1/instances/{made['id']}/stop", json={"timeout_s": 0})
        proxy.admin.wait(made["id"], "stopped")
        program.close()
        wait_until(lambda: client.get("/").status_code == 503)
        assert "not running" in client.get("/").text
        proxy.admin.delete(f"/v1/instances/{made['id']}")
        wait_until(lambda: client.get("/").status_code == 404)


def test_a_port_that_nobody_serves_is_a_bad_gateway(proxy: Proxy) -> None:
    proxy.instance("silent")
    program = proxy.answering(OK)
    program.close()
    with proxy.client(proxy.host(program.port, "silent")) as client:
        answer = client.get("/<script>")
        assert answer.status_code == 502
        assert answer.text.startswith("port_not_listening: ")
        assert "<script>" not in answer.text
