"""Who may call what: one row for each operation. `api/auth/authorization.py` rejects a route without a row.

An operation with an `action` writes one audit row; `api/http/transactions.py` ensures it for all but exec.
The tests compare this table with the OpenAPI document and call every operation with every kind of credential.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from mooring.auth.rate_limits import ActionClass
from mooring.core.access import Permission


class Who(StrEnum):
    PUBLIC = "public"
    NODE = "node"
    CALLER = "caller"


@dataclass(frozen=True, slots=True)
class Rule:
    """Who may call an operation.

    Attributes:
        permission: required in the project concerned (`admin`: required everywhere); null: any valid
            credential is enough.
        action: its name in the audit log; null: for reads, and for operations of nodes.
        cost: as how many requests of its class it counts in the rate limits.
        own_turns: the operation limits its project's concurrent requests itself. If false, writes are limited
            before the operation.
    """

    who: Who
    permission: Permission | None = Permission.ADMIN
    action: str | None = None
    action_class: ActionClass = ActionClass.READ
    cost: int = 1
    own_turns: bool = False


# An operation that runs the scheduler takes about ten times as long as others (benchmarks/floods.py).
SCHEDULER_COST = 10
# Extra cost of a create that runs the scheduler: with `dry_run`, and with `on_capacity: fail`.
DRY_RUN_EXTRA = 3
IMMEDIATE_EXTRA = 1


def _read_rule(permission: Permission, action_class: ActionClass = ActionClass.READ, cost: int = 1) -> Rule:
    return Rule(Who.CALLER, permission, None, action_class, cost)


def _action_rule(permission: Permission, action: str, action_class: ActionClass = ActionClass.WRITE) -> Rule:
    return Rule(Who.CALLER, permission, action, action_class)


_PUBLIC = Rule(Who.PUBLIC)
_NODE = Rule(Who.NODE)
_READ, _WRITE, _EXEC = Permission.READ, Permission.WRITE, Permission.EXEC
_OWN, _ADMIN, _STREAM = Permission.OWN, Permission.ADMIN, ActionClass.STREAM

RULES: Final[Mapping[str, Rule]] = {
    # instances
    "list_instances": _read_rule(_READ),
    "get_instance": _read_rule(_READ),
    "wait_for_instance": _read_rule(_READ, _STREAM),
    "get_instance_logs": _read_rule(_READ, _STREAM),
    "get_instance_metrics": _read_rule(_READ),
    "list_instance_events": _read_rule(_READ),
    "explain_instance": _read_rule(_READ, cost=SCHEDULER_COST),
    "create_instance": replace(_action_rule(_WRITE, "instance.create"), own_turns=True),
    "put_instance": _action_rule(_WRITE, "instance.apply"),
    "apply_instance": _action_rule(_WRITE, "instance.apply"),
    "update_instance": _action_rule(_WRITE, "instance.update"),
    "delete_instance": replace(_action_rule(_WRITE, "instance.delete"), own_turns=True),
    "stop_instance": _action_rule(_WRITE, "instance.stop"),
    "start_instance": _action_rule(_WRITE, "instance.start"),
    "restart_instance": _action_rule(_WRITE, "instance.restart"),
    "exec_in_instance": _action_rule(_EXEC, "instance.exec", ActionClass.EXEC),
    "stream_exec_in_instance": _action_rule(_EXEC, "instance.exec", ActionClass.EXEC),
    "stream_attach_to_instance": _action_rule(_EXEC, "instance.attach", ActionClass.EXEC),
    "stream_instance_port": _action_rule(_EXEC, "instance.port", ActionClass.STREAM),
    "create_port_link": _action_rule(_EXEC, "port_link.create"),
    "list_instance_groups": _read_rule(_READ),
    "get_instance_group": _read_rule(_READ),
    "explain_instance_group": _read_rule(_READ, cost=SCHEDULER_COST),
    "create_instance_group": _action_rule(_WRITE, "instance_group.create"),
    "apply_instance_group": _action_rule(_WRITE, "instance_group.apply"),
    "delete_instance_group": _action_rule(_WRITE, "instance_group.delete"),
    "stop_instance_group": _action_rule(_WRITE, "instance_group.stop"),
    "start_instance_group": _action_rule(_WRITE, "instance_group.start"),
    # a reservation takes GPUs from other projects, so only admins create one; its project's members see it
    "list_reservations": _read_rule(_READ),
    "get_reservation": _read_rule(_READ),
    "create_reservation": _action_rule(_ADMIN, "reservation.create"),
    "apply_reservation": _action_rule(_ADMIN, "reservation.apply"),
    "update_reservation": _action_rule(_ADMIN, "reservation.update"),
    "delete_reservation": _action_rule(_ADMIN, "reservation.delete"),
    "list_volumes": _read_rule(_READ),
    "get_volume": _read_rule(_READ),
    "create_volume": _action_rule(_WRITE, "volume.create"),  # nfs: only admins
    "put_volume": _action_rule(_WRITE, "volume.apply"),
    "apply_volume": _action_rule(_WRITE, "volume.apply"),
    "update_volume": _action_rule(_WRITE, "volume.update"),
    "delete_volume": _action_rule(_WRITE, "volume.delete"),
    # the queue hides who owns the entries of other projects; list_instance_types also shows what is free
    "get_queue": _read_rule(_READ, cost=SCHEDULER_COST),
    "get_fragmentation": _read_rule(_READ),
    # nodes and GPUs: every caller sees all of them, but not the instances of other projects (api/views)
    "list_nodes": _read_rule(_READ),
    "get_node": _read_rule(_READ),
    "list_gpus": _read_rule(_READ),
    "get_gpu": _read_rule(_READ),
    "get_gpu_metrics": _read_rule(_READ),
    "list_gpu_incidents": _read_rule(_READ),
    "list_instance_types": _read_rule(_READ),
    "update_node": _action_rule(_ADMIN, "node.update"),
    "cordon_node": _action_rule(_ADMIN, "node.cordon"),
    "uncordon_node": _action_rule(_ADMIN, "node.uncordon"),
    "drain_node": _action_rule(_ADMIN, "node.drain"),
    "approve_node": _action_rule(_ADMIN, "node.approve"),
    "renew_credential": _action_rule(_ADMIN, "node.ask_to_renew_credential"),
    "delete_node": _action_rule(_ADMIN, "node.delete"),
    "clear_gpu": _action_rule(_ADMIN, "gpu.clear"),
    "create_join_token": _action_rule(_ADMIN, "join_token.create"),
    # events
    "list_events": _read_rule(_READ, _STREAM),
    # projects and people
    "list_projects": _read_rule(_READ),
    "get_project": _read_rule(_READ),
    "create_project": _action_rule(_ADMIN, "project.create"),
    "apply_project": _action_rule(_OWN, "project.apply"),  # as update_project; only admins create one
    "update_project": _action_rule(_OWN, "project.update"),  # quotas, weight, images and profile: admins only
    "delete_project": _action_rule(_ADMIN, "project.delete"),
    "list_members": _read_rule(_READ),
    "put_member": _action_rule(_OWN, "member.put"),
    "delete_member": _action_rule(_READ, "member.delete"),  # members remove themselves, owners also others
    "list_users": _read_rule(_OWN),  # an owner finds one person by e-mail; admins see all
    "get_user": _read_rule(_ADMIN),
    "create_user": _action_rule(_ADMIN, "user.create"),
    "update_user": _action_rule(_ADMIN, "user.update"),
    "delete_user": _action_rule(_ADMIN, "user.delete"),
    # keys: every caller manages their own, owners also those of their project
    "get_me": Rule(Who.CALLER, None),
    "list_api_keys": _read_rule(_READ),
    "get_api_key": _read_rule(_READ),
    "create_api_key": _action_rule(_READ, "api_key.create"),
    "delete_api_key": _action_rule(_READ, "api_key.delete"),
    "get_docker_context": Rule(Who.CALLER, None),
    "get_my_ssh": Rule(Who.CALLER, None),
    "list_ssh_keys": _read_rule(_READ),
    "get_ssh_key": _read_rule(_READ),
    "create_ssh_key": _action_rule(_EXEC, "ssh_key.create"),
    "delete_ssh_key": _action_rule(_EXEC, "ssh_key.delete"),
    "create_ssh_certificate": _action_rule(_EXEC, "ssh_certificate.create"),
    "list_audit_log": _read_rule(_OWN, _STREAM),
    "get_audit_head": _read_rule(_ADMIN),
    # members use secrets, so they may create them
    "list_secrets": _read_rule(_READ),
    "get_secret": _read_rule(_READ),
    "create_secret": _action_rule(_WRITE, "secret.create"),
    "replace_secret": _action_rule(_WRITE, "secret.replace"),
    "delete_secret": _action_rule(_WRITE, "secret.delete"),
    # global templates are seen by all, and changed by admins; rendering reads
    "list_templates": _read_rule(_READ),
    "get_template": _read_rule(_READ),
    "render_template": _read_rule(_READ),
    "create_template": _action_rule(_WRITE, "template.create"),
    "apply_template": _action_rule(_WRITE, "template.apply"),
    "delete_template": _action_rule(_WRITE, "template.delete"),
    "list_registries": _read_rule(_READ),
    "get_registry": _read_rule(_READ),
    "create_registry": _action_rule(_OWN, "registry.create"),
    "replace_registry": _action_rule(_OWN, "registry.replace"),
    "delete_registry": _action_rule(_OWN, "registry.delete"),
    # webhooks send a project's events elsewhere, and their URLs are often credentials: for owners only
    "list_webhooks": _read_rule(_OWN),
    "get_webhook": _read_rule(_OWN),
    "create_webhook": _action_rule(_OWN, "webhook.create"),
    "apply_webhook": _action_rule(_OWN, "webhook.apply"),
    "update_webhook": _action_rule(_OWN, "webhook.update"),
    "delete_webhook": _action_rule(_OWN, "webhook.delete"),
    "rotate_webhook_secret": _action_rule(_OWN, "webhook.rotate_secret"),
    "test_webhook": _action_rule(_OWN, "webhook.test"),
    "list_webhook_deliveries": _read_rule(_OWN),
    "replay_webhook_delivery": _action_rule(_OWN, "webhook.replay"),
    # Prime Intellect's API for SkyPilot, which is not in the OpenAPI document
    "list_prime_ssh_keys": _read_rule(_READ),
    "create_prime_ssh_key": _action_rule(_EXEC, "ssh_key.create"),
    "list_prime_pods": _read_rule(_READ),
    "get_prime_pod": _read_rule(_READ),
    "create_prime_pod": replace(_action_rule(_WRITE, "instance.create"), own_turns=True),
    "delete_prime_pod": replace(_action_rule(_WRITE, "instance.delete"), own_turns=True),
    # the service
    "get_health": _PUBLIC,
    "get_readiness": _PUBLIC,
    "get_metrics": _read_rule(Permission.METRICS),
    "docs": _PUBLIC,
    "asset": _PUBLIC,
    # nodes
    "join_node": _PUBLIC,  # the token in its body is the credential
    "open_node_session": _NODE,
    "renew_node_credential": _NODE,
    "sync_node": _NODE,
    "heartbeat": _NODE,
    "hand_out_start_secrets": _NODE,
    "list_stream_requests": _NODE,
    "bring_stream": _NODE,
}
