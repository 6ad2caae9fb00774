"""Approved facts: what a node may report about itself without an admin's approval.

The scheduler places instances by the facts that a node reports. Anyone with a stolen node credential could
attract instances and secrets of other tenants by reporting labels, CPUs or GPUs that the node does not have.
Therefore each fact in the two tables below has an approved value. The first report after the join sets it (an
admin has just issued the join token), and only an admin can raise it (`nodes.approve`). The effective value
never exceeds the approved or the reported one: a decrease takes effect at once, and can be reverted.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from pydantic_core import to_json

from mooring.core.gpu import GpuFacts
from mooring.db.types import JsonObject
from mooring.schemas.agent import SyncRequest
from mooring_client.schemas.states import Reason

GPUS: Final = "gpus"

Values = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Fact:
    """One approved fact.

    Attributes:
        grown: whether the reported value exceeds the approved one, or contradicts it.
        effective: the effective value, from the approved and the reported one.
        of_engine: it comes from the container engine, so it is unknown while the engine is unreachable.
        none_is_unknown: null means "unknown", and the first other value is approved; else null is a value.
    """

    name: str
    grown: Callable[[Any, Any], bool]
    effective: Callable[[Any, Any], Any]
    of_engine: bool = False
    none_is_unknown: bool = True


def _differs(approved: Any, reported: Any) -> bool:
    return bool(reported != approved)


def _keep_approved(approved: Any, _reported: Any) -> Any:
    return approved


def exact(name: str, *, of_engine: bool = False) -> Fact:
    """A fact that must equal the approved value."""
    return Fact(name, _differs, _keep_approved, of_engine)


def amount(name: str, *, tolerance_pct: int = 0, of_engine: bool = False) -> Fact:
    """A number that may shrink.

    The effective number never exceeds the approved one. A node that reports more than the tolerance allows is
    not ready. There is a tolerance because a new kernel or driver changes memory a little; it is relative to
    the approved number, so many small steps gain nothing.
    """

    def grown(approved: int, reported: int) -> bool:
        return reported * 100 > approved * (100 + tolerance_pct)

    return Fact(name, grown, min, of_engine)


def _labels_grown(approved: Values, reported: Values) -> bool:
    return not reported.items() <= approved.items()


def _labels_of_both(approved: Values, reported: Values) -> JsonObject:
    return dict(reported.items() & approved.items())


def _swarm_grown(approved: Values | None, reported: Values | None) -> bool:
    """Leaving the swarm, or becoming a worker instead of a manager, is a decrease."""
    if reported is None:
        return False
    if approved is None or approved["cluster_id"] != reported["cluster_id"]:
        return True
    return bool(reported["manager"] and not approved["manager"])


def _swarm_of_both(approved: Values | None, reported: Values | None) -> JsonObject | None:
    if approved is None or reported is None or approved["cluster_id"] != reported["cluster_id"]:
        return None
    return {**reported, "manager": bool(approved["manager"] and reported["manager"])}


def _claims(approved: bool, reported: bool) -> bool:
    return reported and not approved


def _in_both(approved: bool, reported: bool) -> bool:
    return approved and reported


# Facts of a node, as in core/node.py: NodeFacts; of its disk: the allocatable size, and enforced limits.
NODE_FACTS: Final = (
    Fact("labels", _labels_grown, _labels_of_both),
    exact("address"),
    amount("cpus", of_engine=True),
    amount("memory_mib", tolerance_pct=5, of_engine=True),
    Fact("swarm", _swarm_grown, _swarm_of_both, of_engine=True, none_is_unknown=False),
    exact("simulated_containers", of_engine=True),
    exact("simulated_gpus"),
    amount("disk_mib", tolerance_pct=5, of_engine=True),
    Fact("disk_enforced", _claims, _in_both, of_engine=True),
)
# Facts of a GPU, as in core/gpu.py: GpuFacts. `mig_capable` is derived from `mig_mode`: the operator may
# change the MIG layout at any time, and no layout can exceed the GPU.
GPU_FACTS: Final = (
    exact("model"),
    amount("memory_mib", tolerance_pct=5),
    exact("compute_capability"),
    amount("mig_capable"),
)


def change(
    fact: str, approved: Any, reported: Any, *, gpu_uuid: str | None = None, node_id: str | None = None
) -> JsonObject:
    """One fact of a node's difference, as it is stored and shown.

    Args:
        node_id: the node that the GPU is approved for, if that is not the reporting node.
    """
    return {
        "fact": fact,
        "gpu_uuid": gpu_uuid,
        "approved": approved,
        "reported": reported,
        "node_id": node_id,
    }


@dataclass(frozen=True, slots=True)
class ComparedFacts:
    """The effective facts, the approved facts after the comparison, and the differences from them."""

    effective: JsonObject
    approved: JsonObject
    changes: list[JsonObject]


def compare(
    table: Iterable[Fact],
    approved: Values,
    reported: Values,
    *,
    engine_unreachable: bool,
    gpu_uuid: str | None = None,
) -> ComparedFacts:
    """Compare reported values with the approved ones; a value that was unknown before is approved."""
    effective, kept, changes = dict(reported), dict(approved), []
    for fact in table:
        value, name = reported.get(fact.name), fact.name
        if name not in approved or (fact.none_is_unknown and approved[name] is None):
            if not (fact.of_engine and engine_unreachable):
                kept[name] = value
        elif fact.none_is_unknown and value is None:
            continue
        else:
            effective[name] = fact.effective(approved[name], value)
            if fact.grown(approved[name], value) and not (fact.of_engine and engine_unreachable):
                changes.append(change(name, approved[name], value, gpu_uuid=gpu_uuid))
    return ComparedFacts(effective, kept, changes)


def compare_node(approved: Values, report: SyncRequest) -> ComparedFacts:
    """Compare a node's own facts with the approved ones."""
    unreachable = report.problem is not None and report.problem.code == "docker_unavailable"
    facts = report.facts.model_dump(mode="json")
    disk = facts["disk"]
    reported = {
        **facts,
        "disk_mib": disk["allocatable_mib"] if disk else None,
        "disk_enforced": disk["enforced"] if disk else None,
    }
    compared = compare(NODE_FACTS, approved, reported, engine_unreachable=unreachable)
    effective = {name: value for name, value in compared.effective.items() if name in facts}
    if disk:
        limits = {
            "allocatable_mib": compared.effective["disk_mib"],
            "enforced": compared.effective["disk_enforced"],
        }
        effective["disk"] = {**disk, **limits}
    return replace(compared, effective=effective)


def compare_gpu(approved: Values, facts: GpuFacts) -> ComparedFacts:
    """Compare a GPU's facts with the approved ones; `effective` has the fields of GpuFacts."""
    values = facts.model_dump(mode="json")
    values |= _capability(values)
    compared = compare(GPU_FACTS, approved, values, engine_unreachable=False, gpu_uuid=facts.uuid)
    if not compared.effective.pop("mig_capable"):
        compared.effective.update(mig_mode=None, mig_devices=[])
    return compared


def values_of_gpu(facts: GpuFacts) -> JsonObject:
    """The approved values of a GPU that is approved as reported."""
    values = facts.model_dump(mode="json")
    values |= _capability(values)
    return {fact.name: values[fact.name] for fact in GPU_FACTS}


def _capability(values: Values) -> JsonObject:
    return {"mig_capable": int(values["mig_mode"] is not None)}


def accepted(approved: Values, changes: Sequence[JsonObject]) -> JsonObject:
    """The approved facts once an admin accepts these differences."""
    gpus = dict(approved.get(GPUS) or {})
    facts = dict(approved)
    for each in changes:
        uuid, name, value = each["gpu_uuid"], each["fact"], each["reported"]
        if uuid is None:
            facts[name] = value
        elif name == "gpu":
            gpus[uuid] = value
        else:
            gpus[uuid] = {**gpus.get(uuid, {}), name: value}
    return {**facts, GPUS: gpus} if gpus or approved.get(GPUS) is not None else facts


def difference_id(changes: Sequence[JsonObject]) -> str:
    """Identifies a difference, so that an admin approves exactly the one that they have read."""
    return hashlib.sha256(to_json(changes)).hexdigest()[:16]


def problem(changes: Sequence[JsonObject]) -> Reason | None:
    """Why a node with these differences is not ready; null: it is ready.

    A GPU that is approved for another node is left out of this one, which stays ready.
    """
    names = sorted({each["fact"] for each in changes if each["node_id"] is None})
    if not names:
        return None
    return Reason(
        code="facts_changed",
        message=f"the node reports other facts than were approved ({', '.join(names)}); an admin compares "
        "them in GET /v1/nodes/{id} and accepts them with POST /v1/nodes/{id}/approve",
    )
