"""Limits on the configuration of an image and on one pull.

The image's author writes the configuration. Docker copies it into every container and returns it with every
list and "inspect": without limits, one image slows down every report of the node.

The engine reports the compressed size of each layer when its download begins, so a pull is aborted before it
downloads more than the limit. No manifest has the unpacked size: the agent watches the disk while layers are
unpacked, and removes an image that proves too large.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from mooring.agent.disk.storage import DiskPolicy, Space
from mooring.agent.docker.create import LABEL_PREFIX
from mooring.agent.runtime import StartRefused
from mooring_client.schemas.states import Reason

MAX_IMAGE_MIB: Final = 50 * 1024
_KIB, _MIB = 2**10, 2**20
# Images have a few KiB of variables, and tens of KiB of labels from buildpacks.
MAX_VARIABLES: Final = 1024
MAX_ENV_BYTES: Final = 128 * _KIB
MAX_LABELS: Final = 512
MAX_LABEL_NAME_BYTES: Final = 16 * _KIB  # of all names, which are in every list; containers have no values
MAX_PORTS: Final = 256
MAX_CONFIG_BYTES: Final = 512 * _KIB
_MAX_NAMED_LABELS: Final = 5


def require_acceptable(image: str, inspected: Mapping[str, Any]) -> None:
    """Check the configuration of an inspected image.

    Raises:
        StartRefused: `image_config_refused`, with the violated limit in the message.
    """
    if (why := _why_not(inspected.get("Config") or {})) is not None:
        message = f"{image} cannot be run: {why}; build the image without that"
        raise StartRefused(Reason(code="image_config_refused", message=message))


def _why_not(config: Mapping[str, Any]) -> str | None:
    labels, env = config.get("Labels") or {}, config.get("Env") or ()
    if reserved := sorted(name for name in labels if name.lower().startswith(LABEL_PREFIX)):
        named = ", ".join(name[:100] for name in reserved[:_MAX_NAMED_LABELS])
        return f"labels that begin with {LABEL_PREFIX} are reserved for Mooring (it has {named})"
    sizes = (
        (len(labels), MAX_LABELS, "labels"),
        (_bytes(labels), MAX_LABEL_NAME_BYTES, "bytes in the names of its labels"),
        (len(env), MAX_VARIABLES, "environment variables"),
        (_bytes(env), MAX_ENV_BYTES, "bytes of environment variables"),
        (len(config.get("ExposedPorts") or ()), MAX_PORTS, "exposed ports"),
        (len(json.dumps(config)), MAX_CONFIG_BYTES, "bytes of configuration"),
    )
    for size, limit, what in sizes:
        if size > limit:
            return f"it has {size} {what}; the limit is {limit}"
    return None


def _bytes(texts: Any) -> int:
    return sum(len(text.encode(errors="replace")) for text in texts)


@dataclass(frozen=True, slots=True)
class PullLimits:
    """The limits of one pull.

    Args:
        make_room: removes unused images; called once before a pull is rejected.
    """

    max_image_mib: int = MAX_IMAGE_MIB
    space: Callable[[], Space | None] = lambda: None
    policy: DiskPolicy = field(default_factory=DiskPolicy)
    make_room: Callable[[], None] = lambda: None

    def before(self, image: str) -> None:
        """Raises StartRefused: `node_disk_full`."""
        if self._is_low():
            self.make_room()
            self._require_space(image)

    def during(self, image: str, compressed_bytes: int) -> None:
        """Raises StartRefused: `image_too_large` or `node_disk_full`; the pull must be aborted."""
        if compressed_bytes > self.max_image_mib * _MIB:
            raise self._too_large(image, compressed_bytes, "compressed")
        self._require_space(image)

    def after(self, image: str, unpacked_bytes: int) -> None:
        """Raises StartRefused: `image_too_large`; the image must be removed."""
        if unpacked_bytes > self.max_image_mib * _MIB:
            raise self._too_large(image, unpacked_bytes, "unpacked")

    def _is_low(self) -> bool:
        space = self.space()
        return space is not None and space.available_mib < self.policy.low(space.total_mib)

    def _require_space(self, image: str) -> None:
        if self._is_low():
            later = "start the instance again later, or on another node"
            message = f"the node's disk is too full to pull {image}; {later}"
            raise StartRefused(Reason(code="node_disk_full", message=message))

    def _too_large(self, image: str, size: int, how: str) -> StartRefused:
        message = f"{image} is at least {-(-size // _MIB)} MiB {how}; the limit is {self.max_image_mib} MiB"
        return StartRefused(Reason(code="image_too_large", message=message))
