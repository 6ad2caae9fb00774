"""Who may call what: one row for each operation. `api/auth/authorization.py` rejects a route without a row.

An operation with an `action` writes one audit row; `api/http/transactions.py` ensures that it does.
The tests compare this table with the OpenAPI document and call every operation with every kind of credential.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from mooring.core.access import Permission


class Who(StrEnum):
    PUBLIC = "public"
    NODE = "node"
    CALLER = "caller"


class ActionClass(StrEnum):
    """Operations that share one rate limit."""

    READ = "read"
    WRITE = "write"
    EXEC = "exec"
    STREAM = "stream"  # may stay open for long: logs, events and waits


@dataclass(frozen=True, slots=True)
class Rule:
    """Who may call an operation.

    Attributes:
        permission: required in the project concerned (`admin`: required everywhere); null: any valid
            credential is enough.
        action: its name in the audit log; null: it changes nothing.
        cost: how many requests of its class it counts as in the rate limits.
    """

    who: Who
    permission: Permission | None = Permission.ADMIN
    action: str | None = None
    action_class: ActionClass = ActionClass.READ
    cost: int = 1


# An operation that runs the scheduler costs as much as about ten others (benchmarks/floods.py).
ASKS_SCHEDULER = 10
# Extra cost of a create that runs the scheduler: with `dry_run`, and with `on_capacity: fail`.
DRY_RUN_EXTRA = 3
AT_ONCE_EXTRA = 1


def _reads(permission: Permission, action_class: ActionClass = ActionClass.READ, cost: int = 1) -> Rule:
    return Rule(Who.CALLER, permission, None, action_class, cost)


def _does(permission: Permission, action: str, action_class: ActionClass = ActionClass.WRITE) -> Rule:
    return Rule(Who.CALLER, permission, action, action_class)


_PUBLIC = Rule(Who.PUBLIC)
_NODE = Rule(Who.NODE)
_READ, _WRITE, _EXEC = Permission.READ, Permission.WRITE, Permission.EXEC
_OWN, _ADMIN, _STREAM = Permission.OWN, Permission.ADMIN, ActionClass.STREAM

RULES: Final[Mapping[str, Rule]] = {
    # instances
    "list_instances": _reads(_READ),
    "get_instance": _reads(_READ),
    "wait_for_instance": _reads(_READ, _STREAM),
    "get_instance_logs": _reads(_READ, _STREAM),
    "get_instance_metrics": _reads(_READ),
    "list_instance_events": _reads(_READ),
    "explain_instance": _reads(_READ, cost=ASKS_SCHEDULER),
    "create_instance": _does(_WRITE, "instance.create"),
    "update_instance": _does(_WRITE, "instance.update"),
    "delete_instance": _does(_WRITE, "instance.delete"),
    "stop_instance": _does(_WRITE, "instance.stop"),
    "start_instance": _does(_WRITE, "instance.start"),
    "restart_instance": _does(_WRITE, "instance.restart"),
    "exec_in_instance": _does(_EXEC, "instance.exec", ActionClass.EXEC),
    "list_instance_groups": _reads(_READ),
    "get_instance_group": _reads(_READ),
    "explain_instance_group": _reads(_READ, cost=ASKS_SCHEDULER),
    "create_instance_group": _does(_WRITE, "instance_group.create"),
    "delete_instance_group": _does(_WRITE, "instance_group.delete"),
    "stop_instance_group": _does(_WRITE, "instance_group.stop"),
    "start_instance_group": _does(_WRITE, "instance_group.start"),
    # A reservation takes GPUs from all other projects, so only admins make one; its members see it
    "list_reservations": _reads(_READ),
    "get_reservation": _reads(_READ),
    "create_reservation": _does(_ADMIN, "reservation.create"),
    "update_reservation": _does(_ADMIN, "reservation.update"),
    "delete_reservation": _does(_ADMIN, "reservation.delete"),
    # the queue hides who owns the entries of other projects; list_instance_types also shows what is free
    "get_queue": _reads(_READ, cost=ASKS_SCHEDULER),
    "get_fragmentation": _reads(_READ),
    # nodes and GPUs: every caller sees all of them, but not what other projects run on them (api/views)
    "list_nodes": _reads(_READ),
    "get_node": _reads(_READ),
    "list_gpus": _reads(_READ),
    "get_gpu": _reads(_READ),
    "get_gpu_metrics": _reads(_READ),
    "list_gpu_incidents": _reads(_READ),
    "list_instance_types": _reads(_READ),
    "update_node": _does(_ADMIN, "node.update"),
    "cordon_node": _does(_ADMIN, "node.cordon"),
    "uncordon_node": _does(_ADMIN, "node.uncordon"),
    "drain_node": _does(_ADMIN, "node.drain"),
    "approve_node": _does(_ADMIN, "node.approve"),
    "renew_credential": _does(_ADMIN, "node.ask_to_renew_credential"),
    "delete_node": _does(_ADMIN, "node.delete"),
    "clear_gpu": _does(_ADMIN, "gpu.clear"),
    "create_join_token": _does(_ADMIN, "join_token.create"),
    # events
    "list_events": _reads(_READ, _STREAM),
    # projects and people
    "list_projects": _reads(_READ),
    "get_project": _reads(_READ),
    "create_project": _does(_ADMIN, "project.create"),
    "update_project": _does(_OWN, "project.update"),  # quotas, weight, images and profile: admins only
    "delete_project": _does(_ADMIN, "project.delete"),
    "list_members": _reads(_READ),
    "put_member": _does(_OWN, "member.put"),
    "delete_member": _does(_READ, "member.delete"),  # yourself; others only as an owner
    "list_users": _reads(_OWN),  # an owner finds one person by e-mail; admins see all
    "get_user": _reads(_ADMIN),
    "create_user": _does(_ADMIN, "user.create"),
    "update_user": _does(_ADMIN, "user.update"),
    "delete_user": _does(_ADMIN, "user.delete"),
    # keys: all callers their own, owners those of their project
    "get_me": Rule(Who.CALLER, None),
    "list_api_keys": _reads(_READ),
    "get_api_key": _reads(_READ),
    "create_api_key": _does(_READ, "api_key.create"),
    "delete_api_key": _does(_READ, "api_key.delete"),
    "list_audit_log": _reads(_OWN, _STREAM),
    "get_audit_head": _reads(_ADMIN),
    # members use secrets, so they may create them
    "list_secrets": _reads(_READ),
    "get_secret": _reads(_READ),
    "create_secret": _does(_WRITE, "secret.create"),
    "replace_secret": _does(_WRITE, "secret.replace"),
    "delete_secret": _does(_WRITE, "secret.delete"),
    "list_registries": _reads(_READ),
    "get_registry": _reads(_READ),
    "create_registry": _does(_OWN, "registry.create"),
    "replace_registry": _does(_OWN, "registry.replace"),
    "delete_registry": _does(_OWN, "registry.delete"),
    # the service
    "get_health": _PUBLIC,
    "get_readiness": _PUBLIC,
    "get_metrics": _reads(Permission.METRICS),
    "docs": _PUBLIC,
    "asset": _PUBLIC,
    # nodes
    "join_node": _PUBLIC,  # the token in its body is the credential
    "open_node_session": _NODE,
    "renew_node_credential": _NODE,
    "sync_node": _NODE,
    "hand_out_start_secrets": _NODE,
    "list_stream_requests": _NODE,
    "bring_stream": _NODE,
}
