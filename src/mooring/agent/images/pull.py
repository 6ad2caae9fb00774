"""Finds images on the node and pulls missing ones, once for all instances that wait for them.

A project with `local_images` may use every image on the node without asking a registry, except images that
were pulled with a project's credentials (private_images.py): for those, the registry must accept the
credentials of this instance.

For all other projects the registry resolves a tag to a digest. Unless the agent pulled that digest before
(pulled_images.py), it pulls by digest. This moves no tag on the node: another project may run what the
operator built under that tag.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from mooring.agent.docker.byte_streams import ByteStream
from mooring.agent.docker.client import Document, Engine
from mooring.agent.docker.create import Image
from mooring.agent.docker.errors import EngineRefused, image_pull_failed
from mooring.agent.images.keeper import ImageKeeper
from mooring.agent.images.policy import require_acceptable
from mooring.agent.images.private_images import PrivateImages
from mooring.agent.images.pull_pace import LayerStates, PullTimeouts, RunningPull, RunningPulls
from mooring.agent.images.pulled_images import PulledImages
from mooring.agent.images.registry_access import RegistryAccess, Wanted, headers, pull_error
from mooring.agent.images.registry_check import RegistryCheck
from mooring.agent.runtime import Cancelled, Progress, RuntimeUnavailable, StartDelayed, StartRefused
from mooring.core.images import ImageName
from mooring.schemas.agent import Assignment, RegistryAuth
from mooring_client.schemas.states import Reason

_TICK_S = 0.5  # a cancelled pull ends within this time
_PROGRESS_EVERY_S = 1.0
_PING_WHEN_SILENT_S = 30.0  # only a ping distinguishes a frozen engine from a slow registry
_MIB, _GIB = 2**20, 2**30


class Images:
    """The images of one engine. Thread-safe."""

    def __init__(
        self,
        engine: Engine,
        private: PrivateImages | None = None,
        pulled: PulledImages | None = None,
        timeouts: PullTimeouts | None = None,
        check: RegistryCheck | None = None,
        keeper: ImageKeeper | None = None,
    ) -> None:
        self._engine = engine
        self._running = RunningPulls(timeouts)
        self._keeper = keeper or ImageKeeper(engine)
        self._private = private or PrivateImages()
        self._pulled = pulled or PulledImages()
        self._access = RegistryAccess(engine, check or RegistryCheck())
        self._lock = threading.Lock()
        self._shared: dict[str, _SharedPull] = {}

    def present(self, assignment: Assignment) -> Image | None:
        """Return the image if it is on the node; None also for a tag that the registry must resolve.

        Raises as `ensure`.
        """
        wanted = Wanted.of(assignment)
        return self._present(wanted) if wanted.local_images or wanted.name.digest else None

    @staticmethod
    def name_to_pull(assignment: Assignment) -> str:
        """Return the name of the image to pull. Assignments with the same name share one pull."""
        return str(Wanted.of(assignment).name)

    def ensure(self, assignment: Assignment, progress: Progress, cancelled: Cancelled) -> Image | None:
        """Return the assignment's image, pulled if it is missing; None if cancelled.

        Raises:
            StartRefused: the image cannot be pulled or used.
            StartDelayed: the registry does not answer or is slow, or the image is being removed.
            RuntimeUnavailable: the engine does not answer.
        """
        wanted = Wanted.of(assignment)
        if not wanted.local_images and wanted.name.digest is None:
            wanted = self._access.authorize(wanted)
        if (image := self._present(wanted)) is not None:
            return image
        with self._shared_pull(wanted) as shared:
            while not shared.pulling.acquire(timeout=_TICK_S):
                progress(shared.status)
                if cancelled():
                    return None
            try:
                return self._present(wanted) or self._pull(wanted, shared, progress, cancelled)
            finally:
                shared.pulling.release()

    def pulling(self) -> list[str]:
        """Return the names of the images that are being pulled."""
        with self._lock:
            return list(self._shared)

    @contextmanager
    def _shared_pull(self, wanted: Wanted) -> Iterator["_SharedPull"]:
        name = str(wanted.name)
        with self._lock:
            shared = self._shared.setdefault(name, _SharedPull(_Layers(wanted.shown).reason()))
            shared.users += 1
        try:
            yield shared
        finally:
            with self._lock:
                shared.users -= 1
                if not shared.users:
                    del self._shared[name]

    def _present(self, wanted: Wanted) -> Image | None:
        """Return the image on the node; None also if the assignment may not use it: its pull then fails."""
        found = self._find_local(wanted) if wanted.local_images else self._find_pulled(wanted)
        if found is None or not self._is_permitted(wanted, found):
            return None
        self._keeper.use(wanted.shown, found["Id"])
        return image_of(found, wanted.name)

    def _find_local(self, wanted: Wanted) -> Document | None:
        found = self._inspect(str(wanted.name))
        if found is not None or wanted.name.digest is None:
            return found
        # The digest may be another repository's (see `_digest`): find the image by its tag instead.
        found = self._inspect(str(ImageName.parse(wanted.shown)))
        digests = {ImageName.parse(name).digest for name in _names(found)} if found else set()
        return found if wanted.name.digest in digests else None

    def _find_pulled(self, wanted: Wanted) -> Document | None:
        """Return the image if the agent pulled it by this digest: no registry has confirmed any other."""
        found = self._inspect(str(wanted.name))
        pulled = self._pulled.find(str(wanted.name), found["Id"]) if found else None
        if found is None or pulled is None:
            return None
        if pulled.private:
            if not wanted.authorized and not self._access.is_granted(wanted.name, wanted):
                return None
            if wanted.credentials_for(wanted.name.registry) is None:
                self._pulled.add(str(wanted.name), found["Id"], private=False)  # it needed no credentials
        return found

    def _inspect(self, name: str) -> Document | None:
        try:
            return self._engine.image(name)
        except EngineRefused as refusal:
            if refusal.status == 404:
                return None
            raise

    # --- private images

    def _is_permitted(self, wanted: Wanted, found: Document) -> bool:
        """Return whether the image is public, or a registry it was pulled from grants access."""
        sources = [ImageName.parse(name) for name in self._private.sources(found["Id"], _names(found))]
        if wanted.authorized and any(source.repository == wanted.name.repository for source in sources):
            return True
        delayed: StartDelayed | None = None
        for source in sources:
            try:
                if self._access.is_granted(source, wanted):
                    if wanted.credentials_for(source.registry) is None:
                        self._private.make_public(found["Id"])
                    return True
            except StartDelayed as delay:
                delayed = delay
        if delayed is not None:
            raise delayed
        return not sources

    def _record(self, wanted: Wanted, found: Document, *, was_there: bool) -> None:
        """Record a pull. Raises StartRefused: the image is private, and none of its sources grants access."""
        image_id, names = found["Id"], _names(found)
        source = wanted.name.pinned(_digest(found, wanted.name))
        own = wanted.credentials_for(source.registry)
        self._private.add(image_id, names, str(source), was_there=was_there, credentials=own is not None)
        if source.digest is not None:
            self._pulled.add(str(source), image_id, private=own is not None)
        sources = {ImageName.parse(name).repository for name in self._private.sources(image_id, names)}
        # A source that was just pulled from has granted access: it is not asked again.
        if sources and source.repository not in sources and not self._is_permitted(wanted, found):
            raise StartRefused(image_pull_failed(wanted.shown, "its registry returned an unexpected answer"))

    # --- pulls

    def _pull(
        self, wanted: Wanted, shared: "_SharedPull", progress: Progress, cancelled: Cancelled
    ) -> Image | None:
        if wanted.name.digest is not None and not wanted.authorized:
            # The engine does not contact the registry for a digest that it has.
            wanted = self._access.authorize(wanted)
        self._access.require_allowed(wanted, wanted.name)
        credentials = wanted.credentials_for(wanted.name.registry)
        before = self._keeper.before(wanted.shown, str(wanted.name))
        if credentials is not None:
            self._private.add_repository(wanted.name.repository)
        layers = _Layers(wanted.shown)
        stream = self._open(wanted, credentials)
        try:
            with wanted.redactor.masking(), self._running.add(wanted.project_id) as running:
                layers.check = partial(self._keeper.during, wanted.shown, str(wanted.name))
                if not self._follow(stream, layers, shared, progress, cancelled, running):
                    return None
        except EngineRefused as refusal:
            raise pull_error(wanted, refusal, credentials) from refusal
        finally:
            stream.close()
        pulled = wanted.name.pinned(layers.digest or wanted.name.digest)
        if (found := self._inspect(str(pulled))) is None:
            # The stream ended with neither an error nor the image: the engine was probably shut down.
            raise RuntimeUnavailable(f"the engine ended the pull of {pulled} without an image")
        was_there = found["Id"] in before
        self._keeper.after(wanted.shown, wanted.name, found, was_there=was_there)
        self._record(wanted, found, was_there=was_there)
        return image_of(found, pulled)

    def _open(self, wanted: Wanted, credentials: RegistryAuth | None) -> ByteStream:
        name = wanted.name
        return self._engine.stream(
            "POST",
            "/images/create",
            params={"fromImage": name.repository, "tag": name.digest or name.tag or "latest"},
            headers=headers(name, credentials),
            headers_in_s=self._running.stall_s + _PING_WHEN_SILENT_S,
        )

    def _follow(
        self,
        stream: ByteStream,
        layers: "_Layers",
        shared: "_SharedPull",
        progress: Progress,
        cancelled: Cancelled,
        running: RunningPull,
    ) -> bool:
        """Return whether the pull completed; False if cancelled. Raises if it is too slow (pull_pace.py)."""
        shared.report(layers.reason(), progress)
        silent_since = reported_at = time.monotonic()
        while (chunk := stream.read(_TICK_S)) != b"":
            if cancelled():
                return False
            now = time.monotonic()
            if chunk is not None:
                silent_since = now
                layers.feed(chunk)
            elif now - silent_since > _PING_WHEN_SILENT_S:
                silent_since = now
                self._engine.ping()
            self._running.check(running, layers.states, layers.image, now)
            if now - reported_at >= _PROGRESS_EVERY_S:
                reported_at = now
                shared.report(layers.reason(), progress)
        return True


def _names(inspected: Document) -> list[str]:
    """Return all names of an image in the engine, digests first."""
    listed = [*(inspected.get("RepoDigests") or ()), *(inspected.get("RepoTags") or ())]
    return [str(ImageName.parse(name)) for name in listed if not name.startswith("<none>")]


def image_of(inspected: Document, name: ImageName) -> Image:
    """Return the image's facts. Raises StartRefused: its configuration exceeds a limit."""
    require_acceptable(str(name), inspected)
    config = inspected.get("Config") or {}
    return Image(
        id=inspected["Id"],
        digest=_digest(inspected, name),
        env=tuple(config.get("Env") or ()),
        entrypoint=tuple(config.get("Entrypoint") or ()),
        command=tuple(config.get("Cmd") or ()),
        working_dir=config.get("WorkingDir") or "",
        labels=tuple(config.get("Labels") or ()),
        volumes=tuple(config.get("Volumes") or ()),
        size_bytes=int(inspected.get("Size") or 0),
    )


def _digest(inspected: Document, name: ImageName) -> str | None:
    """Return the registry's digest; None for an image that was never in a registry."""
    known = [ImageName.parse(entry) for entry in inspected.get("RepoDigests") or ()]
    digests = [entry.digest for entry in known if entry.repository == name.repository]
    return name.digest or next(iter([*digests, *(entry.digest for entry in known)]), None)


@dataclass
class _Layers:
    """The progress of one pull, as the engine reports it."""

    image: str
    total: dict[str, int] = field(default_factory=dict)  # bytes to download, by layer
    current: dict[str, int] = field(default_factory=dict)  # bytes downloaded, by layer
    seen: set[str] = field(default_factory=set)
    done: set[str] = field(default_factory=set)
    states: LayerStates = field(default_factory=LayerStates)
    digest: str | None = None  # of the reference, from the registry
    check: Callable[[int], None] = lambda _compressed_bytes: None  # raises to abort the pull
    _rest: bytes = b""

    def feed(self, chunk: bytes) -> None:
        """Parse some of the engine's JSON lines. Raises EngineRefused: one of them is an error."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in filter(None, map(bytes.strip, lines)):
            self._apply(json.loads(line))
        self.check(self.compressed_bytes)

    @property
    def compressed_bytes(self) -> int:
        """The size of the layers whose download has begun; a registry need not announce sizes."""
        return sum(max(self.total.get(layer, 0), current) for layer, current in self.current.items())

    def reason(self) -> Reason:
        message = f"pulling {self.image}"
        if self.seen:
            message += f": {len(self.done)} of {len(self.seen)} layers"
        if self.total:
            message += f", {_sizes(sum(self.current.values()), sum(self.total.values()))}"
        return Reason(code="pulling_image", message=message)

    def _apply(self, line: dict[str, Any]) -> None:
        if "error" in line:
            raise EngineRefused(int(line.get("errorDetail", {}).get("code") or 0), line["error"])
        layer, status = str(line.get("id")), line.get("status", "")
        self.states.update(layer, status, line.get("progressDetail") or {})
        if status.startswith("Digest: "):
            self.digest = status.removeprefix("Digest: ")
        if status in {"Pulling fs layer", "Already exists", "Waiting", "Downloading", "Pull complete"}:
            self.seen.add(layer)
        if status in {"Already exists", "Pull complete"}:
            self.done.add(layer)
        if status == "Downloading" and (detail := line.get("progressDetail") or {}).get("total"):
            self.total[layer] = detail["total"]
            self.current[layer] = detail.get("current", 0)
        if status in {"Download complete", "Pull complete"} and layer in self.total:
            self.current[layer] = self.total[layer]


def _sizes(current: int, total: int) -> str:
    unit, name = (_GIB, "GiB") if total >= _GIB else (_MIB, "MiB")
    return f"{current / unit:.1f} of {total / unit:.1f} {name}"


@dataclass
class _SharedPull:
    """Allows one pull of an image at a time, and shows its progress to the instances that wait for it."""

    status: Reason
    pulling: threading.Lock = field(default_factory=threading.Lock)
    users: int = 0

    def report(self, status: Reason, progress: Progress) -> None:
        self.status = status
        progress(status)
