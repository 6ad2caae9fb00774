"""The shells of a container: the one for the agent's own scripts, and the login shell of its user."""

from collections.abc import Sequence
from typing import Any, Final

from cachetools import LRUCache

from mooring.agent.docker.errors import EngineRefused
from mooring.agent.docker.streams.engine_streams import EngineApi
from mooring.agent.docker.toolbox_mount import SHELL, TOOLBOX, toolbox_of
from mooring.agent.runtime import StreamRefused

_IMAGE_SHELL: Final = "/bin/sh"
_REMEMBERED: Final = 1000
_NO_SHELL: Final = (
    "the image has no /bin/sh, and its node had no toolbox when the instance started; the operator can build "
    "one (`mooring toolbox` on the node), and instances that start later have a shell, sftp and rsync"
)

# An image may lack `id`, /etc/passwd, or the shell that /etc/passwd names. PATH has its own programs first.
_SCRIPT: Final = f"""
me=0 found=
while read -r field real effective rest; do
    [ "$field" = Uid: ] && me=$effective
done 2>/dev/null </proc/self/status
while IFS=: read -r name password uid gid full home shell; do
    if [ "$uid" = "$me" ]; then
        export USER="$name" LOGNAME="$name" HOME="${{HOME:-$home}}"
        found=$shell
        break
    fi
done 2>/dev/null </etc/passwd
[ -x {SHELL} ] && export PATH="${{PATH:+$PATH:}}{TOOLBOX}/bin"
if ! [ -x "$found" ]; then
    found={_IMAGE_SHELL}
    [ -x "$found" ] || {{ found={SHELL}; PATH="$PATH:{TOOLBOX}/applets"; }}
fi
export SHELL="$found"
exec "$found" "$@"
"""


def in_login_shell(command: Sequence[str], shell: str) -> list[str]:
    """Return a command that runs the login shell with the arguments of `command`, without its program.

    Args:
        shell: finds the login shell.
    """
    return [shell, "-c", _SCRIPT, *command]


class ContainerShells:
    """The shells for the agent's own scripts. The engine is asked once for each container with a toolbox."""

    def __init__(self, engine: EngineApi) -> None:
        self._engine = engine
        self._with_toolbox: LRUCache[str, None] = LRUCache(_REMEMBERED)

    async def shell_of(self, container_id: str) -> str:
        """Return the toolbox's shell if the container has the mount, otherwise that of the image.

        Raises:
            StreamRefused: the container has neither.
            EngineRefused: it was removed.
            RuntimeUnavailable: the engine does not answer.
        """
        if container_id in self._with_toolbox:
            return SHELL
        path = f"/containers/{container_id}"
        inspected: dict[str, Any] = await self._engine.request("GET", f"{path}/json")
        if toolbox_of(inspected["HostConfig"]) is not None:
            self._with_toolbox[container_id] = None
            return SHELL
        try:
            await self._engine.request("HEAD", f"{path}/archive", params={"path": _IMAGE_SHELL})
        except EngineRefused as refused:
            if refused.status != 404:
                raise
            raise StreamRefused("exec_rejected", _NO_SHELL) from refused
        return _IMAGE_SHELL
