# mypy: ignore-errors
# It runs in the tools' own environment, next to the generated client.
"""A session with the generated client: the life of an instance, as in tests/client/test_sdk.py.

    python client_session.py <URL> <key>

Prints the running instance as JSON.
"""

import json
import sys
from http import HTTPStatus

from generated import AuthenticatedClient
from generated.api.gpus import list_gpus
from generated.api.instances import (
    create_instance,
    delete_instance,
    exec_in_instance,
    explain_instance,
    get_instance,
    get_instance_logs,
    get_instance_metrics,
    list_instance_events,
    list_instances,
    stop_instance,
    update_instance,
    wait_for_instance,
)
from generated.models import (
    ExecBody,
    GpuRequest,
    InstanceCreate,
    InstanceCreateLabels,
    InstancePatch,
    InstanceStop,
    Port,
    Problem,
    WaitForInstanceState,
)


def main(url: str, key: str) -> None:
    client = AuthenticatedClient(base_url=url, token=key, raise_on_unexpected_status=True, timeout=30)
    made = _created(client)
    _is_running(client, made)
    running = get_instance.sync(made.id, client=client)
    _is_listed(client, made)
    _changes(client, running)
    ran = exec_in_instance.sync(made.id, client=client, body=ExecBody(command=["echo", "hello"]))
    assert (ran.exit_code, ran.stdout) == (0, "hello\n"), ran
    _is_deleted(client, made)
    print(json.dumps(running.to_dict()))


def _created(client):
    body = InstanceCreate(
        image="busybox:1.36",
        name="by-a-client",
        gpus=GpuRequest(count=2),
        ports=[Port(container=8888)],
        labels=InstanceCreateLabels.from_dict({"team": "vision"}),
    )
    made = create_instance.sync(client=client, body=body)
    assert (made.labels["team"], made.ports[0].container) == ("vision", 8888), made
    _fails(create_instance, client=client, body=body, status=HTTPStatus.CONFLICT, code="name_taken")
    return made


def _is_running(client, made) -> None:
    assert _wait(client, made, WaitForInstanceState.RUNNING)
    explained = explain_instance.sync(made.id, client=client)
    assert explained.state == "running", explained
    events = list_instance_events.sync(made.id, client=client)
    assert events.items[0].data["to"] == "pending", events
    assert len(get_instance_metrics.sync(made.id, client=client).items) == 2
    assert get_instance_logs.sync_detailed(made.id, client=client).status_code == HTTPStatus.OK


def _is_listed(client, made) -> None:
    page = list_instances.sync(client=client, limit=1)
    assert ([one.id for one in page.items], page.next_cursor) == ([made.id], None), page
    holders = {gpu.instance_id for gpu in list_gpus.sync(client=client).items}
    assert made.id in holders, holders


def _changes(client, running) -> None:
    seen = f'"{running.version}"'
    change = {"client": client, "body": InstancePatch(priority=60), "if_match": seen}
    assert update_instance.sync(running.id, **change).priority == 60
    _fails(update_instance, running.id, **change, status=412, code="precondition_failed")


def _is_deleted(client, made) -> None:
    stop_instance.sync(made.id, client=client, body=InstanceStop(timeout_s=0))
    assert _wait(client, made, WaitForInstanceState.STOPPED)
    delete_instance.sync(made.id, client=client)
    _fails(get_instance, made.id, client=client, status=HTTPStatus.NOT_FOUND, code="not_found")


def _fails(operation, *arguments, status, code, **more) -> None:
    answer = operation.sync(*arguments, **more)
    assert isinstance(answer, Problem), answer
    assert (answer.status, answer.code) == (status, code), answer


def _wait(client, made, state):
    return wait_for_instance.sync(made.id, client=client, state=state, timeout_s=20).reached


if __name__ == "__main__":
    main(*sys.argv[1:])
