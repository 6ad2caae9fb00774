"""The working directory of a container. Pure."""

from mooring.agent.runtime import StartRefused
from mooring_client.schemas.paths import is_kernel_path, normal_path
from mooring_client.schemas.spec import InstanceSpec
from mooring_client.schemas.states import Reason


def working_dir(spec: InstanceSpec, of_image: str) -> str:
    """Return the working directory; "" is the engine's default.

    Raises:
        StartRefused: the directory is in a file system of the kernel.
    """
    requested = spec.working_dir or of_image
    if not requested:
        return ""
    path = normal_path(requested)
    if is_kernel_path(path):
        source = "instance" if spec.working_dir else "image"
        message = f"the {source}'s working directory is {path[:100]}; it must not be in /proc, /sys or /dev"
        raise StartRefused(Reason(code="working_dir_unusable", message=message))
    return path
