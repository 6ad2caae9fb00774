"""Checks how many layers Docker downloads at a time for all projects of a node together."""

import json
from pathlib import Path
from typing import Final

from mooring.agent.host.preflight import Check

DAEMON_CONFIG: Final = Path("/etc/docker/daemon.json")
DOCKER_DEFAULT: Final = 3
MIN_DOWNLOADS: Final = 16
RECOMMENDED_DOWNLOADS: Final = 64
_NAME: Final = "concurrent downloads"
_OPTION: Final = "max-concurrent-downloads"


def downloads(config: Path = DAEMON_CONFIG) -> Check:
    """Check Docker's configuration file: `docker info` does not have the option."""
    try:
        limit = json.loads(config.read_text() or "{}").get(_OPTION, DOCKER_DEFAULT)
    except FileNotFoundError:
        limit = DOCKER_DEFAULT
    except (OSError, ValueError, AttributeError) as error:
        return Check.warning(_NAME, f"{config} cannot be read: {error}", "make it a readable JSON object")
    if isinstance(limit, int) and limit >= MIN_DOWNLOADS:
        return Check.fine(_NAME, f"{limit} layers")
    detail = f"{limit} layers at a time for all projects: one slow registry delays other projects' pulls"
    remedy = f'set "{_OPTION}": {RECOMMENDED_DOWNLOADS} in {config}, then reload Docker (SIGHUP)'
    return Check.warning(_NAME, detail, f"{remedy}; instances keep running")
