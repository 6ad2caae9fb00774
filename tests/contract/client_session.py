# mypy: ignore-errors
# It runs in the tools' own environment, next to the generated client.
"""A session with the generated client: create, wait for, read, stop and delete an instance.

    python client_session.py <URL> <key>

Prints the running instance as JSON.
"""

import json
import sys

from mooring_client.api.gpus import list_gpus
from mooring_client.api.instances import (
    create_instance,
    delete_instance,
    get_instance,
    get_instance_logs,
    list_instances,
    stop_instance,
    wait_for_instance,
)
from mooring_client.models import (
    GpuRequest,
    Instance,
    InstanceCreate,
    InstanceStop,
    Problem,
    WaitForInstanceState,
)

from mooring_client import AuthenticatedClient


def main(url: str, key: str) -> None:
    client = AuthenticatedClient(base_url=url, token=key, raise_on_unexpected_status=True, timeout=30)
    requested = InstanceCreate(image="busybox:1.36", name="by-a-client", gpus=GpuRequest(count=2))
    made = create_instance.sync(client=client, body=requested)
    assert isinstance(made, Instance), made
    assert _wait(client, made.id, WaitForInstanceState.RUNNING)
    running = get_instance.sync(made.id, client=client)
    assert [one.id for one in list_instances.sync(client=client).items] == [made.id]
    holders = {gpu.instance_id for gpu in list_gpus.sync(client=client).items}
    assert made.id in holders, holders
    assert get_instance_logs.sync_detailed(made.id, client=client).status_code == 200
    taken = create_instance.sync(client=client, body=requested)
    assert isinstance(taken, Problem), taken
    assert (taken.status, taken.code) == (409, "name_taken"), taken
    stop_instance.sync(made.id, client=client, body=InstanceStop(timeout_s=0))
    assert _wait(client, made.id, WaitForInstanceState.STOPPED)
    delete_instance.sync(made.id, client=client)
    gone = get_instance.sync(made.id, client=client)
    assert isinstance(gone, Problem), gone
    assert gone.status == 404, gone
    print(json.dumps(running.to_dict()))


def _wait(client, instance_id, state):
    return wait_for_instance.sync(instance_id, client=client, state=state, timeout_s=20).reached


if __name__ == "__main__":
    main(*sys.argv[1:])
