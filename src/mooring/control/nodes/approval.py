"""Approved facts: what a node may say about itself without an admin.

A node's report decides what the scheduler places there, so whoever stole a node's credential would attract
other tenants' work and secrets by reporting labels, CPUs or GPUs that the node does not have. Therefore each
fact in the two tables below has an approved value. The first report after the join sets it (an admin has just
handed out the join token), and only an admin raises it (`nodes.approve`). In effect is never more than the
approved and than the reported value: a decrease counts at once, and may be reverted up to the approved value.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from pydantic_core import to_json

from mooring.core.gpu import GpuFacts
from mooring.core.instance.state import Reason
from mooring.db.types import JsonObject
from mooring.schemas.agent import SyncRequest

GPUS: Final = "gpus"

Values = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Fact:
    """One approved fact.

    Attributes:
        grown: whether a reported value is more than, or something else than, the approved one.
        effective: what counts, of the approved and the reported value.
        of_engine: the container engine tells it, so it is not known while the engine is away.
        none_is_unknown: null means "not told", and the first value told is approved; else null is a value.
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
    """A fact that must stay as it was approved."""
    return Fact(name, _differs, _keep_approved, of_engine)


def amount(name: str, *, tolerance_pct: int = 0, of_engine: bool = False) -> Fact:
    """A number that may shrink.

    More than the approved number is never in effect. The tolerance only says from where on a larger number
    makes the node not ready: a new kernel or driver changes memory a little. It is measured from the approved
    number, so that many small steps gain nothing.
    """

    def grown(approved: int, reported: int) -> bool:
        return reported * 100 > approved * (100 + tolerance_pct)

    return Fact(name, grown, min, of_engine)


def _labels_grown(approved: Values, reported: Values) -> bool:
    return not reported.items() <= approved.items()


def _labels_of_both(approved: Values, reported: Values) -> JsonObject:
    return dict(reported.items() & approved.items())


def _swarm_grown(approved: Values | None, reported: Values | None) -> bool:
    """Out of the swarm, or a worker where a manager was approved, is less."""
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


# Of a node, as in core/node.py: NodeFacts. Of its disk: what instances may have, and whether it limits them.
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
# Of a GPU, as in core/gpu.py: GpuFacts. `mig_capable` is made of `mig_mode`: the present layout is the
# operator's to change at any time, and cannot be more than the GPU.
GPU_FACTS: Final = (
    exact("model"),
    amount("memory_mib", tolerance_pct=5),
    exact("compute_capability"),
    amount("mig_capable"),
)


def change(
    fact: str, approved: Any, reported: Any, *, gpu_uuid: str | None = None, node_id: str | None = None
) -> JsonObject:
    """A difference as it is stored and shown.

    Args:
        node_id: of a GPU that another node has: that node.
    """
    return {
        "fact": fact,
        "gpu_uuid": gpu_uuid,
        "approved": approved,
        "reported": reported,
        "node_id": node_id,
    }


@dataclass(frozen=True, slots=True)
class Judged:
    """What of reported values counts, what is approved now, and the differences from what was approved."""

    effective: JsonObject
    approved: JsonObject
    changes: list[JsonObject]


def judge(
    table: Iterable[Fact],
    approved: Values,
    reported: Values,
    *,
    engine_away: bool,
    gpu_uuid: str | None = None,
) -> Judged:
    """Hold reported values against the approved ones; what was not known before is approved as it is."""
    effective, kept, changes = dict(reported), dict(approved), []
    for fact in table:
        value, name = reported.get(fact.name), fact.name
        if name not in approved or (fact.none_is_unknown and approved[name] is None):
            if not (fact.of_engine and engine_away):
                kept[name] = value
        elif fact.none_is_unknown and value is None:
            continue
        else:
            effective[name] = fact.effective(approved[name], value)
            if fact.grown(approved[name], value) and not (fact.of_engine and engine_away):
                changes.append(change(name, approved[name], value, gpu_uuid=gpu_uuid))
    return Judged(effective, kept, changes)


def judge_node(approved: Values, report: SyncRequest) -> Judged:
    """Hold a node's own facts against the approved ones."""
    away = report.problem is not None and report.problem.code == "docker_unavailable"
    facts = report.facts.model_dump(mode="json")
    disk = facts["disk"]
    told = {
        **facts,
        "disk_mib": disk["allocatable_mib"] if disk else None,
        "disk_enforced": disk["enforced"] if disk else None,
    }
    judged = judge(NODE_FACTS, approved, told, engine_away=away)
    effective = {name: value for name, value in judged.effective.items() if name in facts}
    if disk:
        limits = {
            "allocatable_mib": judged.effective["disk_mib"],
            "enforced": judged.effective["disk_enforced"],
        }
        effective["disk"] = {**disk, **limits}
    return replace(judged, effective=effective)


def judge_gpu(approved: Values, facts: GpuFacts) -> Judged:
    """Hold a GPU against what was approved of it; `effective` are its facts as GpuFacts has them."""
    told = facts.model_dump(mode="json")
    judged = judge(GPU_FACTS, approved, told | _capability(told), engine_away=False, gpu_uuid=facts.uuid)
    if not judged.effective.pop("mig_capable"):
        judged.effective.update(mig_mode=None, mig_devices=[])
    return judged


def values_of_gpu(facts: GpuFacts) -> JsonObject:
    """What is approved of a GPU when it is approved as it is reported."""
    told = facts.model_dump(mode="json")
    told |= _capability(told)
    return {fact.name: told[fact.name] for fact in GPU_FACTS}


def _capability(told: Values) -> JsonObject:
    return {"mig_capable": int(told["mig_mode"] is not None)}


def accepted(approved: Values, changes: Sequence[JsonObject]) -> JsonObject:
    """The approved facts after an admin has accepted these differences."""
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
    """Names a difference, so that an admin approves the one that they have read."""
    return hashlib.sha256(to_json(changes)).hexdigest()[:16]


def problem(changes: Sequence[JsonObject]) -> Reason | None:
    """Why a node that reports these is not ready.

    A GPU that another node has approved is left out of this node, which stays ready without it.
    """
    names = sorted({each["fact"] for each in changes if each["node_id"] is None})
    if not names:
        return None
    return Reason(
        code="facts_changed",
        message=f"the node reports other facts than were approved ({', '.join(names)}); an admin compares "
        "them in GET /v1/nodes/{id} and accepts them with POST /v1/nodes/{id}/approve",
    )
