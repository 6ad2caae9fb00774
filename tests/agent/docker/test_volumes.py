"""Volumes in real containers: their files stay, and nothing of the node or of an image gets into them."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from mooring.agent.docker.client import Engine
from mooring.agent.docker.runtime import DockerRuntime
from mooring.agent.docker.volume_mounts import (
    VOLUME_LABEL,
    mounts_of,
    require_apart,
    volume_config,
    volume_name,
)
from mooring.agent.docker.volumes import DockerVolumes, mount_delayed
from mooring.agent.runtime import RuntimeUnavailable, StartRefused
from mooring.schemas.agent import AssignedVolume, Assignment, ReportedVolume
from tests.agent.docker_assignments import (
    CONTROL_PLANE,
    assignment,
    image_with,
    output_of,
    runtime_on,
    start,
    with_more,
)
from tests.testbed.dockerd import DockerNode
from tests.testbed.waiting import wait_until

_numbers = itertools.count(1)


@pytest.fixture
def runtime(docker_node: DockerNode) -> Iterator[DockerRuntime]:
    made = runtime_on(docker_node)
    yield made
    for container in made.containers()[0]:
        made.kill(container)
        made.remove(container)
    made.facts()
    made.remove_volumes([each.volume_id for each in made.volumes() or ()])
    made.close()


def new_volume(**fields: Any) -> AssignedVolume:
    return AssignedVolume.model_validate(
        {
            "volume_id": f"vol_{next(_numbers)}", "project_id": "proj-1", "driver": "local", "size_mib": 64,
            "path": "/data", **fields,
        }
    )  # fmt: skip


def with_volumes(*volumes: AssignedVolume, **spec: Any) -> Assignment:
    return with_more(
        assignment(command=["sleep", "600"], **spec), volumes=[each.model_dump() for each in volumes]
    )


def known(runtime: DockerRuntime) -> dict[str, ReportedVolume]:
    return {each.volume_id: each for each in runtime.volumes() or ()}


def test_the_files_of_a_volume_stay_for_the_next_instance(runtime: DockerRuntime) -> None:
    volume = new_volume()
    first = start(runtime, with_volumes(volume))
    output_of(runtime, first, ["sh", "-c", "echo kept > /data/file"])
    runtime.kill(first)
    wait_until(lambda: runtime.containers()[0][0].status == "exited")
    runtime.remove(first)
    second = start(runtime, with_volumes(volume.model_copy(update={"path": "/other"})))
    assert output_of(runtime, second, ["cat", "/other/file"]) == "kept\n"


def test_a_read_only_mount_cannot_be_written(runtime: DockerRuntime) -> None:
    container = start(runtime, with_volumes(new_volume(read_only=True)))
    assert "Read-only" in output_of(runtime, container, ["touch", "/data/file"])


def test_an_image_puts_nothing_into_a_volume_and_its_own_volume_is_replaced(
    docker_node: DockerNode, runtime: DockerRuntime
) -> None:
    image = image_with(docker_node, "with-volume", ["VOLUME /home"])
    container = start(runtime, with_volumes(new_volume(path="/home"), image=image))
    assert output_of(runtime, container, ["ls", "-A", "/home"]) == ""
    assert "tmpfs" not in output_of(runtime, container, ["sh", "-c", "grep ' /home ' /proc/mounts"])


def test_a_volume_of_another_origin_is_refused_and_left(
    docker_node: DockerNode, runtime: DockerRuntime
) -> None:
    volume = new_volume()
    docker_node.client.volumes.create(volume_name(volume.volume_id))
    try:
        with pytest.raises(StartRefused) as refused:
            start(runtime, with_volumes(volume))
        assert refused.value.reason.code == "volume_name_taken"
        runtime.remove_volumes([volume.volume_id])
        assert docker_node.client.volumes.get(volume_name(volume.volume_id))
    finally:
        docker_node.client.volumes.get(volume_name(volume.volume_id)).remove()


@pytest.mark.parametrize(
    "changes", [{"mooring.project": "proj-2"}, {"mooring.control_plane": "other"}, {VOLUME_LABEL: "vol_x"}]
)
def test_a_volume_of_another_project_or_service_is_refused(
    docker_node: DockerNode, runtime: DockerRuntime, changes: dict[str, str]
) -> None:
    volume = new_volume()
    config = volume_config(volume, CONTROL_PLANE, sized=False)
    made = docker_node.client.volumes.create(config["Name"], labels={**config["Labels"], **changes})
    try:
        with pytest.raises(StartRefused) as refused:
            start(runtime, with_volumes(volume))
        assert refused.value.reason.code == "volume_name_taken"
    finally:
        made.remove()


def test_a_volume_is_removed_once_no_container_has_it(
    docker_node: DockerNode, runtime: DockerRuntime
) -> None:
    volume = new_volume()
    container = start(runtime, with_volumes(volume))
    runtime.facts()
    assert volume.volume_id in known(runtime)
    with pytest.raises(RuntimeUnavailable):
        runtime.remove_volumes([volume.volume_id])
    assert volume.volume_id in known(runtime)
    runtime.kill(container)
    wait_until(lambda: runtime.containers()[0][0].status == "exited")
    with pytest.raises(RuntimeUnavailable):
        runtime.remove_volumes([volume.volume_id])
    runtime.remove(container)
    runtime.remove_volumes([volume.volume_id, "vol_that_never_was"])
    assert volume.volume_id not in known(runtime)
    names = {each.name for each in docker_node.client.volumes.list()}
    assert volume_name(volume.volume_id) not in names


def test_volumes_of_other_services_are_not_reported(docker_node: DockerNode, runtime: DockerRuntime) -> None:
    config = volume_config(new_volume(), "another-control-plane", sized=False)
    other = docker_node.client.volumes.create(config["Name"], labels=config["Labels"])
    try:
        runtime.facts()
        assert known(runtime) == {}
    finally:
        other.remove()


def test_how_full_a_volume_is(docker_node: DockerNode, runtime: DockerRuntime) -> None:
    volume = new_volume()
    container = start(runtime, with_volumes(volume))
    output_of(runtime, container, ["dd", "if=/dev/zero", "of=/data/file", "bs=1M", "count=5"])
    volumes = DockerVolumes(Engine({"DOCKER_HOST": docker_node.url}, 10))
    volumes.refresh(CONTROL_PLANE)
    volumes.measure_all()
    (measured,) = (each for each in volumes.known() or () if each.volume_id == volume.volume_id)
    assert measured.used_mib in {5, 6}


def test_low_on_space_the_least_recently_used_cache_without_a_container_goes(
    docker_node: DockerNode, runtime: DockerRuntime
) -> None:
    local, used, old, recent = (new_volume(driver=driver) for driver in ("local", "cache", "cache", "cache"))
    start(runtime, with_volumes(used))
    clock = itertools.count()
    volumes = DockerVolumes(Engine({"DOCKER_HOST": docker_node.url}, 10), clock=lambda: float(next(clock)))
    volumes.refresh(CONTROL_PLANE)
    for each in (local, old, recent):
        volumes.ensure(with_volumes(each), CONTROL_PLANE)
    volumes.evict_one(CONTROL_PLANE)
    left = {each.volume_id for each in volumes.known() or ()}
    assert left == {local.volume_id, used.volume_id, recent.volume_id}


def test_a_file_server_that_cannot_be_mounted_ends_the_start(runtime: DockerRuntime) -> None:
    volume = new_volume(driver="nfs", size_mib=None, server="127.0.0.1", exported_path="/nothing")
    with pytest.raises(StartRefused) as refused:
        start(runtime, with_volumes(volume))
    assert refused.value.reason.code == "volume_mount_failed"
    assert runtime.containers()[0] == []


def test_a_start_that_waits_for_a_file_server_says_so_and_ends() -> None:
    nfs = new_volume(driver="nfs", size_mib=None, server="nas-1", exported_path="/export")
    delayed = mount_delayed(with_volumes(nfs))
    assert delayed is not None and delayed.refusal is not None
    assert delayed.reason.code == "volume_not_answering" and "nas-1" in delayed.reason.message
    assert mount_delayed(with_volumes(new_volume())) is None


def test_an_nfs_mount_has_no_other_options() -> None:
    nfs = new_volume(driver="nfs", size_mib=None, server="fd00::7", exported_path="/export", version="4.2")
    options = volume_config(nfs, CONTROL_PLANE, sized=True)["DriverOpts"]
    assert options == {
        "type": "nfs",
        "o": "addr=[fd00::7],nfsvers=4.2,nosuid,nodev,soft,timeo=150,retrans=3",
        "device": ":/export",
    }
    hard = volume_config(nfs.model_copy(update={"hard": True}), CONTROL_PLANE, sized=True)["DriverOpts"]
    assert hard["o"].endswith("nosuid,nodev,hard")


def test_a_mount_is_never_a_folder_of_the_node() -> None:
    for driver in ("local", "cache"):
        (mount,) = mounts_of([new_volume(driver=driver)], CONTROL_PLANE)
        assert mount["Type"] == "volume" and mount["Source"].startswith("mooring-vol_")
        assert mount["VolumeOptions"]["NoCopy"] is True
        assert mount["VolumeOptions"]["DriverConfig"] == {"Name": "local", "Options": {}}


def test_a_volume_may_not_cover_the_toolbox() -> None:
    for path in ("/.mooring", "/.mooring/bin"):
        with pytest.raises(StartRefused) as refused:
            require_apart([new_volume(path=path)], ["/.mooring"])
        assert refused.value.reason.code == "volume_path_unusable"
