"""Which images run: the limits of an image's configuration. Pure.

All of it is the text of whoever built the image. Docker copies it into every container, and returns it with
every list and every "inspect": without limits one image makes each look at the node slow.
"""

import json
from collections.abc import Mapping
from typing import Any, Final

from mooring.agent.docker.create import LABEL
from mooring.agent.runtime import StartRefused
from mooring.core.instance.state import Reason

_KIB: Final = 1024
# Far above what images have: a few KiB of variables, and tens of KiB in the labels that buildpacks write.
MOST_VARIABLES: Final = 1024
MOST_ENV_BYTES: Final = 128 * _KIB
MOST_LABELS: Final = 512
MOST_LABEL_NAME_BYTES: Final = 16 * _KIB  # these are in every list; the values are not taken over
MOST_PORTS: Final = 256
MOST_CONFIG_BYTES: Final = 512 * _KIB
_NAMED: Final = 5


def require_acceptable(image: str, inspected: Mapping[str, Any]) -> None:
    """Refuse an image by the engine's description of it.

    Raises:
        StartRefused: `image_config_refused`: the message says what is wrong with it.
    """
    if (why := _why_not(inspected.get("Config") or {})) is not None:
        message = f"{image} cannot be run: {why}; build the image without that"
        raise StartRefused(Reason(code="image_config_refused", message=message))


def _why_not(config: Mapping[str, Any]) -> str | None:
    labels, env = config.get("Labels") or {}, config.get("Env") or ()
    if reserved := sorted(name for name in labels if name.lower().startswith(LABEL)):
        named = ", ".join(name[:100] for name in reserved[:_NAMED])
        return f"it has labels beginning with {LABEL}, which are Mooring's own ({named})"
    sizes = (
        (len(labels), MOST_LABELS, "labels"),
        (_bytes(labels), MOST_LABEL_NAME_BYTES, "bytes in the names of its labels"),
        (len(env), MOST_VARIABLES, "environment variables"),
        (_bytes(env), MOST_ENV_BYTES, "bytes of environment variables"),
        (len(config.get("ExposedPorts") or ()), MOST_PORTS, "exposed ports"),
        (len(json.dumps(config)), MOST_CONFIG_BYTES, "bytes of configuration"),
    )
    for size, most, what in sizes:
        if size > most:
            return f"it has {size} {what}, and at most {most} are accepted"
    return None


def _bytes(texts: Any) -> int:
    return sum(len(text.encode(errors="replace")) for text in texts)
