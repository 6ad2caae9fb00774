"""The default limits of containers on this machine, and the command of a container."""

import resource
from dataclasses import replace

from mooring.agent.docker.client import Document
from mooring.agent.docker.create import ContainerLimits


def limits_here() -> ContainerLimits:
    """Return the default limits, with as many open files as the engine may set: no more than this agent.

    An engine without CAP_SYS_RESOURCE fails every start with a higher limit than its own.
    """
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    default = ContainerLimits()
    if limit == resource.RLIM_INFINITY or limit >= default.open_files:
        return default
    return replace(default, open_files=limit)


def command_of(inspected: Document) -> list[str]:
    return [*(inspected["Config"].get("Entrypoint") or []), *(inspected["Config"].get("Cmd") or [])]
