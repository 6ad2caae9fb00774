"""What people and tools do with `docker`, docker-py and compose beside running containers."""

import io
import json
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from docker.errors import APIError, NotFound

from tests.service import Client
from tests.testbed.images import BUSYBOX
from tests.testbed.parts import compose_plugin
from tests.testbed.waiting import wait_until
from tests.walk.docker_client import SMALL, WITHIN_S, DockerClient, unix_socket
from tests.walk.product import GatewayProcess

_LIMITS = {"mem_limit": "64m", "nano_cpus": 100_000_000}
_SMALL_SERVICE = {
    "image": BUSYBOX,
    "network_mode": "bridge",
    "mem_limit": "64m",
    "cpus": 0.1,
    "storage_opt": {"size": "64M"},
}
_DETACH = (b"\x10", b"\x11")  # ctrl-p ctrl-q


def test_a_terminal_has_the_size_of_the_clients(docker: DockerClient) -> None:
    docker.new("--name", "box")
    # At the very start there may be none, as with older engines. Then it follows that of the client.
    until = 'until [ "$(stty size 2>&1)" = "%s" ]; do sleep 0.05; done; echo is %s; '
    script = "".join(until % (size, size) for size in ("33 99", "50 132", "20 70"))
    for arguments in (
        ("exec", "-it", "box", "sh", "-c", script),
        ("run", "--rm", "-it", *SMALL, BUSYBOX, "sh", "-c", script),
    ):
        terminal = docker.terminal(*arguments, size=(33, 99))
        terminal.read_until(b"is 33 99")
        terminal.resize(50, 132)
        terminal.read_until(b"is 50 132")
        terminal.resize(20, 70)
        assert terminal.end() == 0, terminal.output


@pytest.fixture
def on_socket(docker: DockerClient, docker_gateway: GatewayProcess) -> Iterator[DockerClient]:
    """A client that reaches the gateway through a socket."""
    address = (docker_gateway.host, docker_gateway.docker_port)
    with TemporaryDirectory() as folder, unix_socket(address, Path(folder) / "docker.sock") as host:
        docker.environment["DOCKER_HOST"] = host
        yield docker


def test_a_client_attaches_and_detaches(on_socket: DockerClient) -> None:
    docker = on_socket
    name = docker.new("-it", command=("sh",))
    terminal = docker.terminal("attach", name)
    terminal.type(b"echo $((40+2))\r")
    terminal.read_until(b"42")
    terminal.press(*_DETACH)
    assert b"read escape sequence" in terminal.rest()
    assert docker.text("inspect", "-f", "{{.State.Running}}", name) == "true"
    # Another client gets the same shell.
    terminal = docker.terminal("attach", name)
    terminal.type(b"exit 6\r")
    assert terminal.end() == 6, terminal.output


def test_a_detached_run_goes_on(on_socket: DockerClient) -> None:
    docker = on_socket
    terminal = docker.terminal("run", "-it", "--name", "on", *SMALL, BUSYBOX, "sh")
    terminal.read_until(b"# ")
    terminal.press(*_DETACH)
    assert terminal.end() == 0, terminal.output
    assert docker.text("ps", "--format", "{{.Names}}") == "on"


def test_a_renamed_container_frees_its_name(docker: DockerClient, admin: Client) -> None:
    first = docker.new("--name", "one")
    docker.text("rename", "one", "two")
    assert docker.run("inspect", "one").returncode == 1
    assert docker.text("inspect", "-f", "{{.Name}}", first) == "/two"
    second = docker.new("--name", "one")
    done = docker.run("rename", "one", "two")
    assert b"already in use" in done.stderr, done
    assert b"same name" in docker.run("rename", "two", "two").stderr
    assert sorted(each["name"] for each in admin.items("/v1/instances")) == ["one", "two"]
    assert docker.text("ps", "-q", "--no-trunc").split() == [second, first]


def test_a_container_keeps_its_name_if_its_instance_cannot_be_renamed(
    docker: DockerClient, admin: Client
) -> None:
    admin.create(name="taken-x", image=BUSYBOX)
    made = docker.new("--name", "one")
    assert docker.run("rename", "one", "taken_x").returncode == 1
    assert docker.text("inspect", "-f", "{{.Name}}", made) == "/one"
    docker.text("rename", "one", "free")
    assert sorted(each["name"] for each in admin.items("/v1/instances")) == ["free", "taken-x"]


def test_an_instance_is_renamed(docker: DockerClient, admin: Client) -> None:
    made = admin.create(name="made", image=BUSYBOX, gpus={"count": 1})
    assert b"DNS label" in docker.run("rename", "made", "not_valid").stderr
    docker.text("rename", "made", "other")
    assert admin.instance(made["id"])["name"] == "other"


def test_a_container_that_is_renamed_before_its_start_has_that_host_name(docker: DockerClient) -> None:
    docker.text("create", "--name", "draft", *SMALL, BUSYBOX, "hostname")
    docker.text("rename", "draft", "final")
    assert docker.text("start", "-a", "final") == "final"


def test_a_restart_runs_the_program_again(docker: DockerClient) -> None:
    name = docker.new(command=("sh", "-c", "echo up; exec sleep 100000"))
    before = docker.text("inspect", "-f", "{{.State.StartedAt}}", name)
    docker.text("restart", "-t", "0", name)
    assert docker.text("inspect", "-f", "{{.State.Running}}", name) == "true"
    assert docker.text("inspect", "-f", "{{.State.StartedAt}}", name) > before
    docker.text("stop", "-t", "0", name)
    docker.text("restart", name)
    assert docker.text("inspect", "-f", "{{.State.Running}}", name) == "true"


def test_a_program_that_restarts_is_shown_as_such(docker: DockerClient) -> None:
    name = docker.new("--restart", "always", command=("sh", "-c", "echo tried; exit 3"))
    wait_until(lambda: docker.text("ps", "--format", "{{.Status}}") == "Restarting (3)", WITHIN_S)
    assert docker.text("inspect", "-f", "{{.State.Restarting}} {{.State.ExitCode}}", name) == "true 3"
    assert "tried" in docker.text("logs", name)
    assert b"container is restarting" in docker.run("rm", name).stderr
    docker.text("rm", "-f", name)


@pytest.mark.parametrize(
    ("command", "code", "reason"),
    [("/etc", 126, "permission denied"), ("nothing-here", 127, "executable file not found in $PATH")],
)
def test_a_run_that_fails_says_why_once(docker: DockerClient, command: str, code: int, reason: str) -> None:
    done = docker.run("run", "--rm", *SMALL, BUSYBOX, command)
    assert done.returncode == code, done
    lines = [line for line in done.stderr.decode().splitlines() if line and not line.startswith("Run '")]
    assert len(lines) == 1, lines
    assert reason in lines[0]


def test_wait_kill_and_port(docker: DockerClient) -> None:
    script = "trap 'exit 9' USR1; echo up; while :; do sleep 0.05; done"
    name = docker.new("-p", "8080:80", command=("sh", "-c", script))
    waiting = docker.start("wait", name)
    wait_until(lambda: docker.text("logs", name) == "up", WITHIN_S)
    assert b"no signal" in docker.run("kill", "-s", "NOSUCH", name).stderr
    # The port proxy serves it, so no address has it.
    assert b"No public port" in docker.run("port", name, "80").stderr
    docker.text("kill", "-s", "USR1", name)
    assert waiting.communicate(timeout=WITHIN_S)[0] == b"9\n"
    assert docker.text("inspect", "-f", "{{.State.Status}} {{.State.ExitCode}}", name) == "exited 9"
    assert b"is not running" in docker.run("kill", name).stderr


def test_lists_are_filtered(docker: DockerClient) -> None:
    up = docker.new("--name", "up", "--label", "tier=front")
    ended = docker.new("--name", "ended", command=("sh", "-c", "exit 5"))
    docker.text("wait", "ended")
    docker.text("create", "--name", "draft", *SMALL, BUSYBOX, "true")

    def found(*filters: str) -> list[str]:
        flags = [text for each in filters for text in ("--filter", each)]
        return docker.text("ps", "-a", "--format", "{{.Names}}", *flags).split()

    assert found() == ["draft", "ended", "up"]
    assert found("status=exited") == ["ended"]
    assert found("status=created", "status=running") == ["draft", "up"]
    assert found("exited=5") == ["ended"]
    assert found("label=tier=front") == found("name=^/up$") == found(f"id={up[:12]}") == ["up"]
    assert found(f"ancestor={BUSYBOX}", "name=e") == ["ended"]
    assert docker.text("ps", "-lq") == docker.text("ps", "-aq", "--filter", "name=draft")
    for unknown in ("status=gone", "health=healthy"):
        assert b"invalid filter" in docker.run("ps", "--filter", unknown).stderr
    assert ended.startswith(docker.text("ps", "-aq", "--filter", "status=exited"))
    docker.text("rm", "draft")


def test_logs_are_selected(docker: DockerClient) -> None:
    name = docker.new(command=("sh", "-c", "echo one; echo two; exec sleep 100000"))
    wait_until(lambda: docker.text("logs", name) == "one\ntwo", WITHIN_S)
    assert docker.text("logs", "--tail", "1", name) == "two"
    assert docker.text("logs", "--since", "2099-01-01T00:00:00Z", name) == ""
    assert docker.text("logs", "--since", "10m", "--until", "2099-01-01T00:00:00Z", name) == "one\ntwo"
    first, second = docker.text("logs", "-t", name).splitlines()
    assert docker.text("logs", "--since", second.split()[0], name) == "two"
    assert first.split()[0] < second.split()[0]


def test_past_events_are_listed(docker: DockerClient) -> None:
    name = docker.new("--name", "seen", "--label", "a=b")
    docker.text("stop", "-t", "0", name)
    wanted = ("--filter", "container=seen", "--format", "{{.Action}}")
    expected = ["create", "start", "kill", "die"]
    past = ("events", "--since", "10m", "--until", "0s", *wanted)
    # The client sends whole seconds.
    wait_until(lambda: docker.text(*past).split() == expected, WITHIN_S)
    assert docker.text("events", "--since", "20m", "--until", "10m", *wanted) == ""
    library = docker.library()
    all_past = library.events(since=0, until=int(time.time()), decode=True, filters={"container": "seen"})
    assert [each["Action"] for each in all_past] == expected
    following = library.events(since=0, decode=True, filters={"container": "seen"})
    assert [next(following)["Action"] for _ in range(4)] == expected
    following.close()
    library.close()


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (("system", "df"), "images and disks are on the nodes"),
        (("build", "-"), "images are not built here"),
        (("commit", "box"), "images are not built here"),
        (("push", "box"), "use a registry"),
        (("volume", "create", "box"), "named volumes are not available yet"),
        (("volume", "rm", "box"), "No such volume: box"),
        (("network", "create", "box"), "leave --network out"),
        (("network", "rm", "box"), "No such network: box"),
        (("network", "inspect", "box"), "network box not found"),
        (("run", "--network", "box", BUSYBOX), "leave --network out"),
        (("pause", "box"), "stop them"),
        (("swarm", "init"), "there is no swarm"),
    ],
)
def test_what_is_not_supported_is_refused(
    docker: DockerClient, command: tuple[str, ...], reason: str
) -> None:
    done = docker.run(*command, given=f"FROM {BUSYBOX}\n".encode())
    assert done.returncode != 0
    assert reason in done.stderr.decode(), done


def test_lists_of_what_a_node_has_are_short(docker: DockerClient) -> None:
    assert docker.text("images", "-q") == docker.text("volume", "ls", "-q") == ""
    assert docker.text("network", "ls", "--format", "{{.Name}}") == "bridge"
    assert docker.text("network", "ls", "-q", "--filter", "name=other") == ""


def test_docker_py_manages_containers(docker: DockerClient) -> None:
    library = docker.library()
    made = library.containers.run(BUSYBOX, ["sleep", "1000"], detach=True, name="lib", **_LIMITS)
    made.rename("renamed")
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        member = tarfile.TarInfo("file")
        member.size = 7
        tar.addfile(member, io.BytesIO(b"content"))
    assert made.put_archive("/tmp", archive.getvalue())
    parts, stat = made.get_archive("/tmp/file")
    with tarfile.open(fileobj=io.BytesIO(b"".join(parts))) as tar:
        found = tar.extractfile("file")
        assert found is not None
        assert found.read() == b"content"
    assert (stat["name"], stat["size"]) == ("file", 7)
    stdout, stderr = made.exec_run(["sh", "-c", "echo out; echo err >&2"], demux=True).output
    assert (stdout, stderr) == (b"out\n", b"err\n")
    made.restart(timeout=0)
    made.reload()
    assert (made.name, made.status, made.image.tags) == ("renamed", "running", [BUSYBOX])
    made.kill(signal="KILL")
    assert made.wait(timeout=WITHIN_S)["StatusCode"] == 137
    for kind in (library.networks, library.volumes):
        with pytest.raises(APIError, match="mooring: "):
            kind.create("n")
    with pytest.raises(NotFound):
        library.containers.get("lib")
    library.close()


@pytest.fixture
def compose(docker: DockerClient, tmp_path: Path) -> DockerClient:
    """A client with the plugin, whose compose file is in `COMPOSE_FILE`."""
    plugins = Path(docker.environment["DOCKER_CONFIG"]) / "cli-plugins"
    plugins.mkdir()
    (plugins / "docker-compose").symlink_to(compose_plugin())
    docker.environment["COMPOSE_FILE"] = str(tmp_path / "compose.yaml")
    return docker


def _write(compose: DockerClient, services: dict[str, object], **more: object) -> None:
    # JSON is YAML.
    content = {"name": "app", "services": services, **more}
    Path(compose.environment["COMPOSE_FILE"]).write_text(json.dumps(content))


def _services(greeting: str) -> dict[str, object]:
    gpus = {"driver": "nvidia", "count": 2, "capabilities": ["gpu"]}
    return {
        "web": {
            **_SMALL_SERVICE,
            "command": ["sh", "-c", "echo web $$GREETING; exec sleep 100000"],
            "environment": {"GREETING": greeting},
            "labels": {"tier": "front"},
            "ports": ["8080:80"],
            "restart": "unless-stopped",
        },
        "train": {
            **_SMALL_SERVICE,
            "command": ["sh", "-c", "echo training; exec sleep 100000"],
            "labels": {"mooring.priority": "40"},
            "deploy": {"resources": {"reservations": {"devices": [gpus]}}},
        },
    }


def test_compose_runs_a_project(compose: DockerClient, admin: Client) -> None:
    _write(compose, _services("hello"))
    compose.text("compose", "up", "-d")
    found = {each["name"]: each for each in admin.items("/v1/instances")}
    assert sorted(found) == ["app-train-1", "app-web-1"]
    train, web = found["app-train-1"], found["app-web-1"]
    assert (len(train["devices"]), train["priority"]) == (2, 40)
    assert (web["restart"], web["ports"][0]["expose"]) == ("always", "proxy")
    shown = compose.text("compose", "ps", "--format", "{{.Service}} {{.State}}")
    assert sorted(shown.splitlines()) == ["train running", "web running"]
    wait_until(lambda: "training" in compose.text("compose", "logs", "--no-log-prefix"), WITHIN_S)
    assert "web hello" in compose.text("compose", "logs", "--no-log-prefix")
    assert compose.run("compose", "exec", "-T", "web", "sh", "-c", "exit 4").returncode == 4
    assert BUSYBOX.partition(":")[0] in compose.text("compose", "images")
    # A changed service is created again; the other goes on.
    _write(compose, _services("again"))
    compose.text("compose", "up", "-d")
    assert compose.text("compose", "exec", "-T", "web", "sh", "-c", "echo $GREETING $(hostname)") == (
        "again app-web-1"
    )
    assert admin.items("/v1/instances", name="app-train-1")[0]["id"] == train["id"]
    compose.text("compose", "stop", "-t", "0")
    assert compose.text("compose", "ps", "-q") == ""
    compose.text("compose", "down", "-v", "-t", "0")
    assert admin.items("/v1/instances") == []


@pytest.mark.parametrize(
    ("service", "more", "reason"),
    [
        ({"network_mode": None}, {}, "write `network_mode: bridge` for each service"),
        ({"volumes": ["data:/data"]}, {"volumes": {"data": {}}}, "named volumes are not available yet"),
        ({"build": {"dockerfile_inline": f"FROM {BUSYBOX}"}, "image": None}, {}, "images are not built here"),
        ({"gpus": "all"}, {}, "`count: 2`"),
        ({"configs": ["a"]}, {"configs": {"a": {"content": "b"}}}, "files are copied while it runs"),
    ],
)  # fmt: skip
def test_compose_says_what_is_not_supported(
    compose: DockerClient, service: dict[str, object], more: dict[str, object], reason: str
) -> None:
    gpus = {"capabilities": ["gpu"], "count": "all"}
    if service.pop("gpus", None):
        service = {"deploy": {"resources": {"reservations": {"devices": [gpus]}}}}
    made = {**_SMALL_SERVICE, "command": ["true"], **service}
    _write(compose, {"web": {key: value for key, value in made.items() if value is not None}}, **more)
    done = compose.run("compose", "up", "-d")
    assert done.returncode != 0
    assert reason in done.stderr.decode(), done
    # What cannot be made is not there to be removed either.
    compose.text("compose", "down", "-v", "-t", "0")
    assert compose.text("ps", "-aq") == ""
