"""Who is asked for an image, by the order in which it came to the node."""

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


def pulled(private: PrivateImages, source: str, *names: str, was_there: bool = False) -> None:
    """With credentials, from the first thought to the end."""
    private.add_repository(source.rpartition("@")[0])
    private.add(X, [source, *names], source, was_there=was_there, credentials=True)


def test_an_image_that_nobody_needed_credentials_for_is_free(private: PrivateImages) -> None:
    assert private.sources(X, [A]) == ()
    private.add(X, [A], A, was_there=False, credentials=False)
    assert private.sources(X, [A]) == ()


def test_where_it_came_from_is_asked_and_no_agent_forgets_it(
    private: PrivateImages, state: StateDirectory
) -> None:
    pulled(private, A)
    for known in (private, PrivateImages.of_node(state)):
        assert known.sources(X, [A]) == (A,)
        assert known.sources(X, []) == (A,)  # also when no name is left of it


def test_a_pull_that_nobody_saw_the_end_of(private: PrivateImages) -> None:
    private.add_repository("r.example/a/x")
    assert private.sources(X, [A, "r.example/b@sha256:1"]) == (A,)


@pytest.mark.parametrize("credentials", [True, False])
def test_who_names_it_later_is_no_source(private: PrivateImages, *, credentials: bool) -> None:
    pulled(private, A)
    private.add_repository("evil.example/x")
    private.add(X, [A, EVIL], EVIL, was_there=True, credentials=credentials)
    assert private.sources(X, [A, EVIL]) == (A,)


@pytest.mark.parametrize("credentials", [True, False])
def test_nor_who_names_it_before_the_first_pull_has_been_seen_to_end(
    private: PrivateImages, *, credentials: bool
) -> None:
    private.add_repository("r.example/a/x")
    private.add_repository("evil.example/x")
    private.add(X, [A, EVIL], EVIL, was_there=False, credentials=credentials)
    assert private.sources(X, [A, EVIL]) == (A,)
    pulled(private, A, EVIL)
    assert private.sources(X, [A, EVIL]) == (A,)


def test_what_was_there_for_all_stays_free(private: PrivateImages) -> None:
    pulled(private, A, was_there=True)
    assert private.sources(X, [A]) == ()


def test_a_source_that_gives_it_to_anybody_makes_it_free(private: PrivateImages) -> None:
    pulled(private, A)
    private.add(X, [A], A, was_there=True, credentials=False)
    assert private.sources(X, [A]) == ()
    pulled(private, A, was_there=True)
    assert private.sources(X, [A]) == ()


def test_a_damaged_file_is_not_taken_for_an_empty_one(private: PrivateImages, state: StateDirectory) -> None:
    pulled(private, A)
    state.write("private_images", b'{"repositories": 3}')
    with pytest.raises(StateError, match="private_images"):
        PrivateImages.of_node(state)


def test_only_the_agent_reads_its_file(private: PrivateImages, tmp_path: Path) -> None:
    pulled(private, A)
    assert (tmp_path / "private_images").stat().st_mode & 0o077 == 0
