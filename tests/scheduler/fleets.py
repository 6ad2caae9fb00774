"""Small fleets: factories for tables of cases, and strategies for property tests."""

from hypothesis import strategies as st

from mooring.scheduler.packing.potential import Potential, Target
from mooring.scheduler.packing.shapes import FleetNode, NodeClass, Shape
from mooring.scheduler.packing.share_values import free_milli_values
from mooring_client.schemas.spec import WHOLE_MILLI

BIG = NodeClass(96_000, 400_000, ("A",) * 8)
SMALL = NodeClass(16_000, 100_000, ("B", "B"))
MIXED = NodeClass(32_000, 200_000, ("B", "A", "B"))
PLAIN = NodeClass(8000, 32_000, ())
CLASSES = (BIG, SMALL, MIXED, PLAIN)


def node(name: str, node_class: NodeClass = SMALL, **changes: object) -> FleetNode:
    values: dict[str, object] = {
        "cpu_milli_free": node_class.cpu_milli,
        "memory_mib_free": node_class.memory_mib,
        "gpu_milli_free": (WHOLE_MILLI,) * len(node_class.models),
    }
    return FleetNode(name, node_class, **(values | changes))  # type: ignore[arg-type]


def whole(gpus: int = 1, cpu_milli: int = 4000, memory_mib: int = 8000, **more: object) -> Shape:
    return Shape(gpus, WHOLE_MILLI, cpu_milli, memory_mib, **more)  # type: ignore[arg-type]


def share(milli: int, cpu_milli: int = 1000, memory_mib: int = 1000, **more: object) -> Shape:
    return Shape(1, milli, cpu_milli, memory_mib, **more)  # type: ignore[arg-type]


def potential() -> Potential:
    """The potential of a mixed workload."""
    targets = [
        Target(share(160), 0.1, 0.1),
        Target(share(470, 3000), 0.1, 0.1),
        Target(whole(), 0.05, 0.1),
        Target(whole(2, models=frozenset({"A"})), 0.05, 0.05),
        Target(Shape(1, WHOLE_MILLI, None, None), 0.1, 0.1),
    ]
    return Potential(targets, free_milli_values({160: 1.0, 470: 4.0, 810: 2.0}), 1.0)


cpus = st.sampled_from((None, 0, 1000, 3000, 8000, 20_000))
memories = st.sampled_from((None, 0, 4000, 30_000))
models = st.sampled_from((frozenset[str](), frozenset({"A"}), frozenset({"B"}), frozenset({"A", "B"})))
owners = st.sampled_from(("", "p", "q"))
shapes = st.one_of(
    st.builds(Shape, st.sampled_from((1, 2, 3, 8)), st.just(WHOLE_MILLI), cpus, memories, models),
    st.builds(Shape, st.just(1), st.sampled_from((50, 160, 470, 500, 810)), cpus, memories, models, owners),
    st.builds(Shape, st.just(0), st.just(0), st.sampled_from((500, 9000)), st.sampled_from((0, 9000))),
)
fleets = st.lists(st.sampled_from(CLASSES), min_size=1, max_size=6).map(
    lambda classes: [node(f"n{number}", each) for number, each in enumerate(classes)]
)
