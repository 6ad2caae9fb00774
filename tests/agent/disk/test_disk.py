"""Disk limits of instances and images, on real engines and filesystems."""

import gzip
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from typing import Any

import pytest

from mooring.agent.disk.disk import DiskSettings
from mooring.agent.disk.storage import DiskPolicy, Space
from mooring.agent.docker.runtime import DockerRuntime
from mooring.agent.images.collector import CollectorPolicy, ImageCollector
from mooring.agent.images.usage import ImageUsage
from mooring.agent.runtime import Container, StartRefused
from mooring.schemas.agent import Assignment
from mooring_client.schemas.states import Reason
from tests.agent.docker_assignments import (
    all_containers,
    assignment,
    image_with,
    output_of,
    runtime_on,
    start,
    with_more,
)
from tests.testbed import images
from tests.testbed.dockerd import DockerNode
from tests.testbed.fixtures import NewDockerNode
from tests.testbed.registry import MEGABYTE, Registry
from tests.testbed.waiting import wait_until

FILL = "dd if=/dev/zero of={path} bs=1M count=200 2>&1; ls -l {path}"
KEEPS_ALL = CollectorPolicy(high_pct=100)


def mounts_of(node: DockerNode, container: Container) -> dict[str, str]:
    found = node.client.api.inspect_container(container.container_id)["Mounts"]
    return {mount["Destination"]: mount["Type"] for mount in found}


def volumes_on(node: DockerNode) -> list[str]:
    return [volume["Name"] for volume in node.client.api.volumes()["Volumes"] or []]


def references_on(node: DockerNode) -> set[str]:
    return {tag for image in node.client.api.images() for tag in image["RepoTags"] or []}


def refusal_of(runtime: DockerRuntime, given: Assignment) -> Reason:
    with pytest.raises(StartRefused) as caught:
        start(runtime, given)
    return caught.value.reason


def size_of(listing: str) -> int:
    """Return the size of the last file that `ls -l` listed."""
    return int(listing.splitlines()[-1].split()[4])


class TestVolumesOfImages:
    def test_a_volume_of_an_image_is_not_created_on_the_host(
        self, node: DockerNode, runtime: DockerRuntime
    ) -> None:
        image = image_with(node, "volume", ["VOLUME /data /var/lib/x"])
        started = start(runtime, assignment(image=image))
        assert mounts_of(node, started) == {}
        assert volumes_on(node) == []
        # 64 MiB of memory: each volume has half of it.
        filled = output_of(runtime, started, ["sh", "-c", FILL.format(path="/data/fill")])
        assert "No space left" in filled
        assert size_of(filled) == 32 * 2**20

    def test_programs_in_a_volume_are_executable_by_any_user(
        self, node: DockerNode, runtime: DockerRuntime
    ) -> None:
        image = image_with(node, "volume-exec", ["VOLUME /data"])
        started = start(runtime, assignment(image=image, user="1000"))
        line = "cp /bin/busybox /data/sh && /data/sh -c 'echo it runs'"
        assert "it runs" in output_of(runtime, started, ["sh", "-c", line])

    def test_the_memory_limit_bounds_all_volumes_together(
        self, node: DockerNode, runtime: DockerRuntime
    ) -> None:
        image = image_with(node, "volumes", ["VOLUME /a /b /c"])
        started = start(runtime, assignment(image=image))
        line = "for each in a b c; do dd if=/dev/zero of=/$each/x bs=1M count=30; done; stat -c %s /?/x"
        written = output_of(runtime, started, ["sh", "-c", line]).splitlines()
        assert 30 * 2**20 < sum(map(int, filter(str.isdigit, written))) < 64 * 2**20

    @pytest.mark.parametrize("path", ["/", "/proc", "/proc/x", "/dev/shm", "rel", "/a:b"])
    def test_a_volume_that_cannot_be_masked_is_rejected(
        self, node: DockerNode, runtime: DockerRuntime, path: str
    ) -> None:
        image = image_with(node, "odd-volume", [f'VOLUME ["{path}"]'])
        assert refusal_of(runtime, assignment(image=image)).code == "image_volumes_refused"
        assert all_containers(node) == []
        assert volumes_on(node) == []


class TestLimits:
    def test_an_engine_on_ext4_does_not_enforce_limits(
        self, node: DockerNode, runtime: DockerRuntime
    ) -> None:
        before = references_on(node)
        report = runtime.disk.report(runtime.info())
        assert not report.limits.enforced
        assert "pquota" in report.limits.why_not
        assert (all_containers(node), references_on(node)) == ([], before)
        assert start(runtime, with_more(assignment(), disk_mib=64)).status == "running"

    def test_a_node_reports_its_disk(self, runtime: DockerRuntime) -> None:
        disk = runtime.facts().disk
        assert disk is not None
        assert 0 < disk.available_mib <= disk.total_mib
        assert 0 < disk.allocatable_mib < disk.total_mib
        assert (disk.driver, disk.enforced, disk.pressure) == ("overlay2", False, False)

    def test_a_nearly_full_disk_is_reported(self, node: DockerNode) -> None:
        settings = DiskSettings(policy=DiskPolicy(low_mib=2**40), collector=KEEPS_ALL)
        with closing(runtime_on(node, disk=settings)) as runtime:
            disk = runtime.facts().disk
        assert disk is not None
        assert disk.pressure

    @pytest.mark.parametrize("filesystem", ["xfs", "btrfs"])
    def test_writes_of_an_instance_stop_at_its_limit(
        self, new_docker_node: NewDockerNode, filesystem: str
    ) -> None:
        node = new_docker_node(filesystem=filesystem)
        with closing(runtime_on(node)) as runtime:
            disk = runtime.facts().disk
            assert disk is not None
            assert disk.enforced
            started = start(runtime, with_more(assignment(), disk_mib=64))
            filled = output_of(runtime, started, ["sh", "-c", FILL.format(path="/root/fill")])
            assert 60 * 2**20 < size_of(filled) <= 64 * 2**20
            more = output_of(runtime, started, ["sh", "-c", FILL.format(path="/tmp/another")])
            assert "Disk quota exceeded" in more or "No space left" in more
            # A file of the host that is mounted into every container, outside its layer.
            hosts = output_of(runtime, started, ["sh", "-c", FILL.format(path="/etc/hosts")])
            assert size_of(hosts) <= 64 * 2**20

    def test_a_large_image_does_not_reduce_the_limit(self, new_docker_node: NewDockerNode) -> None:
        """On btrfs, the limit of a container includes the image's data."""
        node = new_docker_node(filesystem="btrfs")
        layer = images.single_file_layer("large", b"\1" * 100 * 2**20)
        repository = "mooring-test/large"
        merged = node.client.api.import_image_from_data(
            images.busybox_layer()[: -1024 * 10] + layer, repository=repository, tag="1"
        )
        assert "error" not in merged
        with closing(runtime_on(node)) as runtime:
            runtime.facts()
            given = with_more(assignment(image=f"{repository}:1", command=["sleep", "60"]), disk_mib=64)
            started = start(runtime, given)
            filled = output_of(runtime, started, ["sh", "-c", FILL.format(path="/root/fill")])
            assert 60 * 2**20 < size_of(filled) <= 65 * 2**20


class TestPulls:
    @pytest.fixture
    def small(self, node: DockerNode) -> Iterator[DockerRuntime]:
        """A runtime that accepts images of up to 10 MiB."""
        settings = DiskSettings(max_image_mib=10, collector=KEEPS_ALL)
        with closing(runtime_on(node, disk=settings)) as made:
            yield made

    def test_a_large_image_is_not_downloaded(
        self, node: DockerNode, small: DockerRuntime, registry: Registry
    ) -> None:
        image = registry.add_image("disk/large", extra_layers=1, layer_bytes=60 * MEGABYTE)
        reason = refusal_of(small, assignment(image=image))
        assert reason.code == "image_too_large"
        assert "compressed" in reason.message
        assert image not in references_on(node)

    def test_many_layers_that_are_too_large_together_are_rejected(
        self, node: DockerNode, small: DockerRuntime, registry: Registry
    ) -> None:
        image = registry.add_image("disk/layers", extra_layers=12, layer_bytes=MEGABYTE)
        assert refusal_of(small, assignment(image=image)).code == "image_too_large"
        assert image not in references_on(node)

    def test_an_image_that_is_too_large_unpacked_is_removed(
        self, node: DockerNode, small: DockerRuntime, registry: Registry
    ) -> None:
        zeros = 40 * MEGABYTE
        assert len(gzip.compress(bytes(zeros))) < MEGABYTE
        image = registry.add_image("disk/bomb", zeros_bytes=zeros)
        reason = refusal_of(small, assignment(image=image))
        assert reason.code == "image_too_large"
        assert "unpacked" in reason.message
        assert image not in references_on(node)

    def test_an_image_that_is_too_large_is_not_pulled_again(
        self, small: DockerRuntime, registry: Registry
    ) -> None:
        image = registry.add_image("disk/again", zeros_bytes=40 * MEGABYTE)
        refusal_of(small, assignment(image=image))
        log_size = registry.daemon.log.stat().st_size
        assert refusal_of(small, assignment(image=image)).code == "image_too_large"
        assert registry.daemon.log.stat().st_size == log_size

    def test_an_image_that_was_on_the_node_before_is_not_removed(
        self, node: DockerNode, small: DockerRuntime, registry: Registry
    ) -> None:
        image = registry.add_image("disk/operators", zeros_bytes=40 * MEGABYTE)
        node.client.api.pull(image)
        assert start(small, assignment(image=image)).status == "running"

    def test_a_pull_that_would_fill_the_disk_is_aborted(
        self, new_docker_node: NewDockerNode, registry: Registry
    ) -> None:
        node = new_docker_node(filesystem="ext4", size_mib=600)
        image = registry.add_image("disk/filler", zeros_bytes=900 * MEGABYTE)
        settings = DiskSettings(policy=DiskPolicy(low_mib=200), collector=KEEPS_ALL)
        with closing(runtime_on(node, disk=settings)) as runtime:
            before = runtime.facts().disk
            reason = refusal_of(runtime, assignment(image=image))
            assert reason.code == "node_disk_full"
            assert "too full to pull" in reason.message
            assert image not in references_on(node)
            assert before is not None
            # The engine removes the unpacked layers later.
            assert wait_until(lambda: _available(runtime) >= before.available_mib - 64)


def _available(runtime: DockerRuntime) -> int:
    disk = runtime.facts().disk
    return disk.available_mib if disk else 0


class TestCollection:
    """Image cleanup on a real engine, with a simulated clock."""

    @pytest.fixture
    def clock(self) -> "Clock":
        return Clock()

    @pytest.fixture
    def pulled(self, clock: "Clock") -> ImageUsage:
        return ImageUsage(clock=clock)

    @pytest.fixture
    def pulling(
        self, node: DockerNode, pulled: ImageUsage, registry: Registry, clock: "Clock"
    ) -> Iterator[Callable[[str], str]]:
        """A function that pulls an image by a start, removes the container, and advances the clock by 1 h."""
        with closing(runtime_on(node, disk=DiskSettings(usage=pulled, collector=KEEPS_ALL))) as runtime:

            def pull(name: str) -> str:
                image = registry.add_image(f"collect/{name}", extra_layers=1)
                started = start(runtime, assignment(image=image, command=None))
                runtime.kill(started)
                runtime.remove(started)
                clock.now += 3600
                return image

            yield pull

    def collector(
        self, node: DockerNode, pulled: ImageUsage, space: Callable[[], Space | None], **policy: Any
    ) -> ImageCollector:
        runtime = runtime_on(node)
        engine = runtime.disk.storage.engine
        return ImageCollector(engine, pulled, space, lambda: (), CollectorPolicy(**policy))

    def test_unused_images_are_removed_by_age(
        self, node: DockerNode, pulled: ImageUsage, pulling: Callable[[str], str], clock: "Clock"
    ) -> None:
        old, kept, used = pulling("old"), pulling("kept"), pulling("used")
        local = image_with(node, "local", ["ENV operator=1"])
        node.client.api.create_container(used)
        clock.now += 8 * 86_400
        young = pulling("young")
        keep = (f"{kept.rpartition(':')[0]}",)
        self.collector(node, pulled, lambda: None, keep=keep).sweep()
        assert old not in references_on(node)
        assert {kept, used, young, local} <= references_on(node)

    def test_under_pressure_the_longest_unused_are_removed_first(
        self, node: DockerNode, pulled: ImageUsage, pulling: Callable[[str], str]
    ) -> None:
        names = ["a", "b", "c", "d"]
        pulled_images = [pulling(name) for name in names]

        def space() -> Space:
            """As if each image used a fifth of the disk."""
            return Space(100, 100 - 20 * len(references_on(node).intersection(pulled_images)))

        self.collector(node, pulled, space, high_pct=90, low_pct=50).sweep()
        assert references_on(node).intersection(pulled_images) == set(pulled_images)
        self.collector(node, pulled, space, high_pct=80, low_pct=50).sweep()
        assert references_on(node).intersection(pulled_images) == set(pulled_images[2:])

    def test_a_recently_used_image_is_kept_under_any_pressure(
        self, node: DockerNode, pulled: ImageUsage, pulling: Callable[[str], str], clock: "Clock"
    ) -> None:
        image = pulling("recent")
        assert pulled.use(str(node.client.images.get(image).id))
        clock.now += 60
        collector = self.collector(node, pulled, partial(Space, 100, 0), high_pct=1, low_pct=0)
        collector.sweep(make_room=True)
        assert image in references_on(node)
        clock.now += 600
        collector.sweep(make_room=True)
        assert image not in references_on(node)

    def test_an_image_with_an_operators_tag_is_kept(
        self, node: DockerNode, pulled: ImageUsage, pulling: Callable[[str], str]
    ) -> None:
        image = pulling("tagged")
        node.client.api.tag(image, "mooring-test/operators", "1")
        self.collector(node, pulled, partial(Space, 100, 0), high_pct=1, low_pct=0).sweep()
        assert {image, "mooring-test/operators:1"} <= references_on(node)

    def test_an_image_that_the_operator_pulled_before_is_kept(
        self, node: DockerNode, pulled: ImageUsage, pulling: Callable[[str], str], registry: Registry
    ) -> None:
        image = registry.add_image("collect/before", extra_layers=1)
        node.client.api.pull(image)
        assert pulling("before") == image
        self.collector(node, pulled, partial(Space, 100, 0), high_pct=1, low_pct=0).sweep()
        assert image in references_on(node)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now
