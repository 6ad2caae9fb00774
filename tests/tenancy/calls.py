"""A valid request for every operation; the resources that it names belong to project A.

An admin or A's member creates new resources for each caller where a request uses them up, so that no answer
depends on the previous callers.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import httpx
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from mooring_client.schemas.projects import Role
from tests.nodes import join_token, observed
from tests.service import Client
from tests.tenancy.matrix import CALLERS
from tests.tenancy.tenants import IMAGE, NOWHERE, Setup, expired_key, make_key, post, revoked_key
from tests.testbed.waiting import wait_until

_PEOPLE = {"viewer": Role.VIEWER, "member": Role.MEMBER, "owner": Role.OWNER}
_number = count()
# Names of this domain have no address, so nothing is sent.
WEBHOOK_URL = "https://receiver.invalid/hook"


@dataclass(frozen=True)
class Call:
    """A request without credentials.

    Attributes:
        path: values for the braces of the operation's path.
    """

    path: Mapping[str, str] = field(default_factory=dict)
    json: Any = None
    params: Mapping[str, Any] = field(default_factory=dict)
    content: bytes | None = None

    def send(self, client: httpx.Client, method: str, template: str, **headers: str) -> httpx.Response:
        """Send the request; `_` in names of headers stands for `-`."""
        url = template.format(**self.path)
        body: dict[str, Any] = {} if self.json is None else {"json": self.json}
        more = {name.replace("_", "-"): value for name, value in headers.items()}
        if self.content is not None:
            body = {"content": self.content}
            more["Content-Type"] = "application/json"
        return client.request(method, url, params=dict(self.params), headers=more, **body)


class Callers:
    """One client for each column of the matrix."""

    def __init__(self, setup: Setup) -> None:
        url, a, b = setup.service.url, setup.a, setup.b
        self._to_close = {
            "no key": Client(url),
            "wrong": Client(url, key="mk_nobodys-key-of-the-usual-length-0123456789"),
            "expired": Client(url, key=expired_key(setup, a.id)),
            "revoked": Client(url, key=revoked_key(setup.admin, a.id)),
        }
        del self._to_close["no key"].headers["Authorization"]
        self.clients: dict[str, httpx.Client] = {
            **self._to_close, "b member": b.member, "b owner": b.owner,
            "viewer": a.viewer, "member": a.member, "owner": a.owner,
            "admin": setup.admin, "node": setup.wire.http,
        }  # fmt: skip
        assert tuple(self.clients) == CALLERS

    def close(self) -> None:
        for client in self._to_close.values():
            client.close()


Make = Callable[[Setup, str], Call]


def _unique(word: str) -> str:
    return f"{word}-{next(_number)}"


def _running_instance(setup: Setup, _caller: str) -> Call:
    setup.admin.wait(setup.running, "running")  # an earlier restart may still be in progress
    return Call({"instance_id": setup.running})


def _pending_instance(setup: Setup, _caller: str) -> Call:
    return Call({"instance_id": setup.pending})


def _created_instance(setup: Setup, _caller: str) -> Call:
    return Call({"instance_id": setup.pending_instance()})


def _ended_instance(setup: Setup, _caller: str) -> Call:
    ended = setup.pending_instance()
    assert setup.a.member.post(f"/v1/instances/{ended}/stop").status_code == 202
    return Call({"instance_id": ended})


def _new_instance(setup: Setup, _caller: str) -> Call:
    return Call(json={"image": IMAGE, "project_id": setup.a.id, "node_selector": NOWHERE})


def _applied_instance(setup: Setup, caller: str) -> Call:
    """A request that changes the labels of a new instance."""
    body = {"image": IMAGE, "node_selector": NOWHERE, "labels": {"a": "b"}}
    return Call(_created_instance(setup, caller).path, json=body)


_GROUP = {"count": 2, "template": {"image": IMAGE, "node_selector": NOWHERE}}


def _group(setup: Setup) -> Call:
    return Call({"group_id": post(setup.a.member, "/v1/instance-groups", **_GROUP)["id"]})


def _ended_group(setup: Setup, _caller: str) -> Call:
    call = _group(setup)
    stopped = setup.a.member.post(f"/v1/instance-groups/{call.path['group_id']}/stop")
    assert stopped.status_code == 202
    return call


def _reservation_body(setup: Setup) -> dict[str, Any]:
    """One GPU for a day that no other reservation uses."""
    day = next(_number)
    return {
        "name": "r",
        "project_id": setup.a.id,
        "gpus": {"count": 1},
        "from": f"{2100 + day}-01-01T00:00:00Z",
        "to": f"{2100 + day}-01-02T00:00:00Z",
    }


def _reservation(setup: Setup, json: Any = None) -> Call:
    made = post(setup.admin, "/v1/reservations", **_reservation_body(setup))
    return Call({"reservation_id": made["id"]}, json=json)


def _applied_reservation(setup: Setup, _caller: str) -> Call:
    body = {**_reservation_body(setup), "name": _unique("applied")}
    return Call({"name": body["name"]}, json=body)


def _exec(setup: Setup, caller: str) -> Call:
    return Call(_running_instance(setup, caller).path, json={"command": ["nvidia-smi"]})


def _exec_stream(setup: Setup, _caller: str) -> Call:
    return Call({"instance_id": setup.running}, params={"command": "nvidia-smi"})


def _wire_node(setup: Setup, _caller: str) -> Call:
    return Call({"node_id": setup.wire.id})


def _joined_node(setup: Setup, _caller: str) -> Call:
    joined = setup.wire.http.post("/agent/v1/join", json=_join(setup, "").json)
    return Call({"node_id": joined.json()["node_id"]})


def _gpu(setup: Setup, caller: str) -> Call:
    _running_instance(setup, caller)
    return Call({"uuid": setup.gpu})


def _idle_gpu(setup: Setup, _caller: str) -> Call:
    return Call({"uuid": setup.wire.gpus[0].uuid})


def _project_a(setup: Setup, _caller: str) -> Call:
    return Call({"project_id": setup.a.id})


def _labels_of_a(setup: Setup, _caller: str) -> Call:
    return Call({"project_id": setup.a.id}, json={"labels": {"tenant": "alpha"}})


def _project_to_delete(setup: Setup, caller: str) -> Call:
    empty = (
        post(setup.admin, "/v1/projects", name=_unique("empty"))["id"] if caller == "admin" else setup.a.id
    )
    return Call({"project_id": empty})


def _new_user(setup: Setup) -> str:
    return str(post(setup.admin, "/v1/users", name="new")["id"])


def _created_user(setup: Setup, _caller: str) -> Call:
    return Call({"user_id": _new_user(setup)})


def _new_name(setup: Setup, _caller: str) -> Call:
    return Call({"user_id": _new_user(setup)}, json={"name": "renamed"})


def _new_membership(setup: Setup, _caller: str) -> Call:
    return Call({"project_id": setup.a.id, "user_id": _new_user(setup)}, json={"role": "viewer"})


def _created_member(setup: Setup, _caller: str) -> Call:
    path = {"project_id": setup.a.id, "user_id": _new_user(setup)}
    member = "/v1/projects/{project_id}/members/{user_id}".format(**path)
    assert setup.admin.put(member, json={"role": "viewer"}).status_code == 200
    return Call(path)


def _find_user(setup: Setup, _caller: str) -> Call:
    return Call(params={"email": f"viewer@{setup.a.name}.example"})


def _user_of(setup: Setup, caller: str) -> str | None:
    """The ID of the caller's own user; None if the caller is not a user with a role."""
    tenant, role = (setup.b, caller[2:]) if caller.startswith("b ") else (setup.a, caller)
    return tenant.people[_PEOPLE[role]].id if role in _PEOPLE else None


def _new_key(setup: Setup, caller: str) -> Call:
    user_id = _user_of(setup, caller)
    return Call(json={"name": "k", "project_id": setup.a.id, "user_id": user_id, "role": "viewer"})


def _api_key(setup: Setup, caller: str) -> Call:
    """The key of A's service; for A's viewer and member their own key, since they see no others."""
    sees_only_own = caller in {"viewer", "member"}
    key = setup.a.people[_PEOPLE[caller]].key if sees_only_own else setup.a.service
    return Call({"key_id": key["id"]})


def _created_key(setup: Setup, caller: str) -> Call:
    user_id = _user_of(setup, caller) if caller in {"viewer", "member"} else None
    made = make_key(setup.admin, project_id=setup.a.id, user_id=user_id, role="viewer")
    return Call({"key_id": made["id"]})


def public_key() -> str:
    """A new key, as in a `.pub` file."""
    made = Ed25519PrivateKey.generate().public_key()
    encoded = made.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    return f"{encoded.decode()} somebody@somewhere"


def _new_ssh_key(setup: Setup, _caller: str) -> Call:
    return Call(json={"name": "k", "public_key": public_key(), "project_id": setup.a.id})


def _ssh_key(setup: Setup) -> Call:
    """A key that A's member has registered."""
    made = post(setup.a.member, "/v1/ssh-keys", name="k", public_key=public_key())
    return Call({"key_id": made["id"]})


def _new_secret(setup: Setup, _caller: str) -> Call:
    return Call(json={"name": _unique("token"), "value": "s3cret", "project_id": setup.a.id})


def _secret(setup: Setup, json: Any = None) -> Call:
    made = post(setup.a.member, "/v1/secrets", name=_unique("token"), value="s3cret")
    return Call({"secret_id": made["id"]}, json=json)


_SPEC = {"image": "busybox", "gpus": {"count": "${gpus}"}}
_PARAMETERS = {"gpus": {"type": "integer", "default": 1}}


def _new_template(setup: Setup, _caller: str) -> Call:
    body = {"name": _unique("template"), "spec": _SPEC, "parameters": _PARAMETERS, "project_id": setup.a.id}
    return Call(json=body)


def _applied_template(setup: Setup, _caller: str) -> Call:
    body = {"spec": _SPEC, "parameters": _PARAMETERS, "project_id": setup.a.id}
    return Call({"name": _unique("template")}, json=body)


def _template(setup: Setup, json: Any = None) -> Call:
    made = post(setup.a.member, "/v1/templates", name=_unique("template"), spec=_SPEC, parameters=_PARAMETERS)
    return Call({"template_id": made["id"]}, json=json)


def _volume(setup: Setup, json: Any = None) -> Call:
    made = post(setup.a.member, "/v1/volumes", name=_unique("data"))
    return Call({"volume_id": made["id"]}, json=json)


def _server() -> str:
    return f"registry-{next(_number)}.example"


def _new_registry(setup: Setup, _caller: str) -> Call:
    body = {"server": _server(), "username": "ci", "password": "s3cret", "project_id": setup.a.id}
    return Call(json=body)


def _registry(setup: Setup, json: Any = None) -> Call:
    made = post(setup.a.owner, "/v1/registries", server=_server(), username="ci", password="s3cret")
    return Call({"registry_id": made["id"]}, json=json)


def _new_webhook(setup: Setup, _caller: str) -> Call:
    return Call(json={"url": WEBHOOK_URL, "name": _unique("hook"), "project_id": setup.a.id})


def _applied_webhook(setup: Setup, caller: str) -> Call:
    made = _new_webhook(setup, caller)
    return Call({"name": made.json["name"]}, json=made.json)


def _webhook(setup: Setup, json: Any = None) -> Call:
    """A webhook of A. There is one for all calls that leave it: a project can have few."""
    found = setup.a.owner.items("/v1/webhooks", name="shared", project_id=setup.a.id)
    made = found[0] if found else post(setup.a.owner, "/v1/webhooks", url=WEBHOOK_URL, name="shared")
    return Call({"webhook_id": made["id"]}, json=json)


def _unneeded_webhook(setup: Setup, _caller: str) -> Call:
    for left in setup.a.owner.items("/v1/webhooks", name="unneeded", project_id=setup.a.id):
        setup.a.owner.delete(f"/v1/webhooks/{left['id']}")
    made = post(setup.a.owner, "/v1/webhooks", url=WEBHOOK_URL, name="unneeded")
    return Call({"webhook_id": made["id"]})


def _delivery(setup: Setup, _caller: str) -> Call:
    path = _webhook(setup).path
    made = setup.a.owner.post(f"/v1/webhooks/{path['webhook_id']}/test").json()
    return Call({**path, "delivery_id": made["id"]})


def _join(setup: Setup, _caller: str) -> Call:
    name = _unique("joined")
    return Call(json={"token": join_token(setup.admin), "node_name": name, "hostname": name})


def _sync(setup: Setup, _caller: str) -> Call:
    report = setup.wire.report()
    return Call(content=report.model_dump_json().encode())


def _start_secrets(setup: Setup, _caller: str) -> Call:
    """An instance on another node than the requesting one."""
    return Call({"instance_id": setup.running}, json={"session": setup.wire.session, "attempt": 1})


def _empty_call(_setup: Setup, _caller: str) -> Call:
    return Call()


CALLS: Mapping[str, Make] = {
    "list_instances": _empty_call,
    "get_instance": _running_instance,
    "wait_for_instance": _running_instance,
    "get_instance_logs": _running_instance,
    "get_instance_metrics": _running_instance,
    "list_instance_events": _running_instance,
    "explain_instance": _pending_instance,
    "create_instance": _new_instance,
    "put_instance": _applied_instance,
    "apply_instance": lambda setup, caller: Call(
        {"name": _unique("applied")}, json=_new_instance(setup, caller).json
    ),
    "update_instance": lambda setup, _: Call({"instance_id": setup.pending}, json={"labels": {"a": "b"}}),
    "delete_instance": _created_instance,
    "stop_instance": _created_instance,
    "start_instance": _ended_instance,
    "restart_instance": _running_instance,
    "exec_in_instance": _exec,
    "stream_exec_in_instance": _exec_stream,
    "stream_attach_to_instance": _running_instance,
    "stream_instance_port": lambda setup, _: Call({"instance_id": setup.running, "port": "80"}),
    "create_port_link": lambda setup, _: Call(
        {"instance_id": setup.running, "port": "80"}, json={"ttl_s": 60}
    ),
    "list_instance_groups": _empty_call,
    "get_instance_group": lambda setup, _: _group(setup),
    "create_instance_group": lambda setup, _: Call(json={**_GROUP, "project_id": setup.a.id}),
    "apply_instance_group": lambda setup, _: Call(
        {"name": _unique("applied")}, json={**_GROUP, "project_id": setup.a.id}
    ),
    "delete_instance_group": lambda setup, _: _group(setup),
    "stop_instance_group": lambda setup, _: _group(setup),
    "start_instance_group": _ended_group,
    "explain_instance_group": lambda setup, _: _group(setup),
    "list_reservations": _empty_call,
    "get_reservation": lambda setup, _: _reservation(setup),
    "create_reservation": lambda setup, _: Call(json=_reservation_body(setup)),
    "apply_reservation": _applied_reservation,
    "update_reservation": lambda setup, _: _reservation(setup, {"name": "renamed"}),
    "delete_reservation": lambda setup, _: _reservation(setup),
    "get_queue": _empty_call,
    "get_fragmentation": _empty_call,
    "list_nodes": _empty_call,
    "get_node": _wire_node,
    "list_gpus": _empty_call,
    "get_gpu": _gpu,
    "get_gpu_metrics": _gpu,
    "list_gpu_incidents": _gpu,
    "list_instance_types": _empty_call,
    "update_node": lambda setup, _: Call({"node_id": setup.wire.id}, json={"reserved_for": [setup.a.id]}),
    "cordon_node": _wire_node,
    "uncordon_node": _wire_node,
    "approve_node": _wire_node,
    "drain_node": _wire_node,
    "renew_credential": _wire_node,
    "delete_node": _joined_node,
    "clear_gpu": _idle_gpu,
    "create_join_token": lambda _setup, _: Call(json={"ttl_s": 60}),
    "list_events": _empty_call,
    "list_projects": _empty_call,
    "get_project": _project_a,
    "create_project": lambda _setup, _: Call(json={"name": _unique("project")}),
    "apply_project": lambda setup, _: Call(
        {"name": setup.a.name}, json={"labels": {"tenant": setup.a.name, "number": _unique("n")}}
    ),
    "update_project": _labels_of_a,
    "delete_project": _project_to_delete,
    "list_members": _project_a,
    "put_member": _new_membership,
    "delete_member": _created_member,
    "list_users": _find_user,
    "get_user": _created_user,
    "create_user": lambda _setup, _: Call(json={"name": "new"}),
    "update_user": _new_name,
    "delete_user": _created_user,
    "get_me": _empty_call,
    "list_api_keys": _empty_call,
    "get_api_key": _api_key,
    "create_api_key": _new_key,
    "delete_api_key": _created_key,
    "get_docker_context": _empty_call,
    "get_my_ssh": _empty_call,
    "list_ssh_keys": _empty_call,
    "get_ssh_key": lambda setup, _: _ssh_key(setup),
    "create_ssh_key": _new_ssh_key,
    "delete_ssh_key": lambda setup, _: _ssh_key(setup),
    "create_ssh_certificate": lambda _setup, _: Call(json={"public_key": public_key()}),
    "list_templates": _empty_call,
    "get_template": lambda setup, _: _template(setup),
    "render_template": lambda setup, _: _template(setup, {"parameters": {"gpus": 2}}),
    "create_template": _new_template,
    "apply_template": _applied_template,
    "delete_template": lambda setup, _: _template(setup),
    "list_secrets": _empty_call,
    "list_volumes": _empty_call,
    "get_volume": lambda setup, _: _volume(setup),
    "create_volume": lambda setup, _: Call(json={"name": _unique("data"), "project_id": setup.a.id}),
    "put_volume": lambda setup, _: _volume(setup, {"labels": {"a": "b"}}),
    "apply_volume": lambda setup, _: Call({"name": _unique("data")}, json={"project_id": setup.a.id}),
    "update_volume": lambda setup, _: _volume(setup, {"labels": {"a": "b"}}),
    "delete_volume": lambda setup, _: _volume(setup),
    "get_secret": lambda setup, _: _secret(setup),
    "create_secret": _new_secret,
    "replace_secret": lambda setup, _: _secret(setup, {"value": "another"}),
    "delete_secret": lambda setup, _: _secret(setup),
    "list_registries": _empty_call,
    "get_registry": lambda setup, _: _registry(setup),
    "create_registry": _new_registry,
    "replace_registry": lambda setup, _: _registry(setup, {"password": "another"}),
    "delete_registry": lambda setup, _: _registry(setup),
    "list_webhooks": _empty_call,
    "get_webhook": lambda setup, _: _webhook(setup),
    "create_webhook": _new_webhook,
    "apply_webhook": _applied_webhook,
    "update_webhook": lambda setup, _: _webhook(setup, {"format": "slack"}),
    "delete_webhook": _unneeded_webhook,
    "rotate_webhook_secret": lambda setup, _: _webhook(setup),
    "test_webhook": lambda setup, _: _webhook(setup),
    "list_webhook_deliveries": lambda setup, _: _webhook(setup),
    "replay_webhook_delivery": _delivery,
    "list_audit_log": _empty_call,
    "get_audit_head": _empty_call,
    "get_health": _empty_call,
    "get_readiness": _empty_call,
    "get_metrics": _empty_call,
    "join_node": _join,
    "open_node_session": _empty_call,
    "renew_node_credential": _empty_call,
    "sync_node": _sync,
    "hand_out_start_secrets": _start_secrets,
    "heartbeat": lambda setup, _: Call(
        json={"session": setup.wire.session, "seq": 0, "generation": 0, "revision": 0}
    ),
    "list_stream_requests": lambda setup, _: Call(json={"session": setup.wire.session}),
    "bring_stream": lambda _setup, _: Call({"stream_id": "stm_unknown"}),
}


@contextmanager
def awaited_stream(setup: Setup) -> Iterator[str]:
    """Within the block, an exec on the wire node waits for its result. Yields the id of the stream."""
    made = setup.a.member.create(name=_unique("execs"), node_selector={"sandbox": "wire"})
    setup.admin.wait(made["id"], "scheduled")
    assignment = next(
        item for item in setup.wire.sync(instances=None).assignments if item.instance_id == made["id"]
    )
    setup.wire.sync(observed(assignment, "running"))
    path = f"/v1/instances/{made['id']}/exec"
    thread = threading.Thread(target=lambda: setup.a.member.post(path, json={"command": ["id"]}))
    thread.start()
    (stream,) = wait_until(setup.wire.stream_requests)
    yield stream.id
    thread.join(20)
    setup.admin.delete(f"/v1/instances/{made['id']}")
    setup.wire.sync()
