"""The agent's record of its pulls."""

from pathlib import Path

import pytest

from mooring.agent.images import pulled_images
from mooring.agent.images.pulled_images import FILE, PulledImages
from mooring.agent.sync.identity import StateDirectory, StateError

NAME = "docker.io/library/busybox@sha256:1"


def test_pulls_are_stored_across_restarts(tmp_path: Path) -> None:
    state = StateDirectory(tmp_path)
    PulledImages.of_node(state).add(NAME, "sha256:image", private=True)
    found = PulledImages.of_node(state).find(NAME, "sha256:image")
    assert found is not None
    assert found.private


def test_only_the_image_that_was_pulled_is_found() -> None:
    pulled = PulledImages()
    pulled.add(NAME, "sha256:image", private=False)
    assert pulled.find(NAME, "sha256:another") is None
    assert pulled.find("docker.io/library/other@sha256:1", "sha256:image") is None


def test_an_image_pulled_without_credentials_stays_public() -> None:
    pulled = PulledImages()
    pulled.add(NAME, "sha256:image", private=False)
    pulled.add(NAME, "sha256:image", private=True)
    found = pulled.find(NAME, "sha256:image")
    assert found is not None
    assert not found.private


def test_the_oldest_references_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulled_images, "_MAX_REFERENCES", 2)
    pulled = PulledImages()
    for number in range(3):
        pulled.add(f"r/{number}@sha256:1", "sha256:image", private=False)
    assert [pulled.find(f"r/{number}@sha256:1", "sha256:image") is None for number in range(3)] == [
        True,
        False,
        False,
    ]


def test_a_damaged_file_is_an_error(tmp_path: Path) -> None:
    StateDirectory(tmp_path).write(FILE, b"{")
    with pytest.raises(StateError, match=FILE):
        PulledImages.of_node(StateDirectory(tmp_path))
