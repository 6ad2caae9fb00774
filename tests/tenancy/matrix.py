"""The access matrix: the status of every operation for each kind of caller.

Every request (`tests/tenancy/calls.py`) names an existing resource of project A, so 2xx means allowed and 404
means hidden. `test_matrix.py` checks the matrix for every operation of the OpenAPI document.

A caller without the permission in any project gets 403 for every ID, which reveals nothing. A caller with the
permission in another project (an owner of B on A's members) gets 404.
"""

CALLERS = (
    "no key", "wrong", "expired", "revoked", "b member", "b owner",
    "viewer", "member", "owner", "admin", "node",
)  # fmt: skip

# fmt: off
_TABLE = {
    #                        no key wrong expired revoked b member b owner viewer member owner admin node
    "list_instances":       "401    401   401     401     200      200     200    200    200   200   401",
    "get_instance":         "401    401   401     401     404      404     200    200    200   200   401",
    "wait_for_instance":    "401    401   401     401     404      404     200    200    200   200   401",
    "get_instance_logs":    "401    401   401     401     404      404     200    200    200   200   401",
    "get_instance_metrics": "401    401   401     401     404      404     200    200    200   200   401",
    "list_instance_events": "401    401   401     401     404      404     200    200    200   200   401",
    "explain_instance":     "401    401   401     401     404      404     200    200    200   200   401",
    "create_instance":      "401    401   401     401     404      404     403    201    201   201   401",
    "put_instance":         "401    401   401     401     404      404     403    200    200   200   401",
    "apply_instance":       "401    401   401     401     404      404     403    201    201   201   401",
    "update_instance":      "401    401   401     401     404      404     403    200    200   200   401",
    "delete_instance":      "401    401   401     401     404      404     403    202    202   202   401",
    "stop_instance":        "401    401   401     401     404      404     403    202    202   202   401",
    "start_instance":       "401    401   401     401     404      404     403    202    202   202   401",
    "restart_instance":     "401    401   401     401     404      404     403    202    202   202   401",
    "exec_in_instance":     "401    401   401     401     404      404     403    200    200   200   401",
    # 426: without a WebSocket handshake.
    "stream_exec_in_instance": "401 401   401     401     404      404     403    426    426   426   401",
    "stream_attach_to_instance": "401 401 401     401     404      404     403    426    426   426   401",
    "stream_instance_port": "401    401   401     401     404      404     403    426    426   426   401",
    "create_port_link":     "401    401   401     401     404      404     403    201    201   201   401",
    #                        no key wrong expired revoked b member b owner viewer member owner admin node
    "list_instance_groups":  "401   401   401     401     200      200     200    200    200   200   401",
    "get_instance_group":    "401   401   401     401     404      404     200    200    200   200   401",
    "create_instance_group": "401   401   401     401     404      404     403    201    201   201   401",
    "apply_instance_group":  "401   401   401     401     404      404     403    201    201   201   401",
    "delete_instance_group": "401   401   401     401     404      404     403    202    202   202   401",
    "stop_instance_group":   "401   401   401     401     404      404     403    202    202   202   401",
    "start_instance_group":  "401   401   401     401     404      404     403    202    202   202   401",
    "explain_instance_group": "401  401   401     401     404      404     200    200    200   200   401",
    "list_reservations":    "401    401   401     401     200      200     200    200    200   200   401",
    "get_reservation":      "401    401   401     401     404      404     200    200    200   200   401",
    "create_reservation":   "401    401   401     401     403      403     403    403    403   201   401",
    "apply_reservation":    "401    401   401     401     403      403     403    403    403   201   401",
    "update_reservation":   "401    401   401     401     403      403     403    403    403   200   401",
    "delete_reservation":   "401    401   401     401     403      403     403    403    403   204   401",
    "list_volumes":         "401    401   401     401     200      200     200    200    200   200   401",
    "get_volume":           "401    401   401     401     404      404     200    200    200   200   401",
    "create_volume":        "401    401   401     401     404      404     403    201    201   201   401",
    "put_volume":           "401    401   401     401     404      404     403    200    200   200   401",
    "apply_volume":         "401    401   401     401     404      404     403    201    201   201   401",
    "update_volume":        "401    401   401     401     404      404     403    200    200   200   401",
    "delete_volume":        "401    401   401     401     404      404     403    202    202   202   401",
    "get_queue":            "401    401   401     401     200      200     200    200    200   200   401",
    "get_fragmentation":    "401    401   401     401     200      200     200    200    200   200   401",
    #                        no key wrong expired revoked b member b owner viewer member owner admin node
    "list_nodes":           "401    401   401     401     200      200     200    200    200   200   401",
    "get_node":             "401    401   401     401     200      200     200    200    200   200   401",
    "list_gpus":            "401    401   401     401     200      200     200    200    200   200   401",
    "get_gpu":              "401    401   401     401     200      200     200    200    200   200   401",
    "get_gpu_metrics":      "401    401   401     401     403      403     200    200    200   200   401",
    "list_gpu_incidents":   "401    401   401     401     200      200     200    200    200   200   401",
    "list_instance_types":  "401    401   401     401     200      200     200    200    200   200   401",
    "update_node":          "401    401   401     401     403      403     403    403    403   200   401",
    "cordon_node":          "401    401   401     401     403      403     403    403    403   200   401",
    "uncordon_node":        "401    401   401     401     403      403     403    403    403   200   401",
    "approve_node":         "401    401   401     401     403      403     403    403    403   200   401",
    "drain_node":           "401    401   401     401     403      403     403    403    403   200   401",
    "renew_credential":     "401    401   401     401     403      403     403    403    403   202   401",
    "delete_node":          "401    401   401     401     403      403     403    403    403   204   401",
    "clear_gpu":            "401    401   401     401     403      403     403    403    403   200   401",
    "create_join_token":    "401    401   401     401     403      403     403    403    403   201   401",
    #                        no key wrong expired revoked b member b owner viewer member owner admin node
    "list_events":          "401    401   401     401     200      200     200    200    200   200   401",
    "list_projects":        "401    401   401     401     200      200     200    200    200   200   401",
    "get_project":          "401    401   401     401     404      404     200    200    200   200   401",
    "create_project":       "401    401   401     401     403      403     403    403    403   201   401",
    # Owners of other projects get 403, as for a project that does not exist, which only admins may create.
    "apply_project":        "401    401   401     401     403      403     403    403    200   200   401",
    "update_project":       "401    401   401     401     403      404     403    403    200   200   401",
    "delete_project":       "401    401   401     401     403      403     403    403    403   204   401",
    "list_members":         "401    401   401     401     404      404     200    200    200   200   401",
    "put_member":           "401    401   401     401     403      404     403    403    200   200   401",
    "delete_member":        "401    401   401     401     404      404     403    403    204   204   401",
    "list_users":           "401    401   401     401     403      200     403    403    200   200   401",
    "get_user":             "401    401   401     401     403      403     403    403    403   200   401",
    "create_user":          "401    401   401     401     403      403     403    403    403   201   401",
    "update_user":          "401    401   401     401     403      403     403    403    403   200   401",
    "delete_user":          "401    401   401     401     403      403     403    403    403   204   401",
    #                        no key wrong expired revoked b member b owner viewer member owner admin node
    "get_me":               "401    401   401     401     200      200     200    200    200   200   401",
    "list_api_keys":        "401    401   401     401     200      200     200    200    200   200   401",
    "get_api_key":          "401    401   401     401     404      404     200    200    200   200   401",
    "create_api_key":       "401    401   401     401     404      404     201    201    201   201   401",
    "delete_api_key":       "401    401   401     401     404      404     204    204    204   204   401",
    "get_docker_context":   "401    401   401     401     409      409     409    409    409   409   401",
    "get_my_ssh":           "401    401   401     401     200      200     200    200    200   200   401",
    "list_ssh_keys":        "401    401   401     401     200      200     200    200    200   200   401",
    "get_ssh_key":          "401    401   401     401     404      404     404    200    200   200   401",
    "create_ssh_key":       "401    401   401     401     404      404     403    201    201   201   401",
    "delete_ssh_key":       "401    401   401     401     404      404     403    204    204   204   401",
    "create_ssh_certificate": "401  401   401     401     201      201     403    201    201   201   401",
    "list_audit_log":       "401    401   401     401     403      200     403    403    200   200   401",
    "get_audit_head":       "401    401   401     401     403      403     403    403    403   200   401",
    #                        no key wrong expired revoked b member b owner viewer member owner admin node
    "list_templates":       "401    401   401     401     200      200     200    200    200   200   401",
    "get_template":         "401    401   401     401     404      404     200    200    200   200   401",
    "render_template":      "401    401   401     401     404      404     200    200    200   200   401",
    "create_template":      "401    401   401     401     404      404     403    201    201   201   401",
    "apply_template":       "401    401   401     401     404      404     403    201    201   201   401",
    "delete_template":      "401    401   401     401     404      404     403    204    204   204   401",
    "list_secrets":         "401    401   401     401     200      200     200    200    200   200   401",
    "get_secret":           "401    401   401     401     404      404     200    200    200   200   401",
    "create_secret":        "401    401   401     401     404      404     403    201    201   201   401",
    "replace_secret":       "401    401   401     401     404      404     403    200    200   200   401",
    "delete_secret":        "401    401   401     401     404      404     403    204    204   204   401",
    "list_registries":      "401    401   401     401     200      200     200    200    200   200   401",
    "get_registry":         "401    401   401     401     404      404     200    200    200   200   401",
    "create_registry":      "401    401   401     401     403      404     403    403    201   201   401",
    "replace_registry":     "401    401   401     401     403      404     403    403    200   200   401",
    "delete_registry":      "401    401   401     401     403      404     403    403    204   204   401",
    #                        no key wrong expired revoked b member b owner viewer member owner admin node
    "list_webhooks":        "401    401   401     401     403      200     403    403    200   200   401",
    "get_webhook":          "401    401   401     401     403      404     403    403    200   200   401",
    "create_webhook":       "401    401   401     401     403      404     403    403    201   201   401",
    "apply_webhook":        "401    401   401     401     403      404     403    403    201   201   401",
    "update_webhook":       "401    401   401     401     403      404     403    403    200   200   401",
    "delete_webhook":       "401    401   401     401     403      404     403    403    204   204   401",
    "rotate_webhook_secret": "401 401   401     401     403      404     403    403    200   200   401",
    "test_webhook":         "401    401   401     401     403      404     403    403    202   202   401",
    "list_webhook_deliveries": "401 401   401     401     403      404     403    403    200   200   401",
    "replay_webhook_delivery": "401 401   401     401     403      404     403    403    202   202   401",
    #                        no key wrong expired revoked b member b owner viewer member owner admin node
    "get_health":           "200    200   200     200     200      200     200    200    200   200   200",
    "get_readiness":        "200    200   200     200     200      200     200    200    200   200   200",
    "get_metrics":          "401    401   401     401     403      403     403    403    403   200   401",
    # The credential is the join token in the body, which is always valid.
    "join_node":            "201    201   201     201     201      201     201    201    201   201   201",
    "open_node_session":    "401    401   401     401     401      401     401    401    401   401   200",
    "renew_node_credential": "401    401   401     401     401      401     401    401    401   401   201",
    "sync_node":            "401    401   401     401     401      401     401    401    401   401   200",
    "hand_out_start_secrets": "401  401   401     401     401      401     401    401    401   401   404",
    "heartbeat":            "401    401   401     401     401      401     401    401    401   401   200",
    "list_stream_requests": "401    401   401     401     401      401     401    401    401   401   200",
    "bring_stream":         "401    401   401     401     401      401     401    401    401   401   404",
}
# fmt: on

MATRIX = {
    operation: dict(zip(CALLERS, map(int, statuses.split()), strict=True))
    for operation, statuses in _TABLE.items()
}
