"""The sources of an image, which control access to it, after different orders of pulls."""

from pathlib import Path

import pytest

from mooring.agent.images.private_images import PrivateImages
from mooring.agent.sync.identity import StateDirectory, StateError

X = "sha256:x"
A, EVIL = "r.example/a/x@sha256:1", "evil.example/x@sha256:1"


@pytest.fixture
def state(tmp_path: Path) -> StateDirectory:
    return StateDirectory(tmp_path)


@pytest.fixture
def private(state: StateDirectory) -> PrivateImages:
    return PrivateImages.of_node(state)


def pull(private: PrivateImages, source: str, *names: str, was_there: bool = False) -> None:
    """Record a complete pull with credentials."""
    private.add_repository(source.rpartition("@")[0])
    private.add(X, [source, *names], source, was_there=was_there, credentials=True)


def test_an_image_pulled_without_credentials_is_public(private: PrivateImages) -> None:
    assert private.sources(X, [A]) == ()
    private.add(X, [A], A, was_there=False, credentials=False)
    assert private.sources(X, [A]) == ()


def test_the_source_is_stored_across_restarts(private: PrivateImages, state: StateDirectory) -> None:
    pull(private, A)
    for known in (private, PrivateImages.of_node(state)):
        assert known.sources(X, [A]) == (A,)
        assert known.sources(X, []) == (A,)  # also after all its names are removed


def test_an_image_of_an_interrupted_pull_is_private(private: PrivateImages) -> None:
    private.add_repository("r.example/a/x")
    assert private.sources(X, [A, "r.example/b@sha256:1"]) == (A,)


@pytest.mark.parametrize("credentials", [True, False])
def test_a_later_pull_of_the_same_image_is_no_source(private: PrivateImages, *, credentials: bool) -> None:
    pull(private, A)
    private.add_repository("evil.example/x")
    private.add(X, [A, EVIL], EVIL, was_there=True, credentials=credentials)
    assert private.sources(X, [A, EVIL]) == (A,)


@pytest.mark.parametrize("credentials", [True, False])
def test_a_pull_during_an_interrupted_first_pull_is_no_source(
    private: PrivateImages, *, credentials: bool
) -> None:
    private.add_repository("r.example/a/x")
    private.add_repository("evil.example/x")
    private.add(X, [A, EVIL], EVIL, was_there=False, credentials=credentials)
    assert private.sources(X, [A, EVIL]) == (A,)
    pull(private, A, EVIL)
    assert private.sources(X, [A, EVIL]) == (A,)


def test_a_public_image_stays_public(private: PrivateImages) -> None:
    pull(private, A, was_there=True)
    assert private.sources(X, [A]) == ()


def test_a_source_without_credentials_makes_the_image_public(private: PrivateImages) -> None:
    pull(private, A)
    private.add(X, [A], A, was_there=True, credentials=False)
    assert private.sources(X, [A]) == ()
    pull(private, A, was_there=True)
    assert private.sources(X, [A]) == ()


def test_a_damaged_file_is_an_error(private: PrivateImages, state: StateDirectory) -> None:
    pull(private, A)
    state.write("private_images", b'{"repositories": 3}')
    with pytest.raises(StateError, match="private_images"):
        PrivateImages.of_node(state)


def test_the_file_is_readable_only_by_its_owner(private: PrivateImages, tmp_path: Path) -> None:
    pull(private, A)
    assert (tmp_path / "private_images").stat().st_mode & 0o077 == 0
