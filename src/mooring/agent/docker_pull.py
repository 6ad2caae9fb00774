"""Images: looked up, and pulled when missing, once however many instances wait for them."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from docker.auth import get_config_header, resolve_repository_name
from docker.utils import parse_repository_tag

from mooring.agent.docker_create import Image
from mooring.agent.docker_engine import Engine
from mooring.agent.docker_errors import EngineRefused, pull_failure
from mooring.agent.docker_streams import ByteStream
from mooring.agent.runtime import Cancelled, Progress, StartRefused
from mooring.core.instance import Reason

_TICK_S = 0.5  # how soon a cancelled pull ends
_PROGRESS_EVERY_S = 1.0
_ASK_WHEN_SILENT_S = 30.0  # a frozen engine looks like a slow registry until it is asked
_MIB, _GIB = 2**20, 2**30


class Images:
    """The images of one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._turns: dict[str, _Turn] = {}

    def ensure(self, reference: str, progress: Progress, cancelled: Cancelled) -> Image | None:
        """The image, pulled if it is not there; None when cancelled.

        Raises:
            StartRefused: it cannot be had.
            RuntimeUnavailable: the engine went away.
        """
        if (image := self._local(reference)) is not None:
            return image
        with self._turn(reference) as turn:
            while not turn.pulling.acquire(timeout=_TICK_S):
                progress(turn.news)
                if cancelled():
                    return None
            try:
                return self._local(reference) or self._pull(reference, turn, progress, cancelled)
            finally:
                turn.pulling.release()

    @contextmanager
    def _turn(self, reference: str) -> Iterator["_Turn"]:
        with self._lock:
            turn = self._turns.setdefault(reference, _Turn(_Layers(reference).reason()))
            turn.users += 1
        try:
            yield turn
        finally:
            with self._lock:
                turn.users -= 1
                if not turn.users:
                    del self._turns[reference]

    def _local(self, reference: str) -> Image | None:
        try:
            return image_of(self._engine.image(reference), reference)
        except EngineRefused as refusal:
            if refusal.status == 404:
                return None
            raise

    def _pull(self, reference: str, turn: "_Turn", progress: Progress, cancelled: Cancelled) -> Image | None:
        stream = self._open(reference)
        try:
            if not self._follow(stream, _Layers(reference), turn, progress, cancelled):
                return None
        except EngineRefused as refusal:
            raise StartRefused(pull_failure(refusal.message, reference, refusal.status)) from refusal
        finally:
            stream.close()
        if (image := self._local(reference)) is not None:
            return image
        # The engine ended the stream without an error and without the image: it was shut down, most likely.
        raise StartRefused(pull_failure("the engine broke the pull off", reference))

    def _open(self, reference: str) -> ByteStream:
        repository, tag = parse_repository_tag(reference)
        client = self._engine.client()
        credentials = get_config_header(client, resolve_repository_name(repository)[0])
        return self._engine.stream(
            "POST",
            "/images/create",
            params={"fromImage": repository, "tag": tag or "latest"},
            headers={"X-Registry-Auth": credentials.decode()} if credentials else None,
        )

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


def image_of(inspected: dict[str, Any], reference: str) -> Image:
    config = inspected.get("Config") or {}
    return Image(
        id=inspected["Id"],
        digest=_digest(inspected, reference),
        env=tuple(config.get("Env") or ()),
        entrypoint=tuple(config.get("Entrypoint") or ()),
        command=tuple(config.get("Cmd") or ()),
    )


def _digest(inspected: dict[str, Any], reference: str) -> str | None:
    """The registry's digest; an image that never was in a registry has none."""
    known = [entry.rsplit("@", 1) for entry in inspected.get("RepoDigests") or []]
    repository = parse_repository_tag(reference)[0]
    same = [digest for name, digest in known if name == repository]
    return next(iter(same or [digest for _, digest in known]), None)


@dataclass
class _Layers:
    """What the engine's progress lines add up to."""

    image: str
    total: dict[str, int] = field(default_factory=dict)
    current: dict[str, int] = field(default_factory=dict)
    seen: set[str] = field(default_factory=set)
    done: set[str] = field(default_factory=set)
    _rest: bytes = b""

    def feed(self, chunk: bytes) -> None:
        """Take in some of the engine's lines of JSON.

        Raises:
            EngineRefused: one of them is its error.
        """
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in filter(None, map(bytes.strip, lines)):
            self._take(json.loads(line))

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
