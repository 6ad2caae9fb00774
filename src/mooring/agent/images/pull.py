"""Images: looked up, and pulled when missing, once however many instances wait for them.

To a project with `local_images` whatever is on the node is given without asking a registry, except images
that some project's credentials pulled (private_images.py): there the registry is asked whether this instance,
with its own credentials, may have it.

For all other projects the registry says what a tag is, and only what the agent has pulled by that digest
(pulled_images.py) is given without another pull. They pull by digest, so that they move no tag of the node:
another project may run what its operator has built under that name.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from mooring.agent.docker.client import Document, Engine
from mooring.agent.docker.create import Image
from mooring.agent.docker.errors import EngineRefused, pull_failure
from mooring.agent.docker.streams import ByteStream
from mooring.agent.images.keeper import ImageKeeper
from mooring.agent.images.policy import require_acceptable
from mooring.agent.images.private_images import PrivateImages
from mooring.agent.images.pull_pace import LayerStates, PullBoard, Puller, PullTimeouts
from mooring.agent.images.pulled_images import PulledImages
from mooring.agent.images.registry_access import RegistryAccess, Wanted, failure, headers
from mooring.agent.images.registry_check import RegistryCheck
from mooring.agent.runtime import Cancelled, Progress, StartDelayed, StartRefused
from mooring.core.images import ImageName
from mooring.core.instance.state import Reason
from mooring.schemas.agent import Assignment, RegistryAuth

_TICK_S = 0.5  # how soon a cancelled pull ends
_PROGRESS_EVERY_S = 1.0
_ASK_WHEN_SILENT_S = 30.0  # a frozen engine looks like a slow registry until it is asked
_MIB, _GIB = 2**20, 2**30


class Images:
    """The images of one engine."""

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
        self._board = PullBoard(timeouts)
        self._keeper = keeper or ImageKeeper(engine)
        self._private = private or PrivateImages()
        self._pulled = pulled or PulledImages()
        self._access = RegistryAccess(engine, check or RegistryCheck())
        self._lock = threading.Lock()
        self._turns: dict[str, _Turn] = {}

    def present(self, assignment: Assignment) -> Image | None:
        """The assignment's image if it is on the node; raises as `ensure`.

        A tag that its registry must resolve is never taken for present: `ensure` asks, in its own time.
        """
        wanted = Wanted.by(assignment)
        return self._present(wanted) if wanted.local_images or wanted.name.digest else None

    @staticmethod
    def subject(assignment: Assignment) -> str:
        """What would be pulled: one pull of it is enough for all who wait for it."""
        return str(Wanted.by(assignment).name)

    def ensure(self, assignment: Assignment, progress: Progress, cancelled: Cancelled) -> Image | None:
        """The assignment's image, pulled if it is not there; None when cancelled.

        Raises:
            StartRefused: it cannot be had.
            StartDelayed: its registry must be asked, and does not answer.
            RuntimeUnavailable: the engine went away.
        """
        wanted = Wanted.by(assignment)
        if not wanted.local_images and wanted.name.digest is None:
            wanted = self._access.resolved(wanted)
        if (image := self._present(wanted)) is not None:
            return image
        with self._turn(wanted) as turn:
            while not turn.pulling.acquire(timeout=_TICK_S):
                progress(turn.news)
                if cancelled():
                    return None
            try:
                return self._present(wanted) or self._pull(wanted, turn, progress, cancelled)
            finally:
                turn.pulling.release()

    def pulling(self) -> list[str]:
        """The names of the images that are being pulled."""
        with self._lock:
            return list(self._turns)

    @contextmanager
    def _turn(self, wanted: Wanted) -> Iterator["_Turn"]:
        name = str(wanted.name)
        with self._lock:
            turn = self._turns.setdefault(name, _Turn(_Layers(wanted.shown).reason()))
            turn.users += 1
        try:
            yield turn
        finally:
            with self._lock:
                turn.users -= 1
                if not turn.users:
                    del self._turns[name]

    def _present(self, wanted: Wanted) -> Image | None:
        """What is on the node, if this assignment may have it.

        What it may not have is as good as not there: a pull then says what it says of any image.
        """
        found = self._found(wanted) if wanted.local_images else self._found_pulled(wanted)
        if found is None or not self._admits(wanted, found):
            return None
        self._keeper.use(wanted.shown, found["Id"])
        return image_of(found, wanted.name)

    def _found(self, wanted: Wanted) -> Document | None:
        found = self._inspected(str(wanted.name))
        if found is not None or wanted.name.digest is None:
            return found
        # It may be known by another repository's name, as it was when its digest was told.
        found = self._inspected(str(ImageName.parse(wanted.shown)))
        digests = {ImageName.parse(name).digest for name in _names(found)} if found else set()
        return found if wanted.name.digest in digests else None

    def _found_pulled(self, wanted: Wanted) -> Document | None:
        """By digest, and pulled by the agent: of anything else its registry has not said what it is."""
        found = self._inspected(str(wanted.name))
        pulled = self._pulled.find(str(wanted.name), found["Id"]) if found else None
        if found is None or pulled is None:
            return None
        if pulled.private:
            if not wanted.vouched and not self._access.gives(wanted.name, wanted):
                return None
            if wanted.credentials_for(wanted.name.registry) is None:
                self._pulled.add(str(wanted.name), found["Id"], private=False)
        return found

    def _inspected(self, name: str) -> Document | None:
        try:
            return self._engine.image(name)
        except EngineRefused as refusal:
            if refusal.status == 404:
                return None
            raise

    # --- images that are not for everybody

    def _admits(self, wanted: Wanted, found: Document) -> bool:
        """Whether nobody has to be asked for this image, or somebody who gives it away gives it here."""
        sources = [ImageName.parse(name) for name in self._private.sources(found["Id"], _names(found))]
        if wanted.vouched and any(source.repository == wanted.name.repository for source in sources):
            return True
        delayed: StartDelayed | None = None
        for source in sources:
            try:
                if self._access.gives(source, wanted):
                    if wanted.credentials_for(source.registry) is None:
                        self._private.free(found["Id"])
                    return True
            except StartDelayed as delay:
                delayed = delay
        if delayed is not None:
            raise delayed
        return not sources

    def _note(self, wanted: Wanted, found: Document, *, was_there: bool) -> None:
        """After a pull: the registry has just given the image, so nobody is asked if it is its source."""
        image_id, names = found["Id"], _names(found)
        source = wanted.name.pinned(_digest(found, wanted.name))
        own = wanted.credentials_for(source.registry)
        self._private.pulled(image_id, names, str(source), was_there=was_there, credentials=own is not None)
        if source.digest is not None:
            self._pulled.add(str(source), image_id, private=own is not None)
        given_by = {ImageName.parse(name).repository for name in self._private.sources(image_id, names)}
        if given_by and source.repository not in given_by and not self._admits(wanted, found):
            raise StartRefused(pull_failure("another registry's", wanted.shown))

    # --- pulls

    def _pull(self, wanted: Wanted, turn: "_Turn", progress: Progress, cancelled: Cancelled) -> Image | None:
        if wanted.name.digest is not None and not wanted.vouched:
            # The engine pulls no digest that it has, so it would ask nobody.
            wanted = self._access.resolved(wanted)
        self._access.require_allowed(wanted, wanted.name)
        credentials = wanted.credentials_for(wanted.name.registry)
        before = self._keeper.before(wanted.shown, str(wanted.name))
        if credentials is not None:
            self._private.expect(wanted.name.repository)
        layers = _Layers(wanted.shown)
        stream = self._open(wanted, credentials)
        try:
            with wanted.withheld.masking(), self._board.joined(wanted.project_id) as puller:
                layers.check = partial(self._keeper.during, wanted.shown, str(wanted.name))
                if not self._follow(stream, layers, turn, progress, cancelled, puller):
                    return None
        except EngineRefused as refusal:
            raise StartRefused(failure(wanted, refusal, credentials)) from refusal
        finally:
            stream.close()
        got = wanted.name.pinned(layers.digest or wanted.name.digest)
        if (found := self._inspected(str(got))) is None:
            # The engine ended the stream without an error and without the image: it was shut down, probably.
            raise StartRefused(pull_failure("the engine broke the pull off", wanted.shown))
        was_there = found["Id"] in before
        self._keeper.after(wanted.shown, wanted.name, found, was_there=was_there)
        self._note(wanted, found, was_there=was_there)
        return image_of(found, got)

    def _open(self, wanted: Wanted, credentials: RegistryAuth | None) -> ByteStream:
        name = wanted.name
        return self._engine.stream(
            "POST",
            "/images/create",
            params={"fromImage": name.repository, "tag": name.digest or name.tag or "latest"},
            headers=headers(name, credentials),
            headers_in_s=self._board.stall_s + _ASK_WHEN_SILENT_S,
        )

    def _follow(
        self,
        stream: ByteStream,
        layers: "_Layers",
        turn: "_Turn",
        progress: Progress,
        cancelled: Cancelled,
        puller: Puller,
    ) -> bool:
        """Whether it came to its end; raises what ends it before (docker_pull_pace.py)."""
        turn.tell(layers.reason(), progress)
        silent_since = told_at = time.monotonic()
        while (chunk := stream.read(_TICK_S)) != b"":
            if cancelled():
                return False
            now = time.monotonic()
            if chunk is not None:
                silent_since = now
                layers.feed(chunk)
            elif now - silent_since > _ASK_WHEN_SILENT_S:
                silent_since = now
                self._engine.ping()
            self._board.check(puller, layers.states, layers.image, now)
            if now - told_at >= _PROGRESS_EVERY_S:
                told_at = now
                turn.tell(layers.reason(), progress)
        return True


def _names(inspected: Document) -> list[str]:
    """All that the engine knows an image by, those with a digest first."""
    listed = [*(inspected.get("RepoDigests") or ()), *(inspected.get("RepoTags") or ())]
    return [str(ImageName.parse(name)) for name in listed if not name.startswith("<none>")]


def image_of(inspected: Document, name: ImageName) -> Image:
    """Raises StartRefused: an image of such a configuration is not run."""
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
    """The registry's digest; an image that never was in a registry has none."""
    known = [ImageName.parse(entry) for entry in inspected.get("RepoDigests") or ()]
    digests = [entry.digest for entry in known if entry.repository == name.repository]
    return name.digest or next(iter([*digests, *(entry.digest for entry in known)]), None)


@dataclass
class _Layers:
    """What the engine's progress lines add up to."""

    image: str
    total: dict[str, int] = field(default_factory=dict)
    current: dict[str, int] = field(default_factory=dict)
    seen: set[str] = field(default_factory=set)
    done: set[str] = field(default_factory=set)
    states: LayerStates = field(default_factory=LayerStates)
    digest: str | None = None  # what the registry said the reference is
    check: Callable[[int], None] = lambda _compressed_bytes: None  # raises where the pull must end
    _rest: bytes = b""

    def feed(self, chunk: bytes) -> None:
        """Take in some of the engine's lines of JSON.

        Raises:
            EngineRefused: one of them is its error.
        """
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in filter(None, map(bytes.strip, lines)):
            self._take(json.loads(line))
        self.check(self.compressed_bytes)

    @property
    def compressed_bytes(self) -> int:
        """Of the layers that are, or were, downloaded; a registry need not tell sizes ahead."""
        return sum(max(self.total.get(layer, 0), current) for layer, current in self.current.items())

    def reason(self) -> Reason:
        message = f"pulling {self.image}"
        if self.seen:
            message += f": {len(self.done)} of {len(self.seen)} layers"
        if self.total:
            message += f", {_sizes(sum(self.current.values()), sum(self.total.values()))}"
        return Reason(code="pulling_image", message=message)

    def _take(self, line: dict[str, Any]) -> None:
        if "error" in line:
            raise EngineRefused(int(line.get("errorDetail", {}).get("code") or 0), line["error"])
        layer, status = str(line.get("id")), line.get("status", "")
        self.states.note(layer, status, line.get("progressDetail") or {})
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
class _Turn:
    """One pull of a reference at a time; who waits for it hears how it goes."""

    news: Reason
    pulling: threading.Lock = field(default_factory=threading.Lock)
    users: int = 0

    def tell(self, news: Reason, progress: Progress) -> None:
        self.news = news
        progress(news)
