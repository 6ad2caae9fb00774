"""How many layers Docker downloads at a time, which all projects of a node share."""

import json
from pathlib import Path
from typing import Final

from mooring.agent.host.preflight import Check

DAEMON_CONFIG: Final = Path("/etc/docker/daemon.json")
DOCKERS_DEFAULT: Final = 3
ENOUGH: Final = 16
ADVISED: Final = 64
_NAME: Final = "concurrent downloads"
_OPTION: Final = "max-concurrent-downloads"


def downloads(config: Path = DAEMON_CONFIG) -> Check:
    """What Docker's configuration file says; its `docker info` does not tell."""
    try:
        said = json.loads(config.read_text() or "{}").get(_OPTION, DOCKERS_DEFAULT)
    except FileNotFoundError:
        said = DOCKERS_DEFAULT
    except (OSError, ValueError, AttributeError) as error:
        return Check.warning(_NAME, f"{config} cannot be read: {error}", "see that it is valid JSON")
    if isinstance(said, int) and said >= ENOUGH:
        return Check.fine(_NAME, f"{said} layers")
    detail = f"{said} layers at a time for all projects: one slow registry holds up other projects' pulls"
    mend = f'set "{_OPTION}": {ADVISED} in {config}, then reload Docker (SIGHUP); instances are not touched'
    return Check.warning(_NAME, detail, mend)
