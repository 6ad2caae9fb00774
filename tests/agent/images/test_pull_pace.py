"""How long a pull may take, and which one gives way."""

from contextlib import ExitStack

import pytest

from mooring.agent.images.pull_pace import Deadline, LayerStates, PullTimeouts, RunningPulls
from mooring.agent.runtime import StartDelayed, StartRefused

MIB = 2**20


def states(**layers: str | tuple[str, int]) -> LayerStates:
    """Each layer with its state, and the bytes of it that have come."""
    made = LayerStates()
    for layer, state in layers.items():
        status, current = (state, 0) if isinstance(state, str) else state
        made.update(layer, "Pulling fs layer", {})
        made.update(layer, status, {"current": current, "total": 100 * MIB})
    return made


def test_a_pull_ends_that_makes_no_progress() -> None:
    deadline, layers = Deadline(PullTimeouts(10, 100), 0), states(a=("Downloading", 0))
    assert deadline.exceeded(layers, 9.9) is None
    assert "less than 1 MiB" in str(deadline.exceeded(layers, 10))


def test_a_trickle_is_no_progress() -> None:
    deadline, layers = Deadline(PullTimeouts(10, 1000), 0), states(a=("Downloading", 0))
    for now in range(1, 10):
        layers.update("a", "Downloading", {"current": now * 1000})
        assert deadline.exceeded(layers, now) is None
    layers.update("a", "Downloading", {"current": 10_000})
    assert deadline.exceeded(layers, 10) is not None


def test_bytes_finished_layers_and_unpacking_are_progress() -> None:
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


def test_a_pull_ends_that_takes_too_long_altogether() -> None:
    deadline, layers = Deadline(PullTimeouts(10, 20), 0), states(a=("Downloading", 0))
    for now in range(1, 20):
        layers.update("a", "Downloading", {"current": now * MIB})
        assert deadline.exceeded(layers, now) is None
    layers.update("a", "Downloading", {"current": 20 * MIB})
    assert "not complete after 20 s" in str(deadline.exceeded(layers, 20))


def test_waiting_for_others_is_forgiven_for_longer() -> None:
    deadline, layers = Deadline(PullTimeouts(10, 1000), 0), states(a="Waiting", b="Download complete")
    layers.steps = 0
    assert layers.starved
    assert deadline.exceeded(layers, 49.9) is None
    assert deadline.exceeded(layers, 50) is not None


@pytest.mark.parametrize(
    "status", ["Downloading", "Extracting", "Verifying Checksum", "Retrying in 5 seconds"]
)
def test_who_works_on_a_layer_does_not_starve(status: str) -> None:
    assert not states(a="Waiting", b=status).starved


def test_the_lines_about_the_whole_image_are_of_no_layer() -> None:
    layers = states(a="Pull complete")
    layers.update("1", "Pulling from a/b", {})
    layers.update("None", "Digest: sha256:1", {})
    assert layers.left == []


def gives_way(layers: LayerStates, among: dict[str, LayerStates], within_s: int) -> bool:
    """Whether a pull of `attacker` is broken off in that time, while all stand where they stand."""
    running_pulls = RunningPulls(PullTimeouts(1000, 1000))
    with ExitStack() as running:
        others = {name: running.enter_context(running_pulls.add(name)) for name in among}
        puller = running.enter_context(running_pulls.add("attacker"))
        for second in range(within_s + 1):
            now = puller.deadline._began + second
            for name, standing in among.items():
                running_pulls.check(others[name], standing, name, now)
            try:
                running_pulls.check(puller, layers, "x", now)
            except StartDelayed as delay:
                assert delay.reason.code == "pulling_image"
                return True
        return False


SLOW, WAITING = ("Downloading", 0), "Waiting"


def test_a_slow_pull_gives_way_to_another_projects_that_waits() -> None:
    slow, starving = states(a=SLOW, b=SLOW, c=SLOW), states(x=WAITING)
    assert not gives_way(slow, {"victim": starving}, 14)
    assert gives_way(slow, {"victim": starving}, 20)


def test_a_pull_gives_way_to_none_of_its_own_project_and_to_none_that_moves() -> None:
    slow, moving = states(a=SLOW), states(x=("Downloading", 0))
    assert not gives_way(slow, {}, 100)
    assert not gives_way(slow, {"victim": moving}, 100)


def test_a_fast_pull_does_not_give_way() -> None:
    running_pulls = RunningPulls(PullTimeouts(1000, 1000))
    fast, starving = states(a=SLOW), states(x=WAITING)
    with running_pulls.add("other") as waits, running_pulls.add("fast") as runs:
        for second in range(100):
            now = runs.deadline._began + second
            fast.update("a", "Downloading", {"current": second * 2 * MIB})
            running_pulls.check(waits, starving, "x", now)
            running_pulls.check(runs, fast, "a", now)


def test_a_pull_that_waits_is_spared_while_one_that_holds_layers_can_go() -> None:
    starving, slow = states(x=WAITING), states(a=SLOW)
    running_pulls = RunningPulls(PullTimeouts(1000, 1000))
    with (
        running_pulls.add("first") as first,
        running_pulls.add("second") as second,
        running_pulls.add("third") as third,
        pytest.raises(StartDelayed, match="pulling the slow one"),
    ):
        for passed in range(100):
            now = third.deadline._began + passed  # the last to join
            running_pulls.check(first, starving, "1", now)
            running_pulls.check(third, starving, "3", now)
            running_pulls.check(second, slow, "the slow one", now)


def test_what_never_ends_is_refused() -> None:
    running_pulls = RunningPulls(PullTimeouts(5, 1000))
    with running_pulls.add("a") as puller, pytest.raises(StartRefused) as caught:
        for passed in range(10):
            running_pulls.check(puller, states(a=SLOW), "r.example.com/x:1", puller.deadline._began + passed)
    assert caught.value.reason.code == "image_pull_timeout"
