"""Whether limits are enforced is tried on an engine; here one that says what the test has it say."""

from typing import Any

import pytest

from mooring.agent.docker_engine import Engine
from mooring.agent.docker_errors import EngineRefused
from mooring.agent.storage import PROBE_EVERY_S, PROBE_LABEL, DiskPolicy, Space, Storage, driver_of, space_of

INFO = {
    "ID": "a",
    "ServerVersion": "28.2.2",
    "DockerRootDir": "/var/lib/docker",
    "Driver": "overlay2",
    "DriverStatus": [["Backing Filesystem", "xfs"]],
}


class ScriptedEngine(Engine):
    """Answers creates by what it is told to think of a size; counts what is left on it."""

    def __init__(self, *refused: str) -> None:
        super().__init__({})
        self.refused = refused
        self.tried: list[str] = []
        self.left: set[str] = set()

    def import_image(self, archive: bytes, reference: str) -> None:
        assert len(archive) >= 1024
        self.left.add(reference)

    def remove_image(self, reference: str) -> None:
        self.left.remove(reference)

    def create(self, config: dict[str, Any], name: str) -> str:
        size = config["HostConfig"]["StorageOpt"]["size"]
        assert config["Labels"].keys() == {PROBE_LABEL}
        self.tried.append(size)
        if size in self.refused:
            raise EngineRefused(500, f"invalid size: {size}")
        self.left.add(name)
        return name

    def remove(self, container: str, *, force: bool = False) -> None:
        self.left.remove(container)


@pytest.mark.parametrize(
    ("refused", "enforced"),
    [(("not-a-size",), True), ((), False), (("not-a-size", "1G"), False), (("1G",), False)],
)
def test_both_answers_make_a_limit(refused: tuple[str, ...], enforced: bool) -> None:
    engine = ScriptedEngine(*refused)
    limits = Storage(engine).limits(INFO)
    assert limits.enforced is enforced
    assert bool(limits.why_not) is not enforced
    assert engine.left == set()


def test_an_engine_that_ignores_the_option_enforces_nothing() -> None:
    limits = Storage(ScriptedEngine()).limits(INFO)
    assert (limits.enforced, limits.why_not) == (False, "the engine ignores the option")


def test_it_is_tried_again_after_a_while_and_after_a_change() -> None:
    now = [0.0]
    engine = ScriptedEngine("not-a-size")
    storage = Storage(engine, clock=lambda: now[0])
    for _ in range(3):
        storage.limits(INFO)
    assert len(engine.tried) == 2
    now[0] = PROBE_EVERY_S + 1
    storage.limits(INFO)
    assert len(engine.tried) == 4
    storage.limits(INFO | {"DriverStatus": [["Backing Filesystem", "extfs"]]})
    assert len(engine.tried) == 6
    storage.forget()
    storage.limits(INFO)
    assert len(engine.tried) == 8


def test_what_is_reported() -> None:
    space = Space(1_000_000, 123_456)
    storage = Storage(ScriptedEngine("not-a-size"), DiskPolicy(low_mib=123_457), lambda _root: space)
    facts = storage.facts(INFO, 640)
    assert facts is not None
    assert (facts.total_mib, facts.allocatable_mib, facts.available_mib) == (1_000_000, 800_000, 122_880)
    assert (facts.enforced, facts.pressure, facts.images_mib) == (True, True, 640)
    assert (facts.driver, facts.filesystem) == ("overlay2", "xfs")


def test_a_disk_that_cannot_be_seen_is_not_made_up() -> None:
    assert space_of("/nowhere/at/all") is None
    assert Storage(ScriptedEngine(), measure=lambda _root: None).facts(INFO, 0) is None


@pytest.mark.parametrize(
    ("info", "driver"),
    [
        ({"Driver": "btrfs", "DriverStatus": [["Build Version", "6"]]}, ("btrfs", "btrfs")),
        ({"Driver": "overlay2", "DriverStatus": [["Backing Filesystem", "extfs"]]}, ("overlay2", "extfs")),
        ({}, ("unknown", None)),
    ],
)
def test_the_driver_and_its_filesystem(info: dict[str, Any], driver: tuple[str, str | None]) -> None:
    assert driver_of(info) == driver
