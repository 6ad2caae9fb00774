"""Builds the toolbox as a volume of the node's engine, and removes those of earlier builds.

    import the files as an image -> copy them to a volume -> compare them as a container sees them -> mark it

The engine copies the image's folder when it creates a container, so this program may itself run in one: it
needs no path of the host. An interrupted build leaves no mark, so no container gets its volume, and the next
build completes it.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Final

from mooring.agent.docker.client import Document, Engine, remove_container
from mooring.agent.docker.errors import EngineRefused
from mooring.agent.docker.toolbox_mount import (
    COMPLETE,
    EMPTY_FOLDER,
    FILES,
    FILES_FOLDER,
    FILES_LABEL,
    LABEL,
    MOUNT,
    TOOLBOX,
    Toolbox,
    mount_of,
)
from mooring.agent.docker.toolbox_volumes import (
    BUILT_LABEL,
    COMPLETE_SUFFIX,
    PREFIX,
    current_toolbox,
    has_files,
)
from mooring.agent.toolbox import archive
from mooring.agent.toolbox.archive import Files, Folder
from mooring.agent.toolbox.programs import ToolboxError

_CONTAINER: Final = "mooring-toolbox-build"
_BUILD: Final = "build"  # the label's value for the container
_REPOSITORY: Final = "mooring-toolbox"
_DIGITS: Final = 16
_SPECIAL: Final = frozenset(",:\\")  # in the options of an overlay


@dataclass(slots=True)
class Built:
    """What a build has done.

    Attributes:
        is_new: whether the volume was made or completed now.
        removed: volumes of earlier builds.
        kept: those that containers may still have.
    """

    volume: str
    is_new: bool
    removed: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)


def build(engine: Engine, files: Files) -> Built:
    """Make these files the toolbox of new containers. Safe to repeat.

    Raises:
        ToolboxError: the engine did not store the files, or refused a step.
        RuntimeUnavailable: the engine does not answer.
    """
    try:
        return _build(engine, files)
    except EngineRefused as refusal:
        raise ToolboxError(f"Docker refused: {refusal.message}") from refusal


def _build(engine: Engine, files: Files) -> Built:
    _remove_interrupted(engine)
    name = f"{PREFIX}{archive.digest(files)[:_DIGITS]}"
    before = current_toolbox(engine)
    with _image(engine, files) as image:
        _fill(engine, files, image, name)
    built = Built(name, is_new=before is None or before.volume != name)
    _remove_unmarked(engine, built)
    _mark(engine, name)
    _remove_other_marks(engine, built)
    return built


def _fill(engine: Engine, files: Files, image: str, name: str) -> None:
    """Make a volume with exactly these files, or keep it if it has them."""
    for _ in range(2):
        engine.create_volume({"Name": name, "Labels": {LABEL: FILES}})
        if has_files(engine, name) and _is_right(engine, files, image, name):
            return
        _remove_wrong(engine, name)
    raise ToolboxError(f"Docker did not copy all files to the volume {name}; is its disk full?")


def _is_right(engine: Engine, files: Files, image: str, name: str) -> bool:
    """Return whether a container sees exactly these files. If the volume is empty, the engine copies them."""
    path = str(engine.volume(name)["Mountpoint"])
    if set(path) & _SPECIAL:
        raise ToolboxError(f"Docker's folder {path} has one of the characters {' '.join(sorted(_SPECIAL))}")
    copying = {"Type": "volume", "Source": name, "Target": TOOLBOX}
    with _container(engine, image, copying):
        pass
    with _container(engine, image, mount_of(Toolbox(name, path))) as container:
        try:
            return archive.same_as_archive(files, engine.archive(container, TOOLBOX))
        except EngineRefused as refusal:
            if "no such file" in refusal.message:  # the folders of the overlay
                return False
            raise


@contextmanager
def _container(engine: Engine, image: str, mount: Document) -> Iterator[str]:
    config: Document = {
        "Image": image,
        "Cmd": ["never-started"],
        "Labels": {LABEL: _BUILD},
        "HostConfig": {"NetworkMode": "none", "Mounts": [mount]},
    }
    container = engine.create(config, _CONTAINER)
    try:
        yield container
    finally:
        remove_container(engine, container, force=True)


def _mark(engine: Engine, name: str) -> None:
    labels = {LABEL: COMPLETE, BUILT_LABEL: str(int(time.time()))}
    # Has no effect if it exists. It is then the only one, or the others are removed next.
    engine.create_volume({"Name": f"{name}{COMPLETE_SUFFIX}", "Labels": labels})


def _remove_unmarked(engine: Engine, built: Built) -> None:
    """Remove the volumes of earlier builds that no container has.

    Those that still have a mark are left for the next build: an agent may be about to create a container.
    """
    labels = _labels(engine)
    in_use = set()
    for name, of in labels.items():
        if of[LABEL] == MOUNT and not _removed(engine, name):  # a mount whose container is gone is removed
            in_use.add(of.get(FILES_LABEL))
    for name, of in labels.items():
        if of[LABEL] != FILES or name == built.volume:
            continue
        if name in in_use or f"{name}{COMPLETE_SUFFIX}" in labels or not _removed(engine, name):
            built.kept.append(name)
        else:
            built.removed.append(name)


def _remove_other_marks(engine: Engine, built: Built) -> None:
    for name, of in _labels(engine).items():
        if of[LABEL] == COMPLETE and name != f"{built.volume}{COMPLETE_SUFFIX}":
            _removed(engine, name)


def _labels(engine: Engine) -> dict[str, dict[str, str]]:
    """Return the labels of all volumes of toolboxes, by name."""
    return {str(each["Name"]): each["Labels"] for each in sorted(engine.volumes(LABEL), key=_name)}


def _name(volume: Document) -> str:
    return str(volume["Name"])


def _removed(engine: Engine, name: str) -> bool:
    """Remove a volume. Return whether it is gone; it is not if a container has it.

    With `live-restore`, Docker before 24 counts it as mounted even after its container, if that ran while
    dockerd was restarted, until dockerd starts again (moby issue 44422).
    """
    try:
        engine.remove_volume(name)
    except EngineRefused as refusal:
        if refusal.status not in {404, 409} and "active mounts" not in refusal.message:
            raise
        return refusal.status == 404
    return True


def _remove_interrupted(engine: Engine) -> None:
    for container in engine.containers(f"{LABEL}={_BUILD}"):
        remove_container(engine, container["Id"], force=True)


@contextmanager
def _image(engine: Engine, files: Files) -> Iterator[str]:
    image = f"{_REPOSITORY}:{archive.digest(files)[:_DIGITS]}"
    layer = {f"{FILES_FOLDER}/{path}": entry for path, entry in files.items()}
    engine.import_image(archive.packed({**layer, EMPTY_FOLDER: Folder()}, TOOLBOX), image)
    try:
        yield image
    finally:
        with suppress(EngineRefused):
            engine.remove_image(image)


def _remove_wrong(engine: Engine, name: str) -> None:
    """Remove a volume that is incomplete, or was changed. Raises ToolboxError if containers may use it."""
    mounts = [each for each in _labels(engine).values() if each.get(FILES_LABEL) == name]
    if mounts or not _removed(engine, name):
        raise ToolboxError(
            f"the volume {name} was changed, and containers use it: delete their instances, then try again "
            f"(docker volume ls --filter label={FILES_LABEL}={name})"
        )
