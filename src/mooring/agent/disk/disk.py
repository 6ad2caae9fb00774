"""The disk of one engine: space, limits, pulls and image cleanup."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from mooring.agent.disk.storage import DiskPolicy, DiskReport, EngineStorage, Space
from mooring.agent.docker.client import Engine
from mooring.agent.docker.create import Abilities, abilities_of
from mooring.agent.gpus.mps import Mps
from mooring.agent.images.collector import CollectorPolicy, ImageCollector
from mooring.agent.images.keeper import ImageKeeper
from mooring.agent.images.policy import MAX_IMAGE_MIB, PullLimits
from mooring.agent.images.private_images import PrivateImages
from mooring.agent.images.pull import Images
from mooring.agent.images.pull_pace import PullTimeouts
from mooring.agent.images.pulled_images import PulledImages
from mooring.agent.images.usage import ImageUsage
from mooring.agent.settings import AgentSettings
from mooring.agent.sync.identity import StateDirectory
from mooring.core.disk import DiskFacts


@dataclass(frozen=True, slots=True)
class DiskSettings:
    """The operator's settings, and the usage of images, which is by default in memory only."""

    policy: DiskPolicy = field(default_factory=DiskPolicy)
    max_image_mib: int = MAX_IMAGE_MIB
    collector: CollectorPolicy = field(default_factory=CollectorPolicy)
    usage: ImageUsage = field(default_factory=ImageUsage)


def disk_settings(settings: AgentSettings, state: StateDirectory | None = None) -> DiskSettings:
    """Return the settings of a node. Without `state`, the usage of images is in memory only."""
    return DiskSettings(
        policy=DiskPolicy(settings.disk_reserved_mib, settings.disk_low_mib),
        max_image_mib=settings.max_image_mib,
        collector=CollectorPolicy(
            max_unused_s=settings.image_unused_hours * 3600,
            high_pct=settings.image_gc_high_pct,
            low_pct=settings.image_gc_low_pct,
            keep=settings.image_keep,
        ),
        usage=ImageUsage.of_node(state) if state else ImageUsage(),
    )


class Disk:
    """The disk of one engine. Thread-safe."""

    def __init__(
        self,
        engine: Engine,
        settings: DiskSettings,
        private: PrivateImages | None = None,
        pulled: PulledImages | None = None,
        timeouts: PullTimeouts | None = None,
    ) -> None:
        self.storage = EngineStorage(engine, settings.policy)
        keeper = ImageKeeper(engine, settings.usage)
        self.images = Images(engine, private, pulled, timeouts, keeper=keeper)
        self.collector = ImageCollector(
            engine, settings.usage, self._space, self.images.pulling, settings.collector
        )
        make_room = partial(self.collector.sweep, make_room=True)
        keeper.limits = PullLimits(settings.max_image_mib, self._space, settings.policy, make_room)

    def measure(self, info: Mapping[str, Any]) -> DiskFacts | None:
        """Return the facts for the node's report. Called every few seconds, so it also starts image cleanup.

        Raises:
            RuntimeUnavailable: the engine does not answer.
        """
        facts = self.storage.facts(info, self.collector.images_mib)
        self.collector.sweep_soon()
        return facts

    def report(self, info: Mapping[str, Any]) -> DiskReport:
        """Return the facts for `mooring doctor`; removes nothing. Raises RuntimeUnavailable."""
        return self.storage.report(info, self.collector.images_mib)

    def abilities(self, info: Mapping[str, Any], *, simulated_gpus: bool, mps: Mps) -> Abilities:
        """Return what the engine supports, including disk limits. Raises RuntimeUnavailable."""
        limited = self.storage.limits(info).enforced
        return abilities_of(info, simulated_gpus=simulated_gpus, mps=mps, disk_limits=limited)

    def forget(self) -> None:
        """Drop cached facts: after an outage, the engine's configuration may have changed."""
        self.storage.forget()

    def _space(self) -> Space | None:
        return self.storage.space()
