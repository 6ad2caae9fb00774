"""The access matrix of `/compat/prime`, whose operations the OpenAPI document does not list.

As `matrix.py` and `calls.py`, but with 403 in place of each 401: SkyPilot takes only that for a wrong key.
"""

from collections.abc import Mapping
from typing import Any

from tests.tenancy.calls import Call, Make, public_key
from tests.tenancy.matrix import CALLERS
from tests.tenancy.tenants import Setup

PREFIX = "/compat/prime/api/v1"
OPERATIONS = {
    "list_prime_ssh_keys": ("get", f"{PREFIX}/ssh_keys"),
    "create_prime_ssh_key": ("post", f"{PREFIX}/ssh_keys"),
    "list_prime_pods": ("get", f"{PREFIX}/pods"),
    "get_prime_pod": ("get", f"{PREFIX}/pods/{{pod_id}}"),
    "create_prime_pod": ("post", f"{PREFIX}/pods"),
    "delete_prime_pod": ("delete", f"{PREFIX}/pods/{{pod_id}}"),
}

# fmt: off
_TABLE = {
    #                       no key wrong expired revoked b member b owner viewer member owner admin node
    "list_prime_ssh_keys":  "403   403   403     403     200      200     200    200    200   200   403",
    "create_prime_ssh_key": "403   403   403     403     201      201     403    201    201   201   403",
    "list_prime_pods":      "403   403   403     403     200      200     200    200    200   200   403",
    "get_prime_pod":        "403   403   403     403     404      404     200    200    200   200   403",
    "create_prime_pod":     "403   403   403     403     404      404     403    200    200   200   403",
    "delete_prime_pod":     "403   403   403     403     404      404     403    200    200   200   403",
}
# fmt: on
MATRIX = {
    operation: dict(zip(CALLERS, map(int, statuses.split()), strict=True))
    for operation, statuses in _TABLE.items()
}


def pod_body(name: str = "sky-c-1-head", project_id: str | None = None, **pod: Any) -> dict[str, Any]:
    """What SkyPilot 0.14.1 sends for a pod without GPUs; `pod` are other fields of it."""
    fields = {
        "name": name, "cloudId": "CPU_NODE", "socket": "PCIe", "gpuType": "CPU_NODE", "gpuCount": 1,
        "diskSize": 256, "maxPrice": 0, "vcpus": 2, "memory": 4, "country": "lab", "dataCenterId": "z1",
    }  # fmt: skip
    team = {} if project_id is None else {"team": {"teamId": project_id}}
    return {"pod": fields | pod, "provider": {"type": "mooring"}, **team}


def _created_pod(setup: Setup, _caller: str) -> Call:
    made = setup.a.member.post(f"{PREFIX}/pods", json=pod_body())
    assert made.status_code == 200, made.text
    return Call({"pod_id": made.json()["id"]})


CALLS: Mapping[str, Make] = {
    "list_prime_ssh_keys": lambda _setup, _caller: Call(),
    "create_prime_ssh_key": lambda _setup, _caller: Call(json={"name": "k", "publicKey": public_key()}),
    "list_prime_pods": lambda _setup, _caller: Call(),
    "get_prime_pod": _created_pod,
    "create_prime_pod": lambda setup, _caller: Call(json=pod_body(project_id=setup.a.id)),
    "delete_prime_pod": _created_pod,
}
