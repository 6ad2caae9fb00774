"""`docker` and docker-py against a gateway, with real containers."""

import json
import re
import signal
from pathlib import Path

import pytest

from tests.service import Client
from tests.testbed.images import BUSYBOX
from tests.testbed.waiting import wait_until
from tests.walk.docker_client import SMALL, WITHIN_S, DockerClient
from tests.walk.product import GatewayProcess

MIB = 1024 * 1024


def test_info_and_version_identify_mooring(docker: DockerClient) -> None:
    assert "Mooring" in docker.text("info", "--format", "{{.OperatingSystem}}")
    assert "Mooring" in docker.text("version")


def test_a_run_has_output_errors_and_the_exit_code(docker: DockerClient, admin: Client) -> None:
    done = docker.run("run", "--rm", *SMALL, BUSYBOX, "sh", "-c", "printf out; printf err >&2; exit 7")
    assert (done.stdout, done.stderr, done.returncode) == (b"out", b"err", 7)
    wait_until(lambda: not admin.items("/v1/instances"), WITHIN_S)


def test_input_reaches_the_program_and_ends(docker: DockerClient) -> None:
    content = bytes(range(256)) * (4 * MIB // 256)
    done = docker.run("run", "--rm", "-i", *SMALL, BUSYBOX, "cat", given=content)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout == content


def test_gpus_are_scheduled(docker: DockerClient, admin: Client) -> None:
    name = docker.new("--gpus", "2", "--name", "two", "--label", "mooring.priority=40")
    found = admin.items("/v1/instances", name="two")[0]
    assert (len(found["devices"]), found["priority"]) == (2, 40)
    inspected = json.loads(docker.text("inspect", name))[0]
    assert inspected["Config"]["Labels"]["mooring.instance"] == found["id"]
    assert inspected["State"]["Running"]


def test_a_terminal_runs_a_shell(docker: DockerClient) -> None:
    code, output = docker.typed("run", "--rm", "-it", *SMALL, BUSYBOX, "sh", keys=b"tty; exit 5\r")
    assert code == 5, output
    assert b"/dev/pts/0" in output


def test_a_run_that_waits_says_why_and_can_be_given_up(docker: DockerClient, admin: Client) -> None:
    running = docker.start("run", "--rm", "--gpus", "64", *SMALL, BUSYBOX, "true")
    assert running.stderr is not None
    assert b"mooring: waiting: " in running.stderr.readline()
    assert "waiting" in docker.text("ps", "-a", "--format", "{{.Status}}")
    running.send_signal(signal.SIGINT)
    running.communicate(timeout=WITHIN_S)
    assert running.returncode != 0
    wait_until(lambda: not admin.items("/v1/instances"), WITHIN_S)


def test_logs_exec_stop_and_rm(docker: DockerClient) -> None:
    name = docker.new("--name", "box", command=("sh", "-c", "echo hello; echo bad >&2; exec sleep 100000"))
    assert re.fullmatch(r"[0-9a-f]{64}", name)
    assert docker.text("ps", "-q", "--no-trunc") == name
    done = docker.run("logs", "box")
    assert (done.stdout, done.stderr) == (b"hello\n", b"bad\n")
    done = docker.run(
        "exec", "-i", "-e", "A=b", "-w", "/tmp", "box", "sh", "-c", "cat; pwd; echo $A; exit 9", given=b"in\n"
    )
    assert (done.stdout, done.returncode) == (b"in\n/tmp\nb\n", 9)
    assert b"/dev/pts/" in docker.typed("exec", "-it", "box", "sh", keys=b"tty; exit\r")[1]
    for reference in (
        "box",
        name[:12],
        docker.text("inspect", "-f", '{{index .Config.Labels "mooring.instance"}}', "box"),
    ):
        assert docker.text("inspect", "-f", "{{.Id}}", reference) == name
    docker.text("stop", "-t", "0", "box")
    assert docker.text("ps", "-aq", "--no-trunc") == name
    assert docker.text("wait", "box") == docker.text("inspect", "-f", "{{.State.ExitCode}}", "box")
    docker.text("rm", "box")
    assert docker.text("ps", "-aq") == ""


def test_logs_follow_until_the_end(docker: DockerClient) -> None:
    name = docker.new(command=("sh", "-c", "for i in 1 2 3; do echo $i; sleep 0.3; done"))
    assert docker.text("logs", "-f", name).split() == ["1", "2", "3"]


def test_a_signal_reaches_the_program(docker: DockerClient) -> None:
    script = "trap 'echo hit; exit 4' INT; echo up; while :; do sleep 0.05; done"
    running = docker.start("run", "--rm", *SMALL, BUSYBOX, "sh", "-c", script)
    assert running.stdout is not None
    assert running.stdout.readline() == b"up\n"
    running.send_signal(signal.SIGINT)
    output, errors = running.communicate(timeout=WITHIN_S)
    assert (output, running.returncode) == (b"hit\n", 4), errors
    name = docker.new(command=("sh", "-c", script))
    docker.text("kill", "-s", "INT", name)
    assert docker.text("wait", name) == "4"


def test_a_client_that_is_killed_does_not_end_the_program(docker: DockerClient, admin: Client) -> None:
    running = docker.start("run", "--name", "on", *SMALL, BUSYBOX, "sh", "-c", "echo up; sleep 100000")
    assert running.stdout is not None
    assert running.stdout.readline() == b"up\n"
    running.kill()
    running.communicate()
    found = admin.items("/v1/instances", name="on")[0]["id"]
    wait_until(lambda: admin.items("/v1/audit-log", action="instance.attach", target_id=found), WITHIN_S)
    assert docker.text("inspect", "-f", "{{.State.Running}}", "on") == "true"


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--privileged",), "Privileged is not supported"),
        (("-v", "/etc:/etc"), "-v /etc:/etc is not supported"),
        (("-v", "data:/data"), "named volumes are not available yet"),
        (("--mount", "type=volume,src=a,dst=/a"), "named volumes are not available yet"),
        (("--network", "host"), "--network host is not supported"),
        (("--cap-add", "SYS_ADMIN"), "CapAdd is not supported"),
        (("--device", "/dev/fuse"), "Devices is not supported"),
        (("--pid", "host"), "PidMode is not supported"),
        (("--gpus", "all"), "--gpus all is not supported"),
        (("--gpus", "device=0"), "the scheduler chooses"),
        (("--label", "mooring.nothing=1"), "labels that begin with mooring."),
        (("-e", "NVIDIA_VISIBLE_DEVICES=all"), "NVIDIA_VISIBLE_DEVICES"),
    ],
)
def test_unsupported_options_are_refused(docker: DockerClient, flags: tuple[str, ...], reason: str) -> None:
    done = docker.run("run", "--rm", *flags, BUSYBOX, "true")
    assert done.returncode == 125
    assert reason in done.stderr.decode(), done


def test_a_missing_command_has_the_exit_code_of_docker(docker: DockerClient, admin: Client) -> None:
    done = docker.run("run", "--rm", *SMALL, BUSYBOX, "nothing-here")
    assert done.returncode == 127, done
    wait_until(lambda: not admin.items("/v1/instances"), WITHIN_S)


def test_a_wrong_key_is_rejected(docker: DockerClient, tmp_path: Path) -> None:
    other = DockerClient(docker.host, "mk_wrong", tmp_path / "other")
    done = other.run("ps")
    assert done.returncode == 1
    assert b"credential" in done.stderr or b"key" in done.stderr, done


def test_files_are_copied(docker: DockerClient, tmp_path: Path) -> None:
    name = docker.new()
    (tmp_path / "given").mkdir()
    (tmp_path / "given" / "file").write_bytes(b"\0content" * 1000)
    docker.text("cp", str(tmp_path / "given"), f"{name}:/tmp/")
    docker.text("cp", f"{name}:/tmp/given/file", str(tmp_path / "back"))
    assert (tmp_path / "back").read_bytes() == b"\0content" * 1000
    assert docker.run("cp", f"{name}:/nothing", str(tmp_path)).returncode == 1


def test_top_and_stats(docker: DockerClient) -> None:
    name = docker.new()
    assert "sleep 100000" in docker.text("top", name)
    shown = docker.text("stats", "--no-stream", "--format", "{{.MemUsage}} {{.PIDs}}", name)
    assert re.match(r"[1-9][\d.]*[KM]iB / 64MiB \d", shown), shown


def test_events_are_shown(docker: DockerClient) -> None:
    library = docker.library()
    watching = library.events(decode=True, filters={"container": "seen"})
    docker.text("run", *SMALL, "--name", "seen", BUSYBOX, "true")
    seen = [next(watching) for _ in range(3)]
    watching.close()
    library.close()
    assert [each["Action"] for each in seen] == ["create", "start", "die"]
    assert seen[0]["Actor"]["Attributes"]["name"] == "seen"


def test_a_key_of_another_project_sees_no_container(
    docker: DockerClient, admin: Client, tmp_path: Path
) -> None:
    name = docker.new("--name", "mine")
    project = admin.post("/v1/projects", json={"name": "foreign"}).json()
    body = {"name": "k", "role": "member", "project_id": project["id"]}
    key = admin.post("/v1/api-keys", json=body).json()
    other = DockerClient(docker.host, key["key"], tmp_path / "other")
    assert other.text("ps", "-aq") == ""
    instance_id = admin.items("/v1/instances", name="mine")[0]["id"]
    for reference in (name, name[:12], "mine", instance_id):
        for command in ("inspect", "logs", "kill", "stop", "top", "rm"):
            done = other.run(command, reference)
            assert done.returncode == 1, done
            assert b"o such" in done.stderr, done
    assert other.run("exec", name, "true").returncode == 1
    viewer = admin.post("/v1/api-keys", json={"name": "v", "role": "viewer"}).json()
    reader = DockerClient(docker.host, viewer["key"], tmp_path / "viewer")
    assert name.startswith(reader.text("ps", "-q"))
    assert b"instances:exec" in reader.run("exec", name, "true").stderr
    assert b"instances:write" in reader.run("stop", name).stderr
    for made in (key, viewer):
        admin.delete(f"/v1/api-keys/{made['id']}")


def test_a_killed_gateway_leaves_no_container_of_a_run(
    docker: DockerClient, docker_gateway: GatewayProcess, admin: Client
) -> None:
    running = docker.start("run", "--rm", *SMALL, BUSYBOX, "sh", "-c", "echo up; sleep 3")
    assert running.stdout is not None
    assert running.stdout.readline() == b"up\n"
    docker_gateway.kill()
    running.communicate(timeout=WITHIN_S)
    docker_gateway.start()
    wait_until(lambda: not admin.items("/v1/instances"), WITHIN_S)


def test_images_are_known_once_a_client_has_named_them(docker: DockerClient) -> None:
    assert b"No such image" in docker.run("image", "inspect", "named/image:1").stderr
    assert "nodes pull images" in docker.text("pull", "named/image:1")
    assert docker.text("image", "inspect", "-f", "{{.RepoTags}}", "named/image:1") == "[named/image:1]"


def test_docker_py_runs_and_lists(docker: DockerClient) -> None:
    library = docker.library()
    assert library.ping()
    output = library.containers.run(
        BUSYBOX, ["echo", "hello"], remove=True, mem_limit="64m", nano_cpus=100_000_000
    )
    assert output == b"hello\n"
    made = library.containers.run(
        BUSYBOX, ["sleep", "1000"], detach=True, mem_limit="64m", nano_cpus=100_000_000
    )
    assert made.exec_run(["sh", "-c", "echo in; exit 3"]) == (3, b"in\n")
    assert [each.id for each in library.containers.list()] == [made.id]
    made.stop(timeout=0)
    assert made.wait()["StatusCode"] >= 0
    made.remove()
    library.close()
