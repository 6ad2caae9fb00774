"""Which GPUs a reservation gets, and the earliest start time."""

from dataclasses import replace
from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooring.core.node import NodeState
from mooring.scheduler.model import GpuAllocation, NodeView, ReservedPeriod, Running
from mooring.scheduler.reservations import ReservationSpec, choose, earliest, reservable_gpus
from tests.scheduler.clusters import A10, H100, cube_mesh, gpus, h100s, node, request

DAY = 86_400.0


def asked(count: int, begin: float = DAY, end: float = 2 * DAY, **gpu: Any) -> ReservationSpec:
    return ReservationSpec(request(count, project_id="mine", **gpu), begin, end, now=0.0, overhead_s=0.0)


def running(view: NodeView, places: range, ends_at: float | None, project: str = "other") -> NodeView:
    """The node with an instance on some of its GPUs."""
    uuids = [view.gpus[place].uuid for place in places]
    held = Running(
        f"on-{uuids[0]}", project, tuple(map(GpuAllocation, uuids)), 0, 0, 50, preemptible=False, since=0.0,
        ends_at=ends_at,
    )  # fmt: skip
    views = tuple(replace(gpu, milli_free=0) if gpu.uuid in uuids else gpu for gpu in view.gpus)
    return replace(view, gpus=views, running=(*view.running, held))


def held(view: NodeView, places: range, begin: float, end: float, reservation: str = "r") -> NodeView:
    period = ReservedPeriod(reservation, "other", begin, end)
    uuids = {view.gpus[place].uuid for place in places}
    views = tuple(
        replace(gpu, reserved=(*gpu.reserved, period)) if gpu.uuid in uuids else gpu for gpu in view.gpus
    )
    return replace(view, gpus=views)


def chosen(nodes: list[NodeView], what: ReservationSpec, **more: Any) -> list[str] | None:
    found = choose(reservable_gpus(nodes, what), what, **more)
    return None if found is None else sorted(found)


def test_one_node_if_possible_the_fullest_first() -> None:
    small = node("n2", gpus(H100, 4, on="n2"))
    assert chosen([h100s("n1"), small], asked(4)) == [f"GPU-n2-{place}" for place in range(4)]
    assert chosen([h100s("n1"), small], asked(2)) == ["GPU-n2-0", "GPU-n2-1"]


def test_as_few_nodes_as_possible() -> None:
    nodes = [node("n1", gpus(H100, 2, on="n1")), h100s("n2"), node("n3", gpus(H100, 4, on="n3"))]
    found = chosen(nodes, asked(11)) or []
    assert {uuid.split("-")[1] for uuid in found} == {"n2", "n3"}


def test_well_connected_gpus_are_preferred() -> None:
    quads = node("n1", gpus("Tesla V100-SXM2-32GB", 8, lanes=cube_mesh))
    found = chosen([quads], asked(4)) or []
    assert found in ([f"GPU-n1-{place}" for place in quad] for quad in (range(4), range(4, 8)))


@pytest.mark.parametrize(
    ("ends_at", "places"), [(DAY - 1, range(8)), (DAY + 1, range(4, 8)), (None, range(4, 8))]
)
def test_instances_that_end_before_do_not_block_gpus(ends_at: float | None, places: range) -> None:
    busy = running(h100s("n1"), range(4), ends_at)
    there = reservable_gpus([busy], asked(8))
    assert there.most() == len(places)


def test_instances_of_the_project_do_not_block_gpus() -> None:
    assert reservable_gpus([running(h100s("n1"), range(8), None, "mine")], asked(8)).most() == 8


def test_overdue_instances_block_gpus() -> None:
    stuck = running(h100s("n1"), range(8), -10.0)
    assert reservable_gpus([stuck], asked(8)).most() == 0


@pytest.mark.parametrize(
    ("begin", "end", "most"),
    [(0, DAY, 8), (2 * DAY, 3 * DAY, 8), (0, DAY + 1, 5), (DAY + 10, DAY + 20, 5), (2 * DAY - 1, 3 * DAY, 5)],
)
def test_reservations_do_not_overlap(begin: float, end: float, most: int) -> None:
    assert reservable_gpus([held(h100s("n1"), range(3), begin, end)], asked(8)).most() == most


def test_a_reservation_does_not_conflict_with_itself() -> None:
    there = held(h100s("n1"), range(8), DAY, 2 * DAY, "me")
    assert reservable_gpus([there], asked(8), but="me").most() == 8
    what = asked(8, end=3 * DAY)
    assert chosen([there], what) is None


def test_unhealthy_and_unsuitable_gpus_are_left_out() -> None:
    quarantined = node("n1", gpus(H100, 4, quarantined=(0,)))
    cordoned = node("n2", gpus(H100, 4, on="n2"), state=NodeState.CORDONED)
    mig = node("n3", tuple(replace(gpu, mig_enabled=True) for gpu in gpus(H100, 4, on="n3")))
    other = node("n4", gpus(A10, 4, on="n4"))
    what = asked(4, gpu_models=("H100",))
    assert reservable_gpus([quarantined, cordoned, mig, other], what).most() == 3


def test_models_are_tried_in_the_requested_order_and_never_mixed() -> None:
    nodes = [node("n1", gpus(A10, 4)), node("n2", gpus(H100, 2, on="n2"))]
    both = asked(2, gpu_models=("H100", "A10"))
    assert chosen(nodes, both) == ["GPU-n2-0", "GPU-n2-1"]
    assert {uuid[:6] for uuid in chosen(nodes, asked(3, gpu_models=("H100", "A10"))) or ()} == {"GPU-n1"}
    assert chosen(nodes, asked(5)) is None


def test_it_keeps_its_gpus() -> None:
    nodes = [h100s("n1"), h100s("n2")]
    mine = ["GPU-n2-6", "GPU-n2-7"]
    assert chosen(nodes, asked(2), kept=mine) == mine
    found = chosen(nodes, asked(4), kept=mine) or []
    assert set(mine) < set(found)
    assert {uuid.split("-")[1] for uuid in found} == {"n2"}


def test_it_keeps_its_gpus_while_their_node_is_unreachable() -> None:
    silent = replace(h100s("n1"), state=NodeState.UNREACHABLE)
    kept = ["GPU-n1-0", "GPU-n1-1"]
    there = reservable_gpus([silent, h100s("n2")], asked(3), always=kept)
    assert set(kept) < set(choose(there, asked(3), kept) or ())


def test_the_earliest_start_is_when_the_last_needed_gpu_is_free() -> None:
    busy = running(running(h100s("n1"), range(4), 3 * DAY), range(4, 6), 4 * DAY)
    assert earliest([busy], asked(2)) == DAY
    assert earliest([busy], asked(3)) == 3 * DAY
    assert earliest([busy], asked(7)) == 4 * DAY
    assert earliest([running(busy, range(6, 8), None)], asked(8)) is None
    assert earliest([busy], asked(9)) is None


def test_the_earliest_start_is_in_a_long_enough_gap() -> None:
    there = held(held(h100s("n1"), range(8), DAY, 2 * DAY, "a"), range(8), 2.5 * DAY, 3 * DAY, "b")
    assert earliest([there], asked(1)) == 3 * DAY
    assert earliest([there], asked(1, end=1.4 * DAY)) == 2 * DAY


_TIMES = st.floats(0, 6 * DAY)


@given(
    st.lists(st.tuples(_TIMES, _TIMES), max_size=4),
    st.lists(st.one_of(st.none(), _TIMES), min_size=4, max_size=4),
    st.integers(1, 4),
)
def test_enough_gpus_from_the_earliest_start_on_and_too_few_before(
    periods: list[tuple[float, float]], ends: list[float | None], count: int
) -> None:
    view = node("n1", gpus(H100, 4))
    for number, (begin, lasts) in enumerate(periods):
        view = held(view, range(number, 4), begin, begin + lasts, f"r{number}")
    for place, end in enumerate(ends):
        view = running(view, range(place, place + 1), end)
    what = asked(count)
    first = earliest([view], what)
    if first is None:
        assert sum(end is not None for end in ends) < count
        return
    later = replace(what, from_at=first, to_at=first + what.lasts_s)
    assert chosen([view], later) is not None
    times = {what.from_at, *(end for end in ends if end), *(begin + lasts for begin, lasts in periods)}
    for time in sorted(times - {inf}):
        if what.from_at <= time < first:
            assert chosen([view], replace(what, from_at=time, to_at=time + what.lasts_s)) is None
