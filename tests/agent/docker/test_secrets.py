"""R17: a container gets the secrets of its project; the agent's files, logs and reports contain none."""

import hashlib
import json
import logging
import time
import traceback
from pathlib import Path
from typing import Any

import pytest

from mooring.agent.docker.create import Abilities, Image, environment, labels
from mooring.agent.docker.errors import EngineRefused
from mooring.agent.docker.redaction import MASK, SecretRedactor
from mooring.agent.docker.runtime import DockerRuntime
from mooring.agent.runtime import Runtime, RuntimeUnavailable, StartRefused
from mooring.agent.simulated.gpus import SimulatedGpuReader
from mooring.agent.simulated.runtime import SimulatedRuntime
from mooring.schemas.agent import Assignment
from tests.agent.agents import agent_with
from tests.agent.docker_assignments import CONTROL_PLANE, assignment, with_more
from tests.testbed.dockerd import DockerNode
from tests.testbed.waiting import wait_until

CANARY = 'canary "quoted"\\ and\ttabbed, 4f1c'
PASSWORD = "registry-canary-77aa"


def with_secret(**spec: Any) -> Assignment:
    given = assignment(env={"PLAIN": "shown", "TOKEN": {"secret": "my-token"}}, **spec)
    registry = {"server": "r.example", "username": "alice", "password": PASSWORD}
    return with_more(given, secrets={"TOKEN": CANARY, "UNASKED": "not in the spec"}, registry=registry)


def test_a_reference_becomes_its_value_and_only_in_the_environment() -> None:
    given, image = with_secret(), Image(id="sha256:1", digest=None)
    env = environment(given, image, Abilities())
    assert f"TOKEN={CANARY}" in env and "PLAIN=shown" in env
    assert not any("UNASKED" in entry for entry in env)
    found = labels(given, image, CONTROL_PLANE)
    assert found["mooring.secret_env"] == "TOKEN"
    assert "canary" not in json.dumps(found)


@pytest.mark.parametrize("simulated", [False, True])
def test_a_start_without_its_secret_is_rejected(runtime: DockerRuntime, *, simulated: bool) -> None:
    given = with_more(with_secret(), secrets={})
    engine: Runtime = SimulatedRuntime() if simulated else runtime
    with pytest.raises(StartRefused, match="my-token") as caught:
        engine.start(given, lambda _reason: None, lambda: False)
    assert caught.value.reason.code == "secret_unavailable"


def test_files_and_logs_of_the_agent_contain_no_secret(
    node: DockerNode, runtime: DockerRuntime, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With an instance that runs and is stopped, and some that do not start; the logs are at level DEBUG."""
    caplog.set_level(logging.DEBUG)
    digest = hashlib.sha256(CANARY.encode()).hexdigest()
    check = f'test "$(printf %s "$TOKEN" | sha256sum)" = "{digest}  -" && sleep 1000'
    good = with_secret(command=["sh", "-c", check])
    failing = [
        with_secret(command=["/no/such/program"]),
        with_secret(working_dir="/etc/passwd/x"),
        with_more(with_secret(), secrets={}),
    ]
    delayed = with_secret(image=f"{node.address}:1/nobody/listens:1")
    with agent_with(runtime, SimulatedGpuReader("gpu-1", 1), lambda _: None, tmp_path) as server:
        server.wants(good, *failing, delayed)
        wait_until(lambda: server.phase(good) == "running")
        wait_until(lambda: all(server.phase(one) == "refused" for one in failing), 30)
        wait_until(lambda: server.reason_code(delayed) == "registry_unavailable", 30)
        reasons = [server.instances()[one.instance_id, 1].reason for one in failing]
        container = server.instances()[good.instance_id, 1].container_id
        inspected = node.client.api.inspect_container(str(container))
        server.wants(good.model_copy(update={"want": "stopped", "may_start": False, "secrets": {}}))
        wait_until(lambda: server.phase(good) == "exited")
    assert f"TOKEN={CANARY}" in inspected["Config"]["Env"]
    assert {reason.code for reason in reasons if reason} >= {"command_not_found", "secret_unavailable"}
    texts = {
        "files": "".join(path.read_text() for path in tmp_path.rglob("*") if path.is_file()),
        "logs": caplog.text,
        "reports": "".join(report.model_dump_json() for _, report in server.reports),
        "labels": json.dumps(inspected["Config"]["Labels"]),
        "repr": repr([good, *failing, delayed]),
    }
    for where, text in texts.items():
        assert text, where
        for canary in ("canary", PASSWORD, "not in the spec"):
            assert canary not in text.replace("node-credential-canary", ""), where


@pytest.mark.parametrize(
    "quoted",
    [
        f"bad env TOKEN={CANARY} here",
        f"bad env {json.dumps('TOKEN=' + CANARY)} here",
        f"bad env {CANARY}",
        f"401 for alice:{PASSWORD}",
        "401 for Basic YWxpY2U6cmVnaXN0cnktY2FuYXJ5LTc3YWE=",
    ],
)
def test_quotes_in_engine_errors_are_masked(quoted: str) -> None:
    redactor = SecretRedactor.of(with_secret())
    with pytest.raises(EngineRefused) as refused, redactor.masking():
        raise EngineRefused(400, quoted)
    with pytest.raises(RuntimeUnavailable) as unavailable, redactor.masking():
        raise RuntimeUnavailable(quoted)
    for error in (refused.value, unavailable.value):
        text = "".join(traceback.format_exception(error))
        assert MASK in text
        assert "canary" not in text and "YWxp" not in text
    assert refused.value.status == 400


def test_a_restarted_agent_masks_the_secrets_of_a_container() -> None:
    inspected = {"Config": {"Env": [f"TOKEN={CANARY}", "PLAIN=shown", "OTHER=1"]}}
    error = f"PLAIN=shown OTHER=1 {CANARY} 1 of 1"
    recorded = SecretRedactor.of_container(inspected, {"TOKEN", "OTHER"})
    assert recorded.mask(error) == f"PLAIN=shown {MASK} {MASK} 1 of 1"
    # Without a record, any variable may be a secret.
    assert SecretRedactor.of_container(inspected, None).mask(error) == f"{MASK} {MASK} {MASK} 1 of 1"
    assert SecretRedactor.of_container({"Config": {"Env": None}}, None).mask("all of it") == "all of it"


@pytest.mark.parametrize("secret", ["held", "withheld", "[wit", "AAAA"])
def test_a_secret_that_is_part_of_the_mask_or_of_another_is_masked_once(secret: str) -> None:
    env = {"A": secret, "B": f"{secret}-and-more"}
    inspected = {"Config": {"Env": [f"{name}={value}" for name, value in env.items()]}}
    masked = SecretRedactor.of_container(inspected, env).mask(f"<{secret}-and-more> <{secret}>")
    assert masked.count(MASK) <= 2
    assert "and-more" not in masked and secret not in masked.replace(MASK, "")


def test_a_redactor_is_cheap_until_it_masks_a_text() -> None:
    """Each start and each inspect creates a redactor, also for instances with many large secrets."""
    secrets = {f"S{number}": '"\\' * 8192 for number in range(24)}
    inspected = {"Config": {"Env": [f"{name}={value}" for name, value in secrets.items()]}}
    began = time.process_time()
    for _ in range(100):
        assert SecretRedactor.of_container(inspected, None).mask("") == ""
    built = SecretRedactor.of_container(inspected, None)
    assert built.mask(f"bad env {json.dumps(secrets['S7'])}") == f'bad env "{MASK}"'
    # With one regular expression, each redactor would take 2.6 s.
    assert time.process_time() - began < 2
