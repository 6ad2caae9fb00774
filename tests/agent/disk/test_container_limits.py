"""Disk limits of containers, limits of pulls, and the usage of images."""

import json
from typing import Any

import pytest

from mooring.agent.disk.container_limits import MAX_VOLUMES, file_size_limits, storage_options, volume_masks
from mooring.agent.disk.storage import DiskPolicy, Space
from mooring.agent.docker.create import Abilities, ContainerLimits, Image, container_config, spec_hash
from mooring.agent.images.policy import PullLimits
from mooring.agent.images.usage import ImageUsage
from mooring.agent.runtime import StartRefused
from mooring.schemas.agent import Assignment
from tests.agent.builders import assignment

MIB = 2**20


def host_config(given: Assignment, image: Image, **abilities: Any) -> dict[str, Any]:
    config = container_config(given, image, Abilities(**abilities), ContainerLimits(), "cp-1")
    return dict(config["HostConfig"])


def with_disk(disk_mib: int | None) -> Assignment:
    return assignment().model_copy(update={"disk_mib": disk_mib})


def masks(*volumes: str) -> dict[str, str]:
    return volume_masks("x", volumes, 64, ())


def test_a_volume_is_masked_by_a_tmpfs() -> None:
    config = host_config(assignment(), Image("sha256:1", None, volumes=("/data",)))
    assert config["Tmpfs"] == {"/data": "rw,nosuid,nodev,exec,mode=1777,size=32m"}


@pytest.mark.parametrize(
    ("volume", "path"), [("/data/", "/data"), ("//data", "/data"), ("/a/../b", "/b"), ("/a//b", "/a/b")]
)
def test_paths_are_normalized_like_the_engine_does(volume: str, path: str) -> None:
    assert list(masks(volume)) == [path]


@pytest.mark.parametrize(
    "volume",
    [
        "/", "//", "/a/..", "", "data", "./data", "/proc", "/proc/x", "/a/../proc", "/sys/fs/cgroup",
        "/dev/shm", "/a:rw", "/a\nb", "/" + "a" * 300,
    ],
)  # fmt: skip
def test_a_volume_that_cannot_be_masked_is_rejected(volume: str) -> None:
    with pytest.raises(StartRefused) as caught:
        masks(volume)
    assert caught.value.reason.code == "image_volumes_refused"


def test_the_number_of_volumes_is_limited() -> None:
    assert len(masks(*(f"/v{number}" for number in range(MAX_VOLUMES)))) == MAX_VOLUMES
    with pytest.raises(StartRefused, match="the limit is 16"):
        masks(*(f"/v{number}" for number in range(MAX_VOLUMES + 1)))


def test_a_path_with_a_mount_is_not_masked() -> None:
    assert volume_masks("x", ["/tmp/nvidia-mps", "/tmp"], 64, ["/tmp/nvidia-mps"]).keys() == {"/tmp"}


def test_a_volume_below_a_mount_of_mooring_is_refused() -> None:
    assert volume_masks("x", ["/.mooring2", "/a/.mooring/b"], 64, ["/.mooring"])
    for volume in ("/.mooring/new", "//.mooring/a/../b/"):
        with pytest.raises(StartRefused, match="Mooring mounts files of its own"):
            volume_masks("x", [volume], 64, ["/.mooring"])


@pytest.mark.parametrize(
    ("disk_mib", "abilities", "option"),
    [
        (100, {"disk_limits": True, "storage_driver": "overlay2"}, {"size": "100M"}),
        # A btrfs snapshot includes its image's data.
        (100, {"disk_limits": True, "storage_driver": "btrfs"}, {"size": "103M"}),
        (100, {"disk_limits": False, "storage_driver": "overlay2"}, None),
        (None, {"disk_limits": True, "storage_driver": "overlay2"}, None),
    ],
)
def test_the_disk_limit_of_a_container(disk_mib: int | None, abilities: dict[str, Any], option: Any) -> None:
    image = Image("sha256:1", None, size_bytes=2 * MIB + 1)
    config = host_config(with_disk(disk_mib), image, **abilities)
    assert config.get("StorageOpt") == option
    largest = [limit for limit in config["Ulimits"] if limit["Name"] == "fsize"]
    assert [limit["Hard"] for limit in largest] == ([100 * MIB] if option else [])


def test_a_file_may_be_as_large_as_the_memory() -> None:
    (limit,) = file_size_limits(100, 4096, enforced=True)
    assert limit["Soft"] == limit["Hard"] == 4096 * MIB


def test_the_spec_hash_of_an_earlier_release_is_unchanged() -> None:
    before = assignment(instance_id="a")
    assert spec_hash(before.model_copy(update={"disk_mib": None})) == spec_hash(before)
    assert spec_hash(before.model_copy(update={"disk_mib": 64})) != spec_hash(before)


def test_without_a_limit_there_is_no_option() -> None:
    assert storage_options(None, enforced=True, driver="overlay2", image_bytes=0) == {}


@pytest.mark.parametrize(
    ("total_gib", "allocatable_gib", "low_gib"), [(1000, 800, 20), (4000, 3800, 20), (100, 80, 5), (10, 8, 1)]
)
def test_the_allocatable_size_and_the_low_watermark(
    total_gib: int, allocatable_gib: int, low_gib: int
) -> None:
    policy = DiskPolicy()
    assert policy.allocatable_mib(total_gib * 1024) == allocatable_gib * 1024
    assert policy.low(total_gib * 1024) == low_gib * 1024
    assert DiskPolicy(reserved_mib=7, low_mib=9).allocatable_mib(100) == 93
    assert DiskPolicy(reserved_mib=7, low_mib=9).low(100) == 9


class TestPullLimits:
    def test_the_compressed_and_the_unpacked_size_are_limited(self) -> None:
        limits = PullLimits(max_image_mib=10)
        limits.during("x", 10 * MIB)
        limits.after("x", 10 * MIB)
        for check in (limits.during, limits.after):
            with pytest.raises(StartRefused) as caught:
                check("x", 10 * MIB + 1)
            assert caught.value.reason.code == "image_too_large"

    def test_a_pull_is_rejected_only_if_removing_images_frees_too_little(self) -> None:
        free = [1]

        def make_room() -> None:
            free[0] = 50

        limits = PullLimits(space=lambda: Space(100, free[0]), policy=DiskPolicy(low_mib=10))
        with pytest.raises(StartRefused) as caught:
            limits.before("x")
        assert caught.value.reason.code == "node_disk_full"
        PullLimits(
            space=lambda: Space(100, free[0]), policy=DiskPolicy(low_mib=10), make_room=make_room
        ).before("x")

    def test_a_full_disk_aborts_the_pull(self) -> None:
        limits = PullLimits(space=lambda: Space(100, 9), policy=DiskPolicy(low_mib=10))
        with pytest.raises(StartRefused) as caught:
            limits.during("x", 0)
        assert caught.value.reason.code == "node_disk_full"

    def test_an_unknown_disk_limits_nothing(self) -> None:
        PullLimits().before("x")


class TestImageUsage:
    def test_unused_time_continues_after_a_restart(self) -> None:
        saved: list[bytes] = []
        now = [100.0]
        first = ImageUsage(save=saved.append, clock=lambda: now[0])
        first.add("sha256:1", "docker.io/a")
        now[0] += 700
        first.sync({"sha256:1"}, ())
        now[0] = 5.0  # after a reboot
        second = ImageUsage(saved[-1], clock=lambda: now[0])
        now[0] += 50
        assert second.unused_s("sha256:1", ["docker.io/a"]) == 750

    def test_images_not_pulled_or_with_another_name_are_never_removed(self) -> None:
        known = ImageUsage()
        known.add("sha256:1", "docker.io/a")
        assert known.unused_s("sha256:2", ["docker.io/a"]) is None
        assert known.unused_s("sha256:1", ["docker.io/a", "docker.io/operators"]) is None

    def test_an_image_cannot_be_used_during_its_removal(self) -> None:
        known = ImageUsage()
        known.add("sha256:1", "docker.io/a")
        assert known.begin_removal("sha256:1", 0)
        assert not known.use("sha256:1")
        known.end_removal("sha256:1")
        assert known.use("sha256:1")

    def test_recently_used_images_are_not_removed(self) -> None:
        now = [0.0]
        known = ImageUsage(clock=lambda: now[0])
        known.add("sha256:1", "docker.io/a")
        now[0] = 1000
        known.use("sha256:1")
        assert not known.begin_removal("sha256:1", 600)
        now[0] = 1601
        assert known.begin_removal("sha256:1", 600)

    @pytest.mark.parametrize("saved", [b"", b"{", b'{"images": {"a": 1}}', json.dumps([1]).encode()])
    def test_a_damaged_file_removes_nothing(self, saved: bytes) -> None:
        assert ImageUsage(saved).unused_s("a", []) is None

    def test_a_full_disk_does_not_stop_the_agent(self) -> None:
        def full(_content: bytes) -> None:
            raise OSError("no space left on device")

        ImageUsage(save=full).add("sha256:1", "docker.io/a")
