"""`Demand` follows the mix of requests, forgets old ones, and uses bounded memory."""

import numpy as np

from mooring.scheduler.packing import demand as module
from mooring.scheduler.packing.demand import Demand, potential_for
from mooring.scheduler.packing.fleet import Fleet
from mooring.scheduler.packing.shapes import Shape
from mooring.scheduler.packing.states import States
from tests.scheduler.fleets import BIG, node, share, whole


def add_all(demand: Demand, shape: Shape, times: int) -> list[bool]:
    return [demand.add(shape) for _ in range(times)]


def fills_the_smaller_free_part(demand: Demand) -> bool:
    """Whether a share of 190 is placed on the GPU with 190 free, and not where one of 470 would fit."""
    fleet = Fleet([node("a", BIG, gpu_milli_free=(190, 660, *[0] * 6))], demand.potential)
    move = fleet.best(share(190))
    assert move is not None
    return move.gpus == (0,)


def test_demand_learns_the_value_of_free_parts() -> None:
    demand = Demand()
    add_all(demand, share(470), 100)
    assert fills_the_smaller_free_part(demand)


def test_the_potential_stays_while_the_mix_of_requests_does() -> None:
    demand = Demand()
    add_all(demand, whole(), 50)
    before = demand.potential
    assert not any(add_all(demand, whole(), 5000))
    assert demand.potential is before
    assert any(add_all(demand, share(470), 5000))
    assert demand.potential is not before


def test_memory_and_owner_make_no_difference() -> None:
    varied, uniform = Demand(), Demand()
    changes = [varied.add(share(470, memory_mib=number, owner="p")) for number in range(200)]
    assert sum(changes) == 1
    assert add_all(uniform, share(470), 200) == changes


def test_old_requests_decay() -> None:
    demand = Demand()
    add_all(demand, share(810), 500)
    add_all(demand, whole(), 9 * module.HALF_LIFE)
    assert demand.count(share(810)) < 500 / 2**8


def test_the_number_of_counts_is_bounded() -> None:
    demand = Demand()
    for number in range(3 * module.MAX_KNOWN):
        demand.add(whole(cpu_milli=number))
    assert demand.known <= 2 * module.MAX_KNOWN


def test_small_requests_weigh_more_than_frequent_ones() -> None:
    """There are CPUs for shares of 100, but not for those of 500, which are ten times as frequent."""
    potential = potential_for({share(100, 1000): 1.0, share(500, 8000): 10.0})
    states = States(np.zeros(2, np.int64), np.array([0, 6000]), np.array([[600], [600]]))
    waste = potential.of(states, potential.needs([BIG]))
    neither, small_only = waste.tolist()
    assert small_only < 0.5 * neither


def test_equal_counts_give_equal_potentials() -> None:
    shapes = [share(160), share(470), whole(), whole(8), Shape(0, 0, 1000, 0)]
    counts = {shape: float(number + 1) for number, shape in enumerate(shapes)}
    backwards = dict(reversed(counts.items()))
    nodes = [node(f"n{number}", BIG, gpu_milli_free=(1000, 530, *[0] * 6)) for number in range(3)]
    forwards, reversed_ = Fleet(nodes, potential_for(counts)), Fleet(nodes, potential_for(backwards))
    for shape in shapes:
        assert forwards.ranked(shape, 9) == reversed_.ranked(shape, 9)
