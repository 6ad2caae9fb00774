"""Limits of one pull: how large an image may be, and how full it may make the node's disk.

The engine tells the compressed size of each layer when it begins to download it, so a pull that is too large
is broken off before more than the limit has been downloaded. The unpacked size is in no manifest: the disk is
watched while layers are unpacked, and an image that turns out to be too large is removed.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from mooring.agent.disk.storage import DiskPolicy, Space
from mooring.agent.runtime import StartRefused
from mooring.core.instance.state import Reason

MAX_IMAGE_MIB: Final = 50 * 1024
_MIB: Final = 2**20


@dataclass(frozen=True, slots=True)
class PullLimits:
    """Args: make_room: removes images that nobody needs; asked once, before a pull is refused."""

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
        """Raises StartRefused: `image_too_large` or `node_disk_full`; the pull must be broken off then."""
        if compressed_bytes > self.max_image_mib * _MIB:
            raise self._too_large(image, compressed_bytes, "compressed")
        self._require_space(image)

    def after(self, image: str, unpacked_bytes: int) -> None:
        """Raises StartRefused: `image_too_large`; the image must be removed then."""
        if unpacked_bytes > self.max_image_mib * _MIB:
            raise self._too_large(image, unpacked_bytes, "unpacked")

    def _is_low(self) -> bool:
        space = self.space()
        return space is not None and space.available_mib < self.policy.low(space.total_mib)

    def _require_space(self, image: str) -> None:
        if self._is_low():
            message = f"the node's disk is too full to pull {image}; start it again later, or on another node"
            raise StartRefused(Reason(code="node_disk_full", message=message))

    def _too_large(self, image: str, size: int, how: str) -> StartRefused:
        message = (
            f"{image} is at least {-(-size // _MIB)} MiB {how}, and this node takes images of "
            f"{self.max_image_mib} MiB at most"
        )
        return StartRefused(Reason(code="image_too_large", message=message))
