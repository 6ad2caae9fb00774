"""A node: a private Docker daemon with simulated NVIDIA GPUs in its own network namespace."""

import os
import shutil
import socket
from pathlib import Path

import docker
import docker.errors

from tests.testbed import filesystems, images, isolation
from tests.testbed.parts import program, search_path
from tests.testbed.processes import Daemon
from tests.testbed.workspace import Workspace

CLIENT_TIMEOUT_S = 10
# The same on every node, in separate namespaces.
CONTAINERS_SUBNET = "172.30.0.1/24"
TOOLKIT_VERSION = "1.19.1"

CONTAINERD_CONFIGURATION = """\
version = 2
root = "{folder}/containerd"
state = "{folder}/run/containerd"
disabled_plugins = [{disabled}]
[grpc]
  address = "{folder}/containerd.sock"
"""
# Docker uses none of these, and each requires kernel features that the machine may lack.
UNUSED_PLUGINS = (
    "io.containerd.grpc.v1.cri",
    "io.containerd.internal.v1.opt",
    "io.containerd.snapshotter.v1.aufs",
    "io.containerd.snapshotter.v1.btrfs",
    "io.containerd.snapshotter.v1.devmapper",
    "io.containerd.snapshotter.v1.zfs",
)

# dockerd registers its "nvidia" device driver when it finds this name in its PATH at its start.
HOOK = "nvidia-container-runtime-hook"
TOOLKIT = "nvidia-ctk"
STUBS = {
    HOOK: "#!/bin/sh\nexit 0\n",
    TOOLKIT: f'#!/bin/sh\necho "NVIDIA Container Toolkit CLI version {TOOLKIT_VERSION}"\n',
}


class DockerNode:
    """One machine of the fleet, as far as Docker and the network are concerned.

    Each node has a containerd of its own, as real nodes have. By default, dockerd 20.10 would use the
    system's containerd if one runs, and otherwise start a containerd that ends together with dockerd.
    """

    def __init__(
        self, workspace: Workspace, *, live_restore: bool = True, filesystem: str = "", size_mib: int = 1024
    ) -> None:
        """
        Args:
            filesystem: the type of a new filesystem for Docker's data, in a file of `size_mib`; "": the data
                is on the machine's filesystem.
        """
        self._workspace = workspace
        self._host = workspace.take_host()
        self._client: docker.DockerClient | None = None
        self.name = f"{workspace.prefix}-{self._host}"
        self.address = workspace.node_address(self._host)
        self.folder = workspace.folder(self.name)
        self.socket = self.folder / "docker.sock"
        self.url = f"unix://{self.socket}"
        if filesystem:
            options = filesystems.KINDS[filesystem].options
            image, data = self.folder / "data.img", self.folder / "data"
            why = filesystems.mount(filesystem, image, size_mib, data, options=options)
            assert not why, why
        self.bin_dir = _write_stubs(self.folder / "bin")
        isolation.make_bridge(workspace.prefix, workspace.root_address)
        self.namespace = isolation.make_namespace(
            self.name, workspace.prefix, self.address, workspace.root_address
        )
        self.containerd = Daemon("containerd", self._containerd_argv(), self.folder, self.environment)
        self.dockerd = Daemon("dockerd", self._dockerd_argv(live_restore), self.folder, self.environment)

    @property
    def environment(self) -> dict[str, str]:
        """The environment of programs on this node. Its PATH begins with the stubs of NVIDIA's toolkit."""
        return {**os.environ, "PATH": f"{self.bin_dir}{os.pathsep}{search_path()}"}

    @property
    def client(self) -> docker.DockerClient:
        """A client that can be used until the node is destroyed, also after a restart of dockerd."""
        if self._client is None:
            self._client = docker.DockerClient(base_url=self.url, timeout=CLIENT_TIMEOUT_S)
        return self._client

    def inside(self, *argv: str) -> list[str]:
        """The command that runs `argv` in the node's network.

        Not `ip netns exec`, which mounts /sys again: dockerd then finds no devices control group.
        """
        return [program("nsenter"), f"--net={self.namespace}", *argv]

    def start(self) -> None:
        """Start the daemons that are not running."""
        (self.folder / "run").mkdir(exist_ok=True)
        if not self.containerd.running:
            self.containerd.start(lambda: _accepts(self.folder / "containerd.sock"))
        if not self.dockerd.running:
            # If another process now has the pid in the file, dockerd would not start.
            self._pidfile.unlink(missing_ok=True)
            self.dockerd.start(lambda: _answers_ping(self.socket))

    def load_images(self) -> None:
        images.import_images(self.client)

    def stop(self) -> None:
        """Stop dockerd. With live-restore, its containers keep running."""
        self.dockerd.stop()

    def kill(self) -> None:
        """Kill dockerd only, with SIGKILL."""
        self.dockerd.kill()

    def freeze(self) -> None:
        """Freeze dockerd: it accepts connections but does not answer. Containers keep running."""
        self.dockerd.freeze()

    def thaw(self) -> None:
        self.dockerd.thaw()

    def disconnect(self) -> None:
        """Disconnect the node from the network: its packets are dropped."""
        isolation.set_link(self.name, "down")

    def reconnect(self) -> None:
        isolation.set_link(self.name, "up")

    def power_off(self) -> None:
        """Simulate a power failure: containers die, and `start` boots the machine with its disk only."""
        isolation.end_processes(self.name, self.folder)
        self.dockerd.kill()
        self.containerd.kill()
        isolation.unmount_within(self.folder)
        isolation.remove_control_groups(self.name)
        shutil.rmtree(self.folder / "run", ignore_errors=True)

    def remove_containers(self) -> None:
        """Remove the containers and networks of a test."""
        for container in self.client.containers.list(all=True, sparse=True):
            try:
                container.remove(force=True, v=True)
            except docker.errors.NotFound:
                continue
        self.client.networks.prune()

    def destroy(self) -> None:
        if self._client is not None:
            self._client.close()
        self.power_off()
        isolation.clear(self.name, self.folder)
        shutil.rmtree(self.folder)
        self._workspace.give_back_host(self._host)

    @property
    def _pidfile(self) -> Path:
        return self.folder / "dockerd.pid"

    def _containerd_argv(self) -> list[str]:
        disabled = ", ".join(f'"{plugin}"' for plugin in UNUSED_PLUGINS)
        configuration = self.folder / "containerd.toml"
        configuration.write_text(CONTAINERD_CONFIGURATION.format(folder=self.folder, disabled=disabled))
        return self.inside(program("containerd"), "--config", str(configuration))

    def _dockerd_argv(self, live_restore: bool) -> list[str]:
        return self.inside(
            program("dockerd"),
            f"--host={self.url}",
            f"--data-root={self.folder}/data",
            f"--exec-root={self.folder}/run/docker",
            f"--pidfile={self._pidfile}",
            f"--containerd={self.folder}/containerd.sock",
            f"--bip={CONTAINERS_SUBNET}",
            f"--insecure-registry={self._workspace.subnet}",
            # With systemd, this would be the name of a slice.
            "--exec-opt=native.cgroupdriver=cgroupfs",
            f"--cgroup-parent=/{self.name}",
            *(("--live-restore",) if live_restore else ()),
        )


def _write_stubs(folder: Path) -> Path:
    folder.mkdir()
    for name, script in STUBS.items():
        stub = folder / name
        stub.write_text(script)
        stub.chmod(0o755)
    return folder


def _accepts(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0


def _answers_ping(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(CLIENT_TIMEOUT_S)
        try:
            probe.connect(str(path))
            probe.sendall(b"GET /_ping HTTP/1.0\r\n\r\n")
            return b" 200 " in probe.recv(64)
        except OSError:
            return False
