"""Which GPUs a reservation gets, and the earliest start time."""

from dataclasses import replace
from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooring.scheduler.model import GpuAllocation, NodeView, ReservedPeriod, Running
from mooring.scheduler.reservations import ReservationSpec, choose, earliest, reservable_gpus
from mooring_client.schemas.nodes import NodeState
from tests.scheduler.clusters import A10, H100, cube_mesh, gpus, h100s, node, request

DAY = 86_400.0


def new_spec(count: int, begin: float = DAY, end: float = 2 * DAY, **gpu: Any) -> ReservationSpec:
    return ReservationSpec(request(count, project_id="own", **gpu), begin, end, now=0.0, overhead_s=0.0)


def running(view: NodeView, places: range, ends_at: float | None, project: str = "other") -> NodeView:
    """The node with an instance on some of its GPUs."""
    uuids = [view.gpus[place].uuid for place in places]
    instance = Running(
        f"on-{uuids[0]}", project, tuple(map(GpuAllocation, uuids)), 0, 0, 50, preemptible=False, since=0.0,
        ends_at=ends_at,
    )  # fmt: skip
    views = tuple(replace(gpu, milli_free=0) if gpu.uuid in uuids else gpu for gpu in view.gpus)
    return replace(view, gpus=views, running=(*view.running, instance))


def reserve(view: NodeView, places: range, begin: float, end: float, reservation: str = "r") -> NodeView:
    """The node with a reservation of another project on some of its GPUs."""
    period = ReservedPeriod(reservation, "other", begin, end)
    uuids = {view.gpus[place].uuid for place in places}
    views = tuple(
        replace(gpu, reserved=(*gpu.reserved, period)) if gpu.uuid in uuids else gpu for gpu in view.gpus
    )
    return replace(view, gpus=views)


def chosen(nodes: list[NodeView], spec: ReservationSpec, **more: Any) -> list[str] | None:
    found = choose(reservable_gpus(nodes, spec), spec, **more)
    return None if found is None else sorted(found)


def test_one_node_if_possible_the_smallest_that_suffices() -> None:
    small = node("n2", gpus(H100, 4, on="n2"))
    assert chosen([h100s("n1"), small], new_spec(4)) == [f"GPU-n2-{place}" for place in range(4)]
    assert chosen([h100s("n1"), small], new_spec(2)) == ["GPU-n2-0", "GPU-n2-1"]


def test_as_few_nodes_as_possible() -> None:
    nodes = [node("n1", gpus(H100, 2, on="n1")), h100s("n2"), node("n3", gpus(H100, 4, on="n3"))]
    found = chosen(nodes, new_spec(11)) or []
    assert {uuid.split("-")[1] for uuid in found} == {"n2", "n3"}


def test_well_connected_gpus_are_preferred() -> None:
    quads = node("n1", gpus("Tesla V100-SXM2-32GB", 8, lanes=cube_mesh))
    found = chosen([quads], new_spec(4)) or []
    assert found in ([f"GPU-n1-{place}" for place in quad] for quad in (range(4), range(4, 8)))


@pytest.mark.parametrize(
    ("ends_at", "places"), [(DAY - 1, range(8)), (DAY + 1, range(4, 8)), (None, range(4, 8))]
)
def test_instances_that_end_before_the_reservation_do_not_block_gpus(
    ends_at: float | None, places: range
) -> None:
    busy = running(h100s("n1"), range(4), ends_at)
    reservable = reservable_gpus([busy], new_spec(8))
    assert reservable.most() == len(places)


def test_instances_of_the_project_do_not_block_gpus() -> None:
    assert reservable_gpus([running(h100s("n1"), range(8), None, "own")], new_spec(8)).most() == 8


def test_overdue_instances_block_gpus() -> None:
    stuck = running(h100s("n1"), range(8), -10.0)
    assert reservable_gpus([stuck], new_spec(8)).most() == 0


@pytest.mark.parametrize(
    ("begin", "end", "most"),
    [(0, DAY, 8), (2 * DAY, 3 * DAY, 8), (0, DAY + 1, 5), (DAY + 10, DAY + 20, 5), (2 * DAY - 1, 3 * DAY, 5)],
)
def test_reservations_do_not_overlap(begin: float, end: float, most: int) -> None:
    assert reservable_gpus([reserve(h100s("n1"), range(3), begin, end)], new_spec(8)).most() == most


def test_a_reservation_does_not_conflict_with_itself() -> None:
    view = reserve(h100s("n1"), range(8), DAY, 2 * DAY, "me")
    assert reservable_gpus([view], new_spec(8), ignored_id="me").most() == 8
    spec = new_spec(8, end=3 * DAY)
    assert chosen([view], spec) is None


def test_unhealthy_and_unsuitable_gpus_are_left_out() -> None:
    quarantined = node("n1", gpus(H100, 4, quarantined=(0,)))
    cordoned = node("n2", gpus(H100, 4, on="n2"), state=NodeState.CORDONED)
    mig = node("n3", tuple(replace(gpu, mig_enabled=True) for gpu in gpus(H100, 4, on="n3")))
    other = node("n4", gpus(A10, 4, on="n4"))
    spec = new_spec(4, gpu_models=("H100",))
    assert reservable_gpus([quarantined, cordoned, mig, other], spec).most() == 3


def test_models_are_tried_in_the_requested_order_and_never_mixed() -> None:
    nodes = [node("n1", gpus(A10, 4)), node("n2", gpus(H100, 2, on="n2"))]
    either_model = new_spec(2, gpu_models=("H100", "A10"))
    assert chosen(nodes, either_model) == ["GPU-n2-0", "GPU-n2-1"]
    assert {uuid[:6] for uuid in chosen(nodes, new_spec(3, gpu_models=("H100", "A10"))) or ()} == {"GPU-n1"}
    assert chosen(nodes, new_spec(5)) is None


def test_a_changed_reservation_keeps_its_gpus() -> None:
    nodes = [h100s("n1"), h100s("n2")]
    own = ["GPU-n2-6", "GPU-n2-7"]
    assert chosen(nodes, new_spec(2), kept=own) == own
    found = chosen(nodes, new_spec(4), kept=own) or []
    assert set(own) < set(found)
    assert {uuid.split("-")[1] for uuid in found} == {"n2"}


def test_a_changed_reservation_keeps_its_gpus_while_their_node_is_unreachable() -> None:
    silent = replace(h100s("n1"), state=NodeState.UNREACHABLE)
    kept = ["GPU-n1-0", "GPU-n1-1"]
    reservable = reservable_gpus([silent, h100s("n2")], new_spec(3), always=kept)
    assert set(kept) < set(choose(reservable, new_spec(3), kept) or ())


def test_the_earliest_start_is_when_the_last_needed_gpu_is_free() -> None:
    busy = running(running(h100s("n1"), range(4), 3 * DAY), range(4, 6), 4 * DAY)
    assert earliest([busy], new_spec(2)) == DAY
    assert earliest([busy], new_spec(3)) == 3 * DAY
    assert earliest([busy], new_spec(7)) == 4 * DAY
    assert earliest([running(busy, range(6, 8), None)], new_spec(8)) is None
    assert earliest([busy], new_spec(9)) is None


def test_the_earliest_start_is_in_a_long_enough_gap() -> None:
    view = reserve(reserve(h100s("n1"), range(8), DAY, 2 * DAY, "a"), range(8), 2.5 * DAY, 3 * DAY, "b")
    assert earliest([view], new_spec(1)) == 3 * DAY
    assert earliest([view], new_spec(1, end=1.4 * DAY)) == 2 * DAY


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
    for number, (begin, duration_s) in enumerate(periods):
        view = reserve(view, range(number, 4), begin, begin + duration_s, f"r{number}")
    for place, end in enumerate(ends):
        view = running(view, range(place, place + 1), end)
    spec = new_spec(count)
    first = earliest([view], spec)
    if first is None:
        assert sum(end is not None for end in ends) < count
        return
    later = replace(spec, from_at=first, to_at=first + spec.duration_s)
    assert chosen([view], later) is not None
    times = {
        spec.from_at,
        *(end for end in ends if end),
        *(begin + duration_s for begin, duration_s in periods),
    }
    for time in sorted(times - {inf}):
        if spec.from_at <= time < first:
            assert chosen([view], replace(spec, from_at=time, to_at=time + spec.duration_s)) is None
