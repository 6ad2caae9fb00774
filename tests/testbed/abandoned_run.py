"""A test run that kills itself while a node with a container runs. `test_testbed` checks the cleanup."""

import os
import signal

from tests.testbed.dockerd import DockerNode
from tests.testbed.images import BUSYBOX
from tests.testbed.workspace import Workspace


def main() -> None:
    node = DockerNode(Workspace())
    node.start()
    node.load_images()
    container = node.client.containers.run(BUSYBOX, detach=True)
    container.reload()
    print(node.folder, node.dockerd.pid, node.containerd.pid, container.attrs["State"]["Pid"], flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
