"""The agent's records of its containers: saved, limited, and derived again when they are lost."""

import json
import os
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from mooring.agent.decide.device_claims import Share
from mooring.agent.docker import container_records
from mooring.agent.docker.client import Engine
from mooring.agent.docker.container_records import (
    FILE,
    ContainerRecord,
    ContainerRecords,
    TooManyContainersError,
)
from mooring.agent.docker.create import Abilities, ContainerLimits, Image, container_config
from mooring.agent.docker.derive import derive_record
from mooring.agent.docker.observe import Observer
from mooring.agent.docker.runtime import DockerRuntime
from mooring.agent.runtime import RuntimeUnavailable, StartDelayed
from mooring.agent.simulated.gpus import SimulatedGpuReader
from mooring.agent.sync.identity import StateDirectory
from mooring.schemas.agent import Assignment
from tests.agent.agents import agent_with
from tests.agent.docker_assignments import (
    CONTROL_PLANE,
    all_containers,
    assignment,
    create_by_hand,
    runtime_on,
    start,
    with_more,
)
from tests.agent.grants import GPU, MIG_A, with_mig, with_share
from tests.testbed.dockerd import DockerNode
from tests.testbed.waiting import wait_until

IMAGE = Image(id="sha256:1", digest="sha256:2")
C1, C2 = "1" * 64, "2" * 64
GROUP = {"group_id": "grp_1", "rank": 0, "count": 1, "hostname": "job-0", "network": "host"}


def record(given: Assignment | None = None) -> ContainerRecord:
    return ContainerRecord.of(given or assignment(), "sha256:2", CONTROL_PLANE)


def records_in(directory: Path) -> ContainerRecords:
    return ContainerRecords.of_node(StateDirectory(directory))


def on_the_hosts_network(given: Assignment) -> Assignment:
    return with_more(given, group=GROUP)


# --- the file


def test_records_survive_a_restart(tmp_path: Path) -> None:
    with_secret = with_more(
        assignment(env={"A": "1", "TOKEN": {"secret": "t"}}, ports=[{"container": 80}]),
        secrets={"TOKEN": "canary-value"},
    )
    made = {
        C1: record(on_the_hosts_network(with_share(with_secret, 20_000))),
        C2: record(with_mig(assignment(), MIG_A)),
    }
    for container_id, one in made.items():
        records_in(tmp_path).remember(container_id, one)
    later = records_in(tmp_path)
    assert {container_id: later.get(container_id) for container_id in later.ids()} == made
    assert made[C1].held_share == Share("shared", 250, 20_000, "proj-1")
    assert (made[C1].secret_env, made[C1].group_id) == (("TOKEN",), "grp_1")
    assert [(port.port, port.protocol) for port in made[C1].host_ports] == [(80, "tcp")]
    assert (made[C2].gpu_uuids, made[C2].cards) == ((MIG_A,), (GPU,))
    assert "canary" not in (tmp_path / FILE).read_text()
    assert (tmp_path / FILE).stat().st_mode & 0o777 == 0o600


def test_records_of_removed_containers_are_deleted(tmp_path: Path) -> None:
    records = records_in(tmp_path)
    records.remember(C1, record())
    records.remember(C2, record())
    records.forget({C1, "unknown"})
    assert records.ids() == records_in(tmp_path).ids() == {C2}


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b"[" * 100_000])
def test_a_damaged_file_counts_as_empty(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / FILE).write_bytes(damage)
    records = records_in(tmp_path)
    assert records.ids() == frozenset()
    records.remember(C1, record())
    assert records_in(tmp_path).ids() == {C1}


@pytest.mark.parametrize("entry", [None, 1, {}, {"instance_id": 7}, {"host_ports": [{"port": 0}]}])
def test_a_damaged_entry_does_not_affect_others(tmp_path: Path, entry: Any) -> None:
    records_in(tmp_path).remember(C1, record())
    content = json.loads((tmp_path / FILE).read_bytes())
    broken = {**content[C1], **entry} if isinstance(entry, dict) and entry else entry
    (tmp_path / FILE).write_text(json.dumps({**content, C2: broken}))
    assert records_in(tmp_path).ids() == {C1}


def test_a_field_of_a_later_release_is_ignored(tmp_path: Path) -> None:
    records_in(tmp_path).remember(C1, record())
    content = json.loads((tmp_path / FILE).read_bytes())
    (tmp_path / FILE).write_text(json.dumps({C1: {**content[C1], "later": 1}}))
    assert records_in(tmp_path).ids() == {C1}


def test_the_number_of_records_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(container_records, "MAX_RECORDS", 1)
    records = ContainerRecords()
    records.remember(C1, record())
    with pytest.raises(TooManyContainersError):
        records.remember(C2, record())
    records.remember(C1, record())  # an existing record can still be saved
    assert records.ids() == {C1}


def test_a_record_that_is_not_on_disk_is_not_kept() -> None:
    def full(_content: bytes) -> None:
        raise OSError(28, "No space left on device")

    records = ContainerRecords(None, full)
    with pytest.raises(OSError, match="No space"):
        records.remember(C1, record())
    assert records.get(C1) is None


def test_a_partial_write_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, content: write(descriptor, bytes(content)[:7]))
    records_in(tmp_path).remember(C1, record())
    assert records_in(tmp_path).ids() == {C1}


# --- derived records


def inspected(given: Assignment, **changes: Any) -> dict[str, Any]:
    """The engine's "inspect" of a container that the agent creates, with these changes."""
    config = container_config(given, IMAGE, Abilities(), ContainerLimits(), CONTROL_PLANE)
    found = {
        "Id": C1,
        "Name": f"/mooring-{given.instance_id}-1",
        "Config": {"Labels": config["Labels"], "Env": config["Env"]},
        "HostConfig": config["HostConfig"],
        "State": {"Status": "running", "StartedAt": "2026-11-22T00:00:00Z"},
        "NetworkSettings": {"Ports": {}},
    }
    for name, change in changes.items():
        found[name] = {**found[name], **change} if isinstance(change, dict) else change
    return found


def derive(found: dict[str, Any], *, simulated_gpus: bool = False) -> ContainerRecord | None:
    parents = {MIG_A: GPU}
    return derive_record(found, CONTROL_PLANE, parents.get, simulated_gpus=simulated_gpus)


def test_gpus_are_derived_from_the_host_config_and_their_parents_from_the_driver() -> None:
    whole = derive(inspected(assignment(gpu_uuids=("GPU-a", "GPU-b"))))
    assert whole is not None
    assert (whole.gpu_uuids, whole.cards, whole.secret_env) == (("GPU-a", "GPU-b"), (), None)
    mig = derive(inspected(with_mig(assignment(), MIG_A)))
    assert mig is not None
    assert (mig.gpu_uuids, mig.cards) == ((MIG_A,), (GPU,))


def test_labels_claim_no_gpu() -> None:
    given = assignment()
    labels = inspected(given)["Config"]["Labels"]
    claims = {"mooring.gpus": GPU, "mooring.cards": GPU, "mooring.share": "shared/1/1"}
    found = derive(inspected(given, Config={"Labels": {**labels, **claims}}))
    assert found is not None
    assert (found.gpu_uuids, found.cards, found.share) == ((), (), None)


@pytest.mark.parametrize(
    "changes",
    [
        {"Name": "/eager_hopper"},
        {"HostConfig": {"CapDrop": None}},
        {"HostConfig": {"SecurityOpt": None}},
        {"HostConfig": {"Privileged": True}},
        {"HostConfig": {"NetworkMode": "default"}},
        {"HostConfig": {"DeviceRequests": [{"Driver": "nvidia", "Count": -1}]}},
        {"Config": {"Labels": None}},
    ],
)
def test_a_container_that_the_agent_would_not_create_is_foreign(changes: dict[str, Any]) -> None:
    assert derive(inspected(assignment())) is not None
    assert derive(inspected(assignment(), **changes)) is None


# --- a restarted agent, with a real engine


@pytest.fixture
def first(node: DockerNode, tmp_path: Path) -> Iterator[DockerRuntime]:
    with closing(runtime_on(node, records=records_in(tmp_path))) as made:
        yield made


def kinds_of_assignments() -> list[Assignment]:
    return [
        with_share(assignment(), 20_000),
        with_mig(assignment(), MIG_A),
        assignment(gpu_uuids=("GPU-a",)),
        on_the_hosts_network(assignment(ports=[{"container": 8080}])),
    ]


def test_a_restarted_agent_reads_all_records(node: DockerNode, first: DockerRuntime, tmp_path: Path) -> None:
    made = [start(first, given) for given in kinds_of_assignments()]
    with closing(runtime_on(node, records=records_in(tmp_path))) as later:
        containers, orphans = later.containers()
    assert sorted(containers, key=lambda one: one.instance_id) == sorted(
        made, key=lambda one: one.instance_id
    )
    assert orphans == []
    assert made[3].endpoints[0].port == 8080


def test_a_lost_file_is_derived_and_completed_by_the_next_answer(
    node: DockerNode, first: DockerRuntime, tmp_path: Path
) -> None:
    """Also at the first start of this release, on a node with running containers of an earlier release."""
    given = kinds_of_assignments()
    made = {one.instance_id: one for one in (start(first, each) for each in given)}
    (tmp_path / FILE).write_text("damaged")
    with closing(runtime_on(node, records=records_in(tmp_path))) as later:
        containers, orphans = later.containers()
        assert (len(containers), orphans) == (4, [])
        for one in containers:
            known = made[one.instance_id]
            assert (one.gpu_uuids, one.status) == (known.gpu_uuids, "running")
            assert (one.share, one.endpoints) == (None, ())
        # An assignment with another spec does not complete the record.
        changed = with_more(given[0], spec={**given[0].spec.model_dump(), "env": {"A": "other"}})
        later.assigned([changed, *given[1:]])
        containers, _ = later.containers()
        assert [one for one in containers if one == made[one.instance_id]] != []
        assert next(one for one in containers if one.instance_id == given[0].instance_id).share is None
        later.assigned(given)
        containers, _ = later.containers()
        assert {one.instance_id: one for one in containers} == made
    assert len(records_in(tmp_path).ids()) == 4


def test_an_agent_completes_its_records_from_the_control_planes_answer(
    node: DockerNode, tmp_path: Path
) -> None:
    given = with_share(assignment(), 20_000)
    first_records, later_records = ContainerRecords(), ContainerRecords()
    reader = SimulatedGpuReader("gpu-1", 1)
    first_runtime = runtime_on(node, records=first_records)
    later_runtime = runtime_on(node, records=later_records)
    with agent_with(first_runtime, reader, lambda _: None, tmp_path / "a") as server:
        server.wants(given)
        wait_until(lambda: server.phase(given) == "running")
    with agent_with(later_runtime, reader, lambda _: None, tmp_path / "b") as server:
        server.wants(given)
        [container_id] = wait_until(later_records.ids, 40) or [""]
        assert server.phase(given) == "running"
    assert later_records.get(container_id) == first_records.get(container_id) is not None


def test_a_record_is_saved_at_the_start_and_deleted_after_the_removal(
    node: DockerNode, first: DockerRuntime, tmp_path: Path
) -> None:
    made = start(first, assignment())
    assert records_in(tmp_path).ids() == {made.container_id}
    first.containers()
    assert records_in(tmp_path).ids() == {made.container_id}
    node.client.api.remove_container(made.container_id, force=True)
    assert first.containers() == ([], [])
    assert records_in(tmp_path).ids() == frozenset()


def test_a_container_that_cannot_be_recorded_is_not_started(node: DockerNode) -> None:
    def full(_content: bytes) -> None:
        raise OSError(28, "No space left on device")

    with closing(runtime_on(node, records=ContainerRecords(None, full))) as runtime:
        with pytest.raises(StartDelayed) as caught:
            start(runtime, assignment())
        assert caught.value.reason.code == "state_not_saved"
        assert all_containers(node) == []


def test_an_adopted_container_is_recorded_as_requested(
    node: DockerNode, first: DockerRuntime, tmp_path: Path
) -> None:
    given = with_share(assignment(), 20_000)
    created = create_by_hand(node, given)
    assert start(first, given).share == Share("shared", 250, 20_000, "proj-1")
    assert records_in(tmp_path).get(created) == ContainerRecord.of(given, None, CONTROL_PLANE)


def test_a_recorded_container_of_another_control_plane_is_an_orphan(
    node: DockerNode, first: DockerRuntime, tmp_path: Path
) -> None:
    start(first, assignment())
    with closing(runtime_on(node, records=records_in(tmp_path), control_plane_id="another")) as later:
        containers, orphans = later.containers()
    assert (containers, len(orphans)) == ([], 1)


# --- one container that the engine cannot describe


HUNG = "does not answer"


@contextmanager
def engine_with(found: dict[str, Any]) -> Iterator[str]:
    """The URL of a server that answers as dockerd does, with these containers (`described`)."""
    released = threading.Event()

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            _, _, path = self.path.partition("/containers/")
            container = found.get(path.partition("/")[0])
            if path.startswith("json"):
                self._answer(200, [listed(container_id, found) for container_id in found])
            elif container is not None:
                if container["broken"] == HUNG:
                    released.wait(20)
                if isinstance(container["broken"], str):
                    self._answer(500, {"message": container["broken"]})
                else:
                    self._answer(200, {**container, **container["broken"]})
            else:
                self._answer(200, {"ApiVersion": "1.41"})

        def _answer(self, status: int, content: Any) -> None:
            body = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            with suppress(BrokenPipeError):  # the client's timeout has passed
                self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"tcp://127.0.0.1:{server.server_port}"
    finally:
        released.set()
        server.shutdown()
        thread.join()
        server.server_close()


def listed(container_id: str, found: dict[str, Any]) -> dict[str, Any]:
    """The container's entry in a list."""
    container = found[container_id]
    state, status = "running", "Up 2 minutes"
    if container["broken"] == HUNG:
        state, status = "exited", "Exited (3) 2 minutes ago"
    names, labels = [container["Name"]], container["Labels"]
    return {"Id": container_id, "Names": names, "Labels": labels, "State": state, "Status": status}


def described(container_id: str, given: Assignment, broken: Any) -> dict[str, Any]:
    """A container; `broken` is the error of its "inspect", `HUNG` if that hangs, or changed fields."""
    container = inspected(given)
    return {**container, "Id": container_id, "Labels": container["Config"]["Labels"], "broken": broken}


BROKEN: list[Any] = [
    "the layer of this container is damaged",
    {"NetworkSettings": {"Ports": {"80": [{"HostPort": "many"}], "x/tcp": [{"HostPort": "many"}]}}},
    {"Config": {}},
    {"HostConfig": None},
]


@pytest.mark.parametrize("broken", BROKEN)
@pytest.mark.parametrize("recorded", [True, False])
def test_an_unreadable_container_does_not_hide_others(broken: Any, *, recorded: bool) -> None:
    bad, good = assignment(gpu_uuids=("GPU-a",)), assignment()
    records = ContainerRecords()
    if recorded:
        records.remember(C1, record(bad))
    with engine_with({C1: described(C1, bad, broken), C2: described(C2, good, {})}) as url:
        engine = Engine({"DOCKER_HOST": url})
        observer = Observer(engine, "10.0.0.7", records)
        for _ in range(2):  # the second list uses what the first has read
            containers, orphans = observer.containers(CONTROL_PLANE)
            found = {one.container_id: one for one in containers}
            assert found[C2].status == "running"
            if recorded:  # the record shows that its GPUs are not free
                assert (found[C1].status, found[C1].gpu_uuids) == ("running", ("GPU-a",))
            else:
                assert [one.container_id for one in orphans] == [C1]
        engine.close()


def test_a_container_whose_inspect_hangs_has_the_state_of_the_list() -> None:
    """Docker's list does not wait for the lock of a container, but "inspect" does."""
    bad, good = assignment(gpu_uuids=("GPU-a",)), assignment()
    records = ContainerRecords()
    with engine_with({C1: described(C1, bad, HUNG), C2: described(C2, good, {})}) as url:
        engine = Engine({"DOCKER_HOST": url}, timeout_s=1)
        observer = Observer(engine, "10.0.0.7", records)
        with pytest.raises(RuntimeUnavailable):  # without a record, it must not count as gone
            observer.containers(CONTROL_PLANE)
        records.remember(C1, record(bad))
        containers, orphans = observer.containers(CONTROL_PLANE)
        found = {one.container_id: one for one in containers}
        assert (found[C1].status, found[C1].exit_code) == ("exited", 3)
        assert (found[C1].gpu_uuids, found[C2].status, orphans) == (("GPU-a",), "running", [])
        engine.close()
