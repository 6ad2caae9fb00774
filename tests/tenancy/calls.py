"""For every operation a request that means something: its body is good, and what it names exists in A.

What a request uses up is made anew for each caller, by an admin or by A's member, so that no caller's answer
depends on who came before.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import httpx

from mooring.core.access import Role
from tests.nodes import join_token, observed
from tests.service import Client
from tests.tenancy.matrix import CALLERS
from tests.tenancy.tenants import IMAGE, NOWHERE, World, expired_key, make_key, post, revoked_key
from tests.testbed.waiting import wait_until

_PEOPLE = {"viewer": Role.VIEWER, "member": Role.MEMBER, "owner": Role.OWNER}
_number = count()


@dataclass(frozen=True)
class Call:
    """A request, less its credentials.

    Attributes:
        path: values for the braces of the operation's path.
    """

    path: Mapping[str, str] = field(default_factory=dict)
    json: Any = None
    params: Mapping[str, Any] = field(default_factory=dict)
    content: bytes | None = None

    def send(self, client: httpx.Client, method: str, template: str, **headers: str) -> httpx.Response:
        """Send it, with headers in whose names `_` stands for `-`."""
        url = template.format(**self.path)
        body: dict[str, Any] = {} if self.json is None else {"json": self.json}
        more = {name.replace("_", "-"): value for name, value in headers.items()}
        if self.content is not None:
            body = {"content": self.content}
            more["Content-Type"] = "application/json"
        return client.request(method, url, params=dict(self.params), headers=more, **body)


class Callers:
    """One client for every column of the table."""

    def __init__(self, world: World) -> None:
        url, a, b = world.service.url, world.a, world.b
        self._own = {
            "no key": Client(url),
            "wrong": Client(url, key="mk_nobodys-key-of-the-usual-length-0123456789"),
            "expired": Client(url, key=expired_key(world.admin, a.id)),
            "revoked": Client(url, key=revoked_key(world.admin, a.id)),
        }
        del self._own["no key"].headers["Authorization"]
        self.clients: dict[str, httpx.Client] = {
            **self._own, "b member": b.member, "b owner": b.owner,
            "viewer": a.viewer, "member": a.member, "owner": a.owner,
            "admin": world.admin, "node": world.wire.http,
        }  # fmt: skip
        assert tuple(self.clients) == CALLERS

    def close(self) -> None:
        for client in self._own.values():
            client.close()


Make = Callable[[World, str], Call]


def _fresh(word: str) -> str:
    return f"{word}-{next(_number)}"


def _of_running(world: World, _caller: str) -> Call:
    world.admin.wait(world.running, "running")  # a restart may be on its way
    return Call({"instance_id": world.running})


def _of_waiting(world: World, _caller: str) -> Call:
    return Call({"instance_id": world.waiting})


def _of_new_instance(world: World, _caller: str) -> Call:
    return Call({"instance_id": world.waiting_instance()})


def _of_ended_instance(world: World, _caller: str) -> Call:
    ended = world.waiting_instance()
    assert world.a.member.post(f"/v1/instances/{ended}/stop").status_code == 202
    return Call({"instance_id": ended})


def _new_instance(world: World, _caller: str) -> Call:
    return Call(json={"image": IMAGE, "project_id": world.a.id, "node_selector": NOWHERE})


_GROUP = {"count": 2, "template": {"image": IMAGE, "node_selector": NOWHERE}}


def _group(world: World) -> Call:
    return Call({"group_id": post(world.a.member, "/v1/instance-groups", **_GROUP)["id"]})


def _of_ended_group(world: World, _caller: str) -> Call:
    call = _group(world)
    stopped = world.a.member.post(f"/v1/instance-groups/{call.path['group_id']}/stop")
    assert stopped.status_code == 202
    return call


def _reserved(world: World) -> dict[str, Any]:
    """One card for a day of its own, so that no other test's is in the way."""
    day = next(_number)
    return {
        "name": "r",
        "project_id": world.a.id,
        "gpus": {"count": 1},
        "from": f"{2100 + day}-01-01T00:00:00Z",
        "to": f"{2100 + day}-01-02T00:00:00Z",
    }


def _reservation(world: World, json: Any = None) -> Call:
    made = post(world.admin, "/v1/reservations", **_reserved(world))
    return Call({"reservation_id": made["id"]}, json=json)


def _exec(world: World, caller: str) -> Call:
    return Call(_of_running(world, caller).path, json={"command": ["nvidia-smi"]})


def _of_wire(world: World, _caller: str) -> Call:
    return Call({"node_id": world.wire.id})


def _of_new_node(world: World, _caller: str) -> Call:
    joined = world.wire.http.post("/agent/v1/join", json=_join(world, "").json)
    return Call({"node_id": joined.json()["node_id"]})


def _of_gpu(world: World, caller: str) -> Call:
    _of_running(world, caller)
    return Call({"uuid": world.gpu})


def _of_idle_gpu(world: World, _caller: str) -> Call:
    return Call({"uuid": world.wire.gpus[0].uuid})


def _of_a(world: World, _caller: str) -> Call:
    return Call({"project_id": world.a.id})


def _labels_of_a(world: World, _caller: str) -> Call:
    return Call({"project_id": world.a.id}, json={"labels": {"tenant": "alpha"}})


def _of_project_to_delete(world: World, caller: str) -> Call:
    empty = post(world.admin, "/v1/projects", name=_fresh("empty"))["id"] if caller == "admin" else world.a.id
    return Call({"project_id": empty})


def _new_user(world: World) -> str:
    return str(post(world.admin, "/v1/users", name="new")["id"])


def _of_new_user(world: World, _caller: str) -> Call:
    return Call({"user_id": _new_user(world)})


def _new_name(world: World, _caller: str) -> Call:
    return Call({"user_id": _new_user(world)}, json={"name": "renamed"})


def _new_membership(world: World, _caller: str) -> Call:
    return Call({"project_id": world.a.id, "user_id": _new_user(world)}, json={"role": "viewer"})


def _of_new_member(world: World, _caller: str) -> Call:
    path = {"project_id": world.a.id, "user_id": _new_user(world)}
    taken_in = world.admin.put("/v1/projects/{project_id}/members/{user_id}".format(**path), json=_VIEWER)
    assert taken_in.status_code == 200
    return Call(path)


_VIEWER = {"role": "viewer"}


def _find_user(world: World, _caller: str) -> Call:
    return Call(params={"email": f"viewer@{world.a.name}.example"})


def _user_of(world: World, caller: str) -> str | None:
    """Whose key the caller may make in A: their own."""
    tenant, role = (world.b, caller[2:]) if caller.startswith("b ") else (world.a, caller)
    return tenant.people[_PEOPLE[role]].id if role in _PEOPLE else None


def _new_key(world: World, caller: str) -> Call:
    user_id = _user_of(world, caller)
    return Call(json={"name": "k", "project_id": world.a.id, "user_id": user_id, "role": "viewer"})


def _of_key(world: World, caller: str) -> Call:
    """Of A's service; viewers and members see their own keys only."""
    mine = caller in {"viewer", "member"}
    return Call({"key_id": (world.a.people[_PEOPLE[caller]].key if mine else world.a.service)["id"]})


def _of_new_key(world: World, caller: str) -> Call:
    user_id = _user_of(world, caller) if caller in {"viewer", "member"} else None
    made = make_key(world.admin, project_id=world.a.id, user_id=user_id, role="viewer")
    return Call({"key_id": made["id"]})


def _new_secret(world: World, _caller: str) -> Call:
    return Call(json={"name": _fresh("token"), "value": "s3cret", "project_id": world.a.id})


def _secret(world: World, json: Any = None) -> Call:
    made = post(world.a.member, "/v1/secrets", name=_fresh("token"), value="s3cret")
    return Call({"secret_id": made["id"]}, json=json)


def _server() -> str:
    return f"registry-{next(_number)}.example"


def _new_registry(world: World, _caller: str) -> Call:
    body = {"server": _server(), "username": "ci", "password": "s3cret", "project_id": world.a.id}
    return Call(json=body)


def _registry(world: World, json: Any = None) -> Call:
    made = post(world.a.owner, "/v1/registries", server=_server(), username="ci", password="s3cret")
    return Call({"registry_id": made["id"]}, json=json)


def _join(world: World, _caller: str) -> Call:
    name = _fresh("joined")
    return Call(json={"token": join_token(world.admin), "node_name": name, "hostname": name})


def _sync(world: World, _caller: str) -> Call:
    report = world.wire.report()
    return Call(content=report.model_dump_json().encode())


def _start_secrets(world: World, _caller: str) -> Call:
    """An instance of another node than the one that asks."""
    return Call({"instance_id": world.running}, json={"session": world.wire.session, "attempt": 1})


def _nothing(_world: World, _caller: str) -> Call:
    return Call()


CALLS: Mapping[str, Make] = {
    "list_instances": _nothing,
    "get_instance": _of_running,
    "wait_for_instance": _of_running,
    "get_instance_logs": _of_running,
    "get_instance_metrics": _of_running,
    "list_instance_events": _of_running,
    "explain_instance": _of_waiting,
    "create_instance": _new_instance,
    "update_instance": lambda world, _: Call({"instance_id": world.waiting}, json={"labels": {"a": "b"}}),
    "delete_instance": _of_new_instance,
    "stop_instance": _of_new_instance,
    "start_instance": _of_ended_instance,
    "restart_instance": _of_running,
    "exec_in_instance": _exec,
    "list_instance_groups": _nothing,
    "get_instance_group": lambda world, _: _group(world),
    "create_instance_group": lambda world, _: Call(json={**_GROUP, "project_id": world.a.id}),
    "delete_instance_group": lambda world, _: _group(world),
    "stop_instance_group": lambda world, _: _group(world),
    "start_instance_group": _of_ended_group,
    "explain_instance_group": lambda world, _: _group(world),
    "list_reservations": _nothing,
    "get_reservation": lambda world, _: _reservation(world),
    "create_reservation": lambda world, _: Call(json=_reserved(world)),
    "update_reservation": lambda world, _: _reservation(world, {"name": "renamed"}),
    "delete_reservation": lambda world, _: _reservation(world),
    "get_queue": _nothing,
    "get_fragmentation": _nothing,
    "list_nodes": _nothing,
    "get_node": _of_wire,
    "list_gpus": _nothing,
    "get_gpu": _of_gpu,
    "get_gpu_metrics": _of_gpu,
    "list_gpu_incidents": _of_gpu,
    "list_instance_types": _nothing,
    "update_node": lambda world, _: Call({"node_id": world.wire.id}, json={"reserved_for": [world.a.id]}),
    "cordon_node": _of_wire,
    "uncordon_node": _of_wire,
    "approve_node": _of_wire,
    "drain_node": _of_wire,
    "renew_credential": _of_wire,
    "delete_node": _of_new_node,
    "clear_gpu": _of_idle_gpu,
    "create_join_token": lambda _world, _: Call(json={"ttl_s": 60}),
    "list_events": _nothing,
    "list_projects": _nothing,
    "get_project": _of_a,
    "create_project": lambda _world, _: Call(json={"name": _fresh("project")}),
    "update_project": _labels_of_a,
    "delete_project": _of_project_to_delete,
    "list_members": _of_a,
    "put_member": _new_membership,
    "delete_member": _of_new_member,
    "list_users": _find_user,
    "get_user": _of_new_user,
    "create_user": lambda _world, _: Call(json={"name": "somebody"}),
    "update_user": _new_name,
    "delete_user": _of_new_user,
    "get_me": _nothing,
    "list_api_keys": _nothing,
    "get_api_key": _of_key,
    "create_api_key": _new_key,
    "delete_api_key": _of_new_key,
    "list_secrets": _nothing,
    "get_secret": lambda world, _: _secret(world),
    "create_secret": _new_secret,
    "replace_secret": lambda world, _: _secret(world, {"value": "another"}),
    "delete_secret": lambda world, _: _secret(world),
    "list_registries": _nothing,
    "get_registry": lambda world, _: _registry(world),
    "create_registry": _new_registry,
    "replace_registry": lambda world, _: _registry(world, {"password": "another"}),
    "delete_registry": lambda world, _: _registry(world),
    "list_audit_log": _nothing,
    "get_audit_head": _nothing,
    "get_health": _nothing,
    "get_readiness": _nothing,
    "get_metrics": _nothing,
    "join_node": _join,
    "open_node_session": _nothing,
    "renew_node_credential": _nothing,
    "sync_node": _sync,
    "hand_out_start_secrets": _start_secrets,
    "list_stream_requests": lambda world, _: Call(json={"session": world.wire.session}),
    "bring_stream": lambda _world, _: Call({"stream_id": "stm_unknown"}),
}


@contextmanager
def awaited_stream(world: World) -> Iterator[Call]:
    """The frames of an exec that somebody waits for, on the node that the test speaks for."""
    made = world.a.member.create(name=_fresh("execs"), node_selector={"sandbox": "wire"})
    world.admin.wait(made["id"], "scheduled")
    assignment = next(
        item for item in world.wire.sync(instances=None).assignments if item.instance_id == made["id"]
    )
    world.wire.sync(observed(assignment, "running"))
    path = f"/v1/instances/{made['id']}/exec"
    asking = threading.Thread(target=lambda: world.a.member.post(path, json={"command": ["id"]}))
    asking.start()
    (stream,) = wait_until(world.wire.stream_requests)
    yield Call({"stream_id": stream.id}, content=b'{"exit_code": 0}\n')
    asking.join(20)
    world.admin.delete(f"/v1/instances/{made['id']}")
    world.wire.sync()
