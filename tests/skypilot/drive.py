"""Runs steps of SkyPilot's own, unmodified code; `tests/client/test_skypilot.py` starts it.

    python drive.py CLUSTER STEP...

Each step prints a line of JSON: what SkyPilot's function returned, or the error that it raised.
"""

import dataclasses
import json
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

REGION, ZONE = "lab", "z1"


class Driver:
    """The steps, for one cluster. A step may have an argument: `launch=mooring__2xH100_80GB__48__498`."""

    def __init__(self, cluster: str) -> None:
        self._cluster = cluster
        self._provider = import_module("sky.provision.primeintellect.instance")
        vars(self._provider)["POLL_INTERVAL"] = 0.1  # instead of 5 s
        self._common = import_module("sky.provision.common")
        self._config = {"region": REGION, "zones": ZONE}

    def check(self, _argument: str) -> object:
        """Whether the credentials are right, as `sky check` asks."""
        clouds = import_module("sky.clouds")
        return clouds.PrimeIntellect.check_credentials(clouds.CloudCapability.COMPUTE)

    def authenticate(self, _argument: str) -> object:
        """Register SkyPilot's own SSH key, and return the path of the public key."""
        config: dict[str, Any] = {"auth": {}, "provider": {}, "available_node_types": {}}
        made = import_module("sky.authentication").setup_primeintellect_authentication(config)
        return made["auth"]["ssh_public_key"]

    def feasible(self, accelerators: str) -> object:
        """The instance types that `sky launch --gpus` considers, cheapest first."""
        cloud = import_module("sky.clouds").PrimeIntellect()
        wanted = accelerators or None
        resources = import_module("sky").Resources(cloud=cloud, accelerators=wanted)
        found = cloud.get_feasible_launchable_resources(resources, 1)
        return [each.instance_type for each in found.resources_list]

    def offers(self, name: str) -> object:
        """What `sky gpus list` shows of an accelerator: its counts, and where they are."""
        found = import_module("sky.catalog").list_accelerators(clouds="primeintellect", name_filter=name)
        return sorted(
            (each.accelerator_count, each.region, each.device_memory)
            for items in found.values()
            for each in items
        )

    def size(self, instance_type: str) -> object:
        return import_module("sky.catalog").get_vcpus_mem_from_instance_type(
            instance_type, clouds="primeintellect"
        )

    def launch(self, instance_type: str) -> object:
        node_config = {"InstanceType": instance_type, "DiskSize": 256}
        config = self._common.ProvisionConfig(
            provider_config=self._config, authentication_config={}, docker_config={}, node_config=node_config,
            count=1, tags={}, resume_stopped_nodes=False, ports_to_open_on_launch=None,
        )  # fmt: skip
        record = self._provider.run_instances(REGION, self._cluster, self._cluster, config)
        return dataclasses.asdict(record)

    def query(self, _argument: str) -> object:
        found = self._provider.query_instances(self._cluster, self._cluster, self._config)
        return {pod_id: status.name for pod_id, (status, _reason) in found.items()}

    def info(self, _argument: str) -> object:
        info = self._provider.get_cluster_info(REGION, self._cluster, self._config)
        (head,) = info.instances[info.head_instance_id]
        return {"user": info.ssh_user, "ip": head.external_ip, "port": head.ssh_port}

    def run(self, command: str) -> object:
        """Run a command with SkyPilot's own SSH client; the exit code and output."""
        info: Any = self.info("")
        private, _public = import_module("sky.utils.auth_utils").get_or_generate_keys()
        runner = import_module("sky.utils.command_runner").SSHCommandRunner(
            (info["ip"], info["port"]), info["user"], private, None
        )
        return runner.run(command, require_outputs=True, stream_logs=False)

    def down(self, _argument: str) -> object:
        return self._provider.terminate_instances(self._cluster, self._config)


def main(cluster: str, *steps: str) -> None:
    driver = Driver(cluster)
    for step in steps:
        name, _, argument = step.partition("=")
        act: Callable[[str], object] = getattr(driver, name)
        try:
            found = {"returned": act(argument)}
        except Exception as error:
            found = {"raised": type(error).__name__, "message": str(error)}
        print(f"STEP {json.dumps(found)}", flush=True)


main(*sys.argv[1:])
