"""Images: looked up, and pulled when missing, once however many instances wait for them.

What is on the node is given without a word to the registry, but for images that some project's credentials
pulled (private_images.py): there the registry is asked whether this instance, with its own, may have it.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from docker.auth import encode_header, get_config_header

from mooring.agent.docker_create import Image
from mooring.agent.docker_engine import Document, Engine
from mooring.agent.docker_errors import EngineRefused, is_denial, pull_failure
from mooring.agent.docker_streams import ByteStream
from mooring.agent.image_keeper import ImageKeeper
from mooring.agent.private_images import PrivateImages
from mooring.agent.runtime import Cancelled, Progress, RuntimeUnavailable, StartDelayed, StartRefused
from mooring.agent.withheld import Withheld
from mooring.core.images import ImageName, registry_host
from mooring.core.instance import Reason
from mooring.schemas.agent import Assignment, RegistryAuth

_TICK_S = 0.5  # how soon a cancelled pull ends
_PROGRESS_EVERY_S = 1.0
_ASK_WHEN_SILENT_S = 30.0  # a frozen engine looks like a slow registry until it is asked
_MIB, _GIB = 2**20, 2**30


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What an assignment asks for: `shown` is what its user wrote, `name` what runs."""

    shown: str
    name: ImageName
    registry: RegistryAuth | None
    withheld: Withheld

    @classmethod
    def by(cls, assignment: Assignment) -> "_Wanted":
        shown = assignment.spec.image
        name = ImageName.parse(shown).pinned(assignment.image_digest)
        return cls(shown, name, assignment.registry, Withheld.of(assignment))

    def credentials_for(self, registry: str) -> RegistryAuth | None:
        """The project's own, which only their own registry gets to see."""
        given = self.registry
        return given if given is not None and registry_host(given.server) == registry else None


class Images:
    """The images of one engine."""

    def __init__(
        self, engine: Engine, private: PrivateImages | None = None, keeper: ImageKeeper | None = None
    ) -> None:
        self._engine = engine
        self._keeper = keeper or ImageKeeper(engine)
        self._private = private or PrivateImages()
        self._lock = threading.Lock()
        self._turns: dict[str, _Turn] = {}

    def ensure(self, assignment: Assignment, progress: Progress, cancelled: Cancelled) -> Image | None:
        """The assignment's image, pulled if it is not there; None when cancelled.

        Raises:
            StartRefused: it cannot be had.
            StartDelayed: its registry must be asked, and does not answer.
            RuntimeUnavailable: the engine went away.
        """
        wanted = _Wanted.by(assignment)
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
    def _turn(self, wanted: _Wanted) -> Iterator["_Turn"]:
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

    def _present(self, wanted: _Wanted) -> Image | None:
        """What is on the node, if this assignment may have it."""
        if (found := self._found(wanted)) is None:
            return None
        self._admit(wanted, found)
        self._keeper.use(wanted.shown, found["Id"])
        return image_of(found, wanted.name)

    def _found(self, wanted: _Wanted) -> Document | None:
        found = self._inspected(str(wanted.name))
        if found is not None or wanted.name.digest is None:
            return found
        # It may be known by another repository's name, as it was when its digest was told.
        found = self._inspected(str(ImageName.parse(wanted.shown)))
        digests = {ImageName.parse(name).digest for name in _names(found)} if found else set()
        return found if wanted.name.digest in digests else None

    def _inspected(self, name: str) -> Document | None:
        try:
            return self._engine.image(name)
        except EngineRefused as refusal:
            if refusal.status == 404:
                return None
            raise

    # --- images that are not for everybody

    def _admit(self, wanted: _Wanted, found: Document) -> None:
        """Refuse an image that nobody who may give it away gives to this assignment."""
        sources = [ImageName.parse(name) for name in self._private.sources(found["Id"], _names(found))]
        delayed: StartDelayed | None = None
        for source in sources:
            try:
                if self._gives(source, wanted, found["Id"]):
                    return
            except StartDelayed as delay:
                delayed = delay
        if sources:
            raise delayed or StartRefused(_not_given(wanted))

    def _gives(self, source: ImageName, wanted: _Wanted, image_id: str) -> bool:
        """Whether the registry that an image came from lets this assignment have it."""
        own = wanted.credentials_for(source.registry)
        try:
            with wanted.withheld.masking():
                self._engine.ask_registry(str(source), self._headers(source, own))
        except EngineRefused as refusal:
            if _is_no(refusal):
                return False
            raise StartDelayed(_registry_away(wanted, source)) from refusal
        except RuntimeUnavailable as error:
            self._engine.ping()  # if it answers, what did not is the registry
            raise StartDelayed(_registry_away(wanted, source)) from error
        if own is None:
            self._private.free(image_id)
        return True

    def _note(self, wanted: _Wanted, found: Document, *, was_there: bool) -> None:
        """After a pull: the registry has just given the image, so nobody is asked if it is its source."""
        image_id, names = found["Id"], _names(found)
        source = wanted.name.pinned(_digest(found, wanted.name))
        own = wanted.credentials_for(source.registry)
        self._private.pulled(image_id, names, str(source), was_there=was_there, credentials=own is not None)
        given_by = {ImageName.parse(name).repository for name in self._private.sources(image_id, names)}
        if given_by and source.repository not in given_by:
            self._admit(wanted, found)

    # --- pulls

    def _pull(self, wanted: _Wanted, turn: "_Turn", progress: Progress, cancelled: Cancelled) -> Image | None:
        credentials = wanted.credentials_for(wanted.name.registry)
        before = self._keeper.before(wanted.shown, str(wanted.name))
        if credentials is not None:
            self._private.expect(wanted.name.repository)
        layers = _Layers(wanted.shown)
        stream = self._open(wanted, credentials)
        try:
            with wanted.withheld.masking():
                layers.check = partial(self._keeper.during, wanted.shown, str(wanted.name))
                if not self._follow(stream, layers, turn, progress, cancelled):
                    return None
        except EngineRefused as refusal:
            told = refusal.message, wanted.shown, refusal.status
            raise StartRefused(pull_failure(*told, credentials=credentials is not None)) from refusal
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

    def _open(self, wanted: _Wanted, credentials: RegistryAuth | None) -> ByteStream:
        name = wanted.name
        return self._engine.stream(
            "POST",
            "/images/create",
            params={"fromImage": name.repository, "tag": name.digest or name.tag or "latest"},
            headers=self._headers(name, credentials),
        )

    def _headers(self, name: ImageName, credentials: RegistryAuth | None) -> dict[str, str]:
        """Whom the registry is to see: the project, else the node's operator, who shares with everybody."""
        if credentials is None:
            header = get_config_header(self._engine.client(), name.registry)
        else:
            header = encode_header(
                {
                    "username": credentials.username,
                    "password": credentials.password,
                    "serveraddress": name.registry,
                }
            )
        return {"X-Registry-Auth": header.decode()} if header else {}

    def _follow(
        self,
        stream: ByteStream,
        layers: "_Layers",
        turn: "_Turn",
        progress: Progress,
        cancelled: Cancelled,
    ) -> bool:
        """Whether it came to its end."""
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
            if now - told_at >= _PROGRESS_EVERY_S:
                told_at = now
                turn.tell(layers.reason(), progress)
        return True


def _names(inspected: Document) -> list[str]:
    """All that the engine knows an image by, those with a digest first."""
    listed = [*(inspected.get("RepoDigests") or ()), *(inspected.get("RepoTags") or ())]
    return [str(ImageName.parse(name)) for name in listed if not name.startswith("<none>")]


def _is_no(refusal: EngineRefused) -> bool:
    """Whether the registry answered; the engine makes most of what it says a 500."""
    missing = "not found" in refusal.message or "manifest unknown" in refusal.message
    return refusal.status in {400, 404} or missing or is_denial(refusal.message, refusal.status)


def _not_given(wanted: _Wanted) -> Reason:
    message = (
        f"{wanted.shown} is on the node, pulled with another project's credentials, and the registry that it "
        "came from does not let this one have it"
    )
    return Reason(code="image_access_denied", message=message)


def _registry_away(wanted: _Wanted, source: ImageName) -> Reason:
    message = (
        f"{wanted.shown} is private, and {source.registry}, which must be asked who may have it, does not "
        "answer; it is tried again"
    )
    return Reason(code="registry_unavailable", message=message)


def image_of(inspected: Document, name: ImageName) -> Image:
    config = inspected.get("Config") or {}
    return Image(
        id=inspected["Id"],
        digest=_digest(inspected, name),
        env=tuple(config.get("Env") or ()),
        entrypoint=tuple(config.get("Entrypoint") or ()),
        command=tuple(config.get("Cmd") or ()),
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
