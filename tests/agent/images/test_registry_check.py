"""R25: neither a registry's name nor its answer makes the Docker daemon connect to internal addresses."""

import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import ip_address
from pathlib import Path

import pytest

from mooring.agent.docker.runtime import DockerRuntime
from mooring.agent.images.registry_check import (
    HeadersTooLong,
    RegistryCheck,
    Resolve,
    UnknownNameError,
    challenges,
    resolve,
)
from mooring.agent.runtime import StartDelayed, StartRefused
from mooring.core.registry_hosts import Address
from mooring.schemas.agent import Assignment
from mooring_client.schemas.states import Reason
from tests.agent.docker_assignments import assignment, start, with_more
from tests.testbed.dockerd import DockerNode
from tests.testbed.parts import program

PUBLIC = "8.8.8.8"
CANARY = "canary-of-the-inside"
# Answers every request with the canary in a registry's error, and records each path.
SERVER = f"""
import http.server, json, sys
class Inside(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps({{"errors": [{{"code": "UNKNOWN", "message": "{CANARY}"}}]}}).encode()
        self.send_response(404 if self.path != "/v2/" else 200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    do_HEAD = do_GET
    def log_message(self, *_):
        print(self.path, file=open(sys.argv[1], "a"), flush=True)
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Inside)
print(server.server_address[1], flush=True)
server.serve_forever()
"""


@contextmanager
def service_on_loopback_of(node: DockerNode, requests: Path) -> Iterator[int]:
    """The port of a service that is reachable only on the node itself."""
    argv = node.inside(sys.executable, "-c", SERVER, str(requests))
    process = subprocess.Popen(argv, stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        yield int(process.stdout.readline())
    finally:
        process.kill()
        process.communicate()


def refusal_of(runtime: DockerRuntime, given: Assignment) -> Reason:
    with pytest.raises(StartRefused) as caught:
        start(runtime, given)
    return caught.value.reason


@pytest.mark.parametrize("local_images", [False, True])
@pytest.mark.parametrize("pinned", [{}, {"image_digest": f"sha256:{0:064}"}])
def test_the_daemon_does_not_connect_to_the_nodes_loopback(
    node: DockerNode, runtime: DockerRuntime, tmp_path: Path, local_images: bool, pinned: dict[str, str]
) -> None:
    requests = tmp_path / "requests"
    with service_on_loopback_of(node, requests) as port:
        given = assignment(image=f"127.0.0.1:{port}/containers/json:1")
        given = with_more(given, registry_listed=False, local_images=local_images, **pinned)
        assert refusal_of(runtime, given).code == "registry_not_allowed"
    assert not requests.exists()


def test_a_registrys_answer_is_not_quoted(node: DockerNode, runtime: DockerRuntime, tmp_path: Path) -> None:
    requests = tmp_path / "requests"
    with service_on_loopback_of(node, requests) as port:
        for local_images in (False, True):
            given = assignment(image=f"127.0.0.1:{port}/containers/json:1")
            with pytest.raises(StartDelayed) as caught:
                start(runtime, with_more(given, local_images=local_images))
            assert caught.value.reason.code == "registry_unavailable"
            assert CANARY not in caught.value.reason.message
    assert requests.exists()  # `assignment` has `registry_listed`, so the daemon has connected


def test_a_name_that_cannot_be_resolved_now_delays_the_start(
    runtime: DockerRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    def getaddrinfo(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    given = with_more(assignment(image="registry.example.com/some/image:1"), registry_listed=False)
    with pytest.raises(StartDelayed) as caught:
        start(runtime, given)
    assert caught.value.reason.code == "registry_unavailable"


# --- the check alone


def resolving(answers: dict[str, list[str]]) -> Resolve:
    def answer(host: str, _within_s: float) -> list[Address]:
        if host not in answers:
            raise UnknownNameError(host)
        return [ip_address(address) for address in answers[host]]

    return answer


def check_of(registry: str, answers: dict[str, list[str]], *headers: str, proxied: bool = False) -> str:
    """Return the code of the rejection; "" if the pull may begin."""
    check = RegistryCheck(resolving(answers), lambda *_: headers)
    try:
        check.require_public(registry, proxied=proxied)
    except StartRefused as refusal:
        return refusal.reason.code
    return ""


@pytest.mark.parametrize(
    ("addresses", "code"),
    [
        ([PUBLIC, "2001:4860:4860::8888"], ""),
        ([PUBLIC, "10.0.0.1"], "registry_not_allowed"),
        (["169.254.169.254"], "registry_not_allowed"),
        (["168.63.129.16"], "registry_not_allowed"),
        (["::ffff:127.0.0.1"], "registry_not_allowed"),
        (["fd00:ec2::254"], "registry_not_allowed"),
    ],
)
def test_all_addresses_of_a_name_must_be_public(addresses: list[str], code: str) -> None:
    assert check_of("registry.example.com", {"registry.example.com": addresses}) == code


def test_a_name_without_addresses_is_accepted_only_with_a_proxy() -> None:
    assert check_of("registry.example.com", {}) == "image_pull_failed"
    assert check_of("registry.example.com", {}, proxied=True) == ""


def test_a_failure_of_the_resolver_does_not_reject_the_registry() -> None:
    def resolver_is_down(_host: str, _within_s: float) -> list[Address]:
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    check = RegistryCheck(resolver_is_down, lambda *_: ())
    with pytest.raises(OSError, match="Temporary failure"):
        check.require_public("registry.example.com", proxied=False)
    check.require_public("registry.example.com", proxied=True)


def test_docker_hub_is_checked_by_its_real_host() -> None:
    assert check_of("docker.io", {"registry-1.docker.io": [PUBLIC]}) == ""
    assert check_of("docker.io", {"registry-1.docker.io": ["10.0.0.1"]}) == "registry_not_allowed"


@pytest.mark.parametrize(
    ("header", "code"),
    [
        ('Bearer realm="https://auth.example.com/token",service="r"', ""),
        ('Basic realm="Registry Realm"', ""),
        ('Bearer realm="http://169.254.169.254/latest/meta-data"', "registry_not_allowed"),
        ('bearer service="r", REALM="http://localhost:2375/"', "registry_not_allowed"),
        ("Bearer realm=http://2130706433/x", "registry_not_allowed"),
        ('Bearer realm="https://inside.example.com/token"', "registry_not_allowed"),
        (r'Bearer realm="http://auth.example.com\@10.0.0.1/"', "registry_not_allowed"),
        ('Bearer realm="http://auth.example.com@10.0.0.1/"', "registry_not_allowed"),
        ('Bearer realm="http://[::1]/"', "registry_not_allowed"),
        ('Bearer realm="gopher://auth.example.com/"', "registry_not_allowed"),
    ],
)
def test_the_token_server_is_checked_like_the_registry(header: str, code: str) -> None:
    known = {
        "registry.example.com": [PUBLIC],
        "auth.example.com": [PUBLIC],
        "inside.example.com": ["192.168.0.1"],
    }
    assert check_of("registry.example.com", known, header) == code
    assert check_of("registry.example.com", known, 'Basic realm="a label"', header) == code


# --- real sockets


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls")
    path = folder / "both.pem"
    subprocess.run(
        [program("openssl"), "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
         "-nodes", "-days", "1", "-subj", "/CN=registry.example.com",
         "-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")],
        check=True, capture_output=True,
    )  # fmt: skip
    path.write_text((folder / "key.pem").read_text() + (folder / "cert.pem").read_text())
    return path


@contextmanager
def answering(certificate: Path, chunks: list[bytes], *, then_silent: bool = False) -> Iterator[int]:
    """A TLS server on loopback that sends this to the first client."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    done = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection, context.wrap_socket(connection, server_side=True) as channel:
                channel.recv(4096)
                try:
                    for chunk in chunks:
                        channel.sendall(chunk)
                except OSError:
                    return  # the client has disconnected
                if then_silent:
                    done.wait(30)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            done.set()
            thread.join(30)


def challenges_at(port: int, within_s: float = 5.0) -> list[str]:
    return list(challenges("registry.example.com", port, [ip_address("127.0.0.1")], within_s))


def test_challenges_are_read_and_redirects_are_not_followed(certificate: Path) -> None:
    head = (
        b"HTTP/1.1 307 Temporary Redirect\r\nLocation: http://127.0.0.1:1/\r\n"
        b'WWW-Authenticate: Bearer realm="https://a.example.com/"\r\nwww-authenticate: Basic\r\n\r\n'
    )
    with answering(certificate, [head]) as port:
        assert challenges_at(port) == ['Bearer realm="https://a.example.com/"', "Basic"]


def test_a_silent_registry_times_out(certificate: Path) -> None:
    with answering(certificate, [], then_silent=True) as port, pytest.raises(OSError, match="time"):
        challenges_at(port, 0.5)


def test_endless_headers_are_rejected(certificate: Path) -> None:
    chunks = [b"HTTP/1.1 401 No\r\n", *[b"X: " + b"x" * 1021 + b"\r\n"] * 4096]
    with answering(certificate, chunks) as port, pytest.raises(HeadersTooLong):
        challenges_at(port)


def test_names_are_resolved_by_the_system() -> None:
    assert ip_address("127.0.0.1") in resolve("localhost", 5.0)
    with pytest.raises(UnknownNameError, match="no address"):
        resolve(f"{'a' * 64}.invalid", 5.0)  # too long for any name server


@pytest.mark.parametrize(
    ("error", "is_unknown"),
    [
        (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), True),
        (socket.gaierror(socket.EAI_NODATA, "No address associated with hostname"), True),
        (socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution"), False),
        (OSError("Too many open files"), False),
    ],
)
def test_a_failure_of_the_resolver_does_not_mean_that_the_name_is_unknown(
    monkeypatch: pytest.MonkeyPatch, error: OSError, is_unknown: bool
) -> None:
    def getaddrinfo(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    with pytest.raises(OSError) as caught:
        resolve("registry.example.com", 5.0)
    assert isinstance(caught.value, UnknownNameError) is is_unknown
