"""Timeouts of pulls, and which pulls yield to others."""

from contextlib import ExitStack

import pytest

from mooring.agent.images.pull_pace import Deadline, LayerStates, PullTimeouts, RunningPulls
from mooring.agent.runtime import StartDelayed, StartRefused

MIB = 2**20


def states(**layers: str | tuple[str, int]) -> LayerStates:
    """Return layers with these states, and with the bytes downloaded."""
    made = LayerStates()
    for layer, state in layers.items():
        status, current = (state, 0) if isinstance(state, str) else state
        made.update(layer, "Pulling fs layer", {})
        made.update(layer, status, {"current": current, "total": 100 * MIB})
    return made


def test_a_pull_without_progress_fails() -> None:
    deadline, layers = Deadline(PullTimeouts(10, 100), 0), states(a=("Downloading", 0))
    assert deadline.exceeded(layers, 9.9) is None
    assert "less than 1 MiB" in str(deadline.exceeded(layers, 10))


def test_a_trickle_is_not_progress() -> None:
    deadline, layers = Deadline(PullTimeouts(10, 1000), 0), states(a=("Downloading", 0))
    for now in range(1, 10):
        layers.update("a", "Downloading", {"current": now * 1000})
        assert deadline.exceeded(layers, now) is None
    layers.update("a", "Downloading", {"current": 10_000})
    assert deadline.exceeded(layers, 10) is not None


def test_bytes_completed_layers_and_unpacking_are_progress() -> None:
    deadline, layers = Deadline(PullTimeouts(10, 1000), 0), states(a=("Downloading", 0), b="Waiting")
    steps: list[tuple[str, str, dict[str, object]]] = [
        ("a", "Downloading", {"current": MIB}),
        ("a", "Downloading", {"current": 2 * MIB}),
        ("a", "Download complete", {}),
        ("a", "Extracting", {"current": 5 * MIB}),
        ("a", "Extracting", {"current": 1, "units": "s"}),
        ("a", "Pull complete", {}),
        ("b", "Downloading", {"current": MIB}),
    ]
    for number, step in enumerate(steps, 1):
        layers.update(*step)
        assert deadline.exceeded(layers, 9.0 * number) is None, step
    assert deadline.exceeded(layers, 9.0 * len(steps) + 10) is not None


def test_a_pull_fails_after_the_total_timeout() -> None:
    deadline, layers = Deadline(PullTimeouts(10, 20), 0), states(a=("Downloading", 0))
    for now in range(1, 20):
        layers.update("a", "Downloading", {"current": now * MIB})
        assert deadline.exceeded(layers, now) is None
    layers.update("a", "Downloading", {"current": 20 * MIB})
    assert "not complete after 20 s" in str(deadline.exceeded(layers, 20))


def test_a_starved_pull_has_a_longer_timeout() -> None:
    deadline, layers = Deadline(PullTimeouts(10, 1000), 0), states(a="Waiting", b="Download complete")
    layers.steps = 0
    assert layers.starved
    assert deadline.exceeded(layers, 49.9) is None
    assert deadline.exceeded(layers, 50) is not None


@pytest.mark.parametrize(
    "status", ["Downloading", "Extracting", "Verifying Checksum", "Retrying in 5 seconds"]
)
def test_a_pull_with_a_layer_in_progress_is_not_starved(status: str) -> None:
    assert not states(a="Waiting", b=status).starved


def test_lines_about_the_whole_image_are_not_layers() -> None:
    layers = states(a="Pull complete")
    layers.update("1", "Pulling from a/b", {})
    layers.update("None", "Digest: sha256:1", {})
    assert layers.left == []


def yields(layers: LayerStates, others: dict[str, LayerStates], within_s: int) -> bool:
    """Return whether a pull with these layers is aborted in this time if no pull makes progress.

    Args:
        others: the layers of other pulls, by project.
    """
    running_pulls = RunningPulls(PullTimeouts(1000, 1000))
    with ExitStack() as running:
        other_pulls = {name: running.enter_context(running_pulls.add(name)) for name in others}
        pull = running.enter_context(running_pulls.add("attacker"))
        for second in range(within_s + 1):
            now = pull.deadline._began + second
            for name, other_layers in others.items():
                running_pulls.check(other_pulls[name], other_layers, name, now)
            try:
                running_pulls.check(pull, layers, "x", now)
            except StartDelayed as delay:
                assert delay.reason.code == "pulling_image"
                return True
        return False


SLOW, WAITING = ("Downloading", 0), "Waiting"


def test_a_slow_pull_yields_to_a_starved_pull_of_another_project() -> None:
    slow, starving = states(a=SLOW, b=SLOW, c=SLOW), states(x=WAITING)
    assert not yields(slow, {"victim": starving}, 14)
    assert yields(slow, {"victim": starving}, 20)


def test_a_pull_does_not_yield_without_a_starved_pull() -> None:
    slow, moving = states(a=SLOW), states(x=("Downloading", 0))
    assert not yields(slow, {}, 100)
    assert not yields(slow, {"victim": moving}, 100)


def test_a_fast_pull_does_not_yield() -> None:
    running_pulls = RunningPulls(PullTimeouts(1000, 1000))
    fast, starving = states(a=SLOW), states(x=WAITING)
    with running_pulls.add("other") as starved_pull, running_pulls.add("fast") as fast_pull:
        for second in range(100):
            now = fast_pull.deadline._began + second
            fast.update("a", "Downloading", {"current": second * 2 * MIB})
            running_pulls.check(starved_pull, starving, "x", now)
            running_pulls.check(fast_pull, fast, "a", now)


def test_a_downloading_pull_is_aborted_before_a_starved_one() -> None:
    starving, slow = states(x=WAITING), states(a=SLOW)
    running_pulls = RunningPulls(PullTimeouts(1000, 1000))
    with (
        running_pulls.add("first") as first,
        running_pulls.add("second") as second,
        running_pulls.add("third") as third,
        pytest.raises(StartDelayed, match="pulling the slow one"),
    ):
        for passed in range(100):
            now = third.deadline._began + passed  # the third pull was the last to begin
            running_pulls.check(first, starving, "1", now)
            running_pulls.check(third, starving, "3", now)
            running_pulls.check(second, slow, "the slow one", now)


def test_a_start_whose_pull_makes_no_progress_is_rejected() -> None:
    running_pulls = RunningPulls(PullTimeouts(5, 1000))
    with running_pulls.add("a") as pull, pytest.raises(StartRefused) as caught:
        for passed in range(10):
            running_pulls.check(pull, states(a=SLOW), "r.example.com/x:1", pull.deadline._began + passed)
    assert caught.value.reason.code == "image_pull_timeout"
