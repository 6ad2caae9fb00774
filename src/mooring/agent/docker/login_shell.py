"""The login shell of a container's user, which only the container knows."""

from collections.abc import Sequence
from typing import Final

# An image may lack `id`, /etc/passwd, or the shell that /etc/passwd names.
_SCRIPT: Final = """
me=$(id -u 2>/dev/null) || me=0
found=/bin/sh
while IFS=: read -r name password uid gid full home shell; do
    if [ "$uid" = "$me" ]; then
        export USER="$name" LOGNAME="$name" HOME="${HOME:-$home}"
        [ -x "$shell" ] && found=$shell
        break
    fi
done 2>/dev/null </etc/passwd
export SHELL="$found"
exec "$found" "$@"
"""


def in_login_shell(command: Sequence[str]) -> list[str]:
    """Return a command that runs the login shell with the arguments of `command`, without its program."""
    return ["/bin/sh", "-c", _SCRIPT, *command]
