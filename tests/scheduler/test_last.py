"""GPUs with a warning (`GpuView.last`) are used exactly if nothing else fits."""

from dataclasses import replace

from mooring.scheduler.model import GpuView, MigView, PlanTime, ReservedPeriod
from tests.scheduler.clusters import A10, AT, H100, cube_mesh, gpus, node, place_one, request


def _warned(gpu_views: tuple[GpuView, ...], *places: int) -> tuple[GpuView, ...]:
    return tuple(replace(gpu, last=place in places) for place, gpu in enumerate(gpu_views))


def test_on_one_node_gpus_without_a_warning_come_first() -> None:
    view = node("n1", _warned(gpus(H100, 4, lanes=cube_mesh), 0, 1))
    for count, allowed in ((1, {2, 3}), (2, {2, 3}), (3, {0, 1, 2, 3}), (4, {0, 1, 2, 3})):
        placed = place_one([view], request(count), AT)
        assert placed is not None
        assert len(placed.gpu_uuids) == count
        assert set(placed.gpu_uuids) <= {f"GPU-n1-{place}" for place in allowed}


def test_another_node_goes_first_even_if_it_fits_worse() -> None:
    warned = node("n1", _warned(gpus(H100, 2, on="n1", in_use=(0,)), 1))
    empty = node("n2", gpus(H100, 8, on="n2"))
    placed = place_one([warned, empty], request(1), AT)
    assert placed is not None and placed.node_id == "n2"
    placed = place_one([warned, node("n2", gpus(H100, 8, on="n2", in_use=tuple(range(8))))], request(1), AT)
    assert placed is not None and placed.gpu_uuids == ("GPU-n1-1",)


def test_a_less_preferred_model_goes_first() -> None:
    preferred = node("n1", _warned(gpus(H100, 1, on="n1"), 0))
    pending = replace(request(1), gpu_models=("H100", "A10"))
    placed = place_one([preferred, node("n2", gpus(A10, 1, on="n2"))], pending, AT)
    assert placed is not None and placed.node_id == "n2"


def test_shares_and_mig_devices_are_on_gpus_without_a_warning_first() -> None:
    view = node("n1", _warned(gpus(H100, 2, on="n1"), 0))
    placed = place_one([view], replace(request(1), gpu_milli=250, project_id="p1"), AT)
    assert placed is not None and placed.gpu_uuids == ("GPU-n1-1",)
    with_mig = tuple(
        replace(gpu, mig_enabled=True, mig=(MigView(f"MIG-{gpu.index}", "1g.10gb", free=True),))
        for gpu in view.gpus
    )
    pending = replace(request(1), mig_profile="1g.10gb", gpu_milli=142)
    placed = place_one([replace(view, gpus=with_mig)], pending, AT)
    assert placed is not None and placed.allocations[0].mig_uuid == "MIG-1"


def test_a_reserved_gpu_with_a_warning_comes_after_the_other_reserved_ones() -> None:
    period = ReservedPeriod("r1", "p1", 0.0, 1000.0)
    gpu_views = tuple(replace(gpu, reserved=(period,)) for gpu in _warned(gpus(H100, 3, on="n1"), 0))
    view = node("n1", gpu_views)
    pending = replace(request(1), project_id="p1")
    placed = place_one([view], pending, PlanTime(1.0))
    assert placed is not None and placed.gpu_uuids[0] in {"GPU-n1-1", "GPU-n1-2"}
    placed = place_one([view], replace(pending, gpu_count=3), PlanTime(1.0))
    assert placed is not None and len(placed.gpu_uuids) == 3


def test_a_warning_does_not_affect_requests_without_gpus() -> None:
    placed = place_one([node("n1", _warned(gpus(H100, 1), 0))], request(0), AT)
    assert placed is not None and placed.node_id == "n1"
