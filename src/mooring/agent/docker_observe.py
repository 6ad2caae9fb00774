"""What the engine says about our containers, read cheaply: only those that changed are inspected."""

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from mooring.agent.devices import Share
from mooring.agent.docker_create import (
    ATTEMPT,
    CARDS,
    CONTROL_PLANE,
    GPUS,
    HOST_PORTS,
    IMAGE,
    INSTANCE,
    PROJECT,
    SHARE,
)
from mooring.agent.docker_engine import Document, Engine
from mooring.agent.docker_errors import EngineRefused
from mooring.agent.runtime import Container
from mooring.agent.withheld import Withheld
from mooring.schemas.agent import Endpoint, Orphan

_NEVER = "0001-01-01T00:00:00Z"  # Go's zero time
# Somebody may restart a container by hand between two lists; its ports change and the list looks the same.
_MAX_AGE_S = 60.0


@dataclass(frozen=True, slots=True)
class _Known:
    looks: tuple[str, str]
    container: Container
    read_at: float


class Observer:
    """Lists containers, from one thread at a time; the rest may be called from any."""

    def __init__(self, engine: Engine, address: str) -> None:
        self._engine = engine
        self._address = address
        self._known: dict[str, _Known] = {}
        self._doubted: set[str] = set()

    def containers(self, control_plane_id: str | None) -> tuple[list[Container], list[Orphan]]:
        """Ours, and labelled ones that belong to another control plane or make no sense.

        Raises:
            RuntimeUnavailable: the list is not to be had, which does not mean that it is empty.
        """
        ours, orphans = [], []
        listed = self._engine.containers(INSTANCE)
        for entry in listed:
            if is_ours(entry["Labels"], control_plane_id):
                ours.append(self._observe(entry))
            else:
                orphans.append(_orphan(entry))
        for gone in (self._known.keys() | self._doubted) - {entry["Id"] for entry in listed}:
            self.forget(gone)
            self._doubted.discard(gone)
        return [container for container in ours if container is not None], orphans

    def read(self, container_id: str) -> Container | None:
        """One container as it is now; None when it is gone."""
        try:
            return container_of(self._engine.container(container_id), self._address)
        except EngineRefused as refusal:
            if refusal.status == 404:
                return None
            raise

    def on(self, gpu_uuid: str) -> list[Container]:
        """The containers that ran at the last listing with this GPU or MIG device."""
        seen = [known.container for known in list(self._known.values())]
        return [one for one in seen if one.status == "running" and gpu_uuid in one.gpu_uuids]

    def forget(self, container_id: str) -> None:
        """It was changed by us, perhaps back into what it looked like before."""
        self._known.pop(container_id, None)

    def doubt(self, container_id: str) -> None:
        """Something happened to it that the engine's list may not show yet.

        The engine tells of an end before its list does, some 100 ms later; "inspect" waits in between.
        """
        self._doubted.add(container_id)

    def _observe(self, entry: Document) -> Container | None:
        container_id, looks = entry["Id"], _looks(entry)
        if container_id in self._doubted:
            self._doubted.discard(container_id)  # before it is read: what happens later is another doubt
            self.forget(container_id)
        known = self._known.get(container_id)
        if known and known.looks == looks and time.monotonic() - known.read_at < _MAX_AGE_S:
            return known.container
        if (container := self.read(container_id)) is not None:
            self._known[container_id] = _Known(looks, container, time.monotonic())
        return container


def is_ours(labels: Mapping[str, str], control_plane_id: str | None) -> bool:
    """Whether these labels were written for this control plane; anybody may write labels by hand."""
    return (
        control_plane_id is not None
        and labels.get(CONTROL_PLANE) == control_plane_id
        and bool(labels.get(INSTANCE))
        and labels.get(ATTEMPT, "").isdecimal()
    )


def container_of(inspected: Document, address: str) -> Container:
    """A container from the engine's "inspect"."""
    labels, state = inspected["Config"]["Labels"], inspected["State"]
    ended = state["Status"] in {"exited", "dead"}
    return Container(
        instance_id=labels[INSTANCE],
        attempt=int(labels[ATTEMPT]),
        container_id=inspected["Id"],
        status=state["Status"],
        gpu_uuids=_listed(labels, GPUS),
        cards=_listed(labels, CARDS),
        share=share_of(labels),
        project_id=labels.get(PROJECT, ""),
        exit_code=state["ExitCode"] if ended else None,
        oom_killed=bool(state.get("OOMKilled")),
        error=Withheld.of_container(inspected).mask(state.get("Error") or "") or None,
        started_at=_time(state["StartedAt"]),
        finished_at=_time(state["FinishedAt"]) if ended else None,
        image_digest=labels.get(IMAGE) or None,
        endpoints=(
            _endpoints(inspected["NetworkSettings"].get("Ports") or {}, address)
            or _host_endpoints(labels.get(HOST_PORTS, ""), address)
        ),
    )


def share_of(labels: Mapping[str, str]) -> Share | None:
    """None where the container has whole cards, MIG devices or nothing."""
    parts = re.fullmatch(r"(mps|shared)/(\d+)/(\d+)", labels.get(SHARE, ""))
    if parts is None:
        return None
    isolation: Literal["mps", "shared"] = "mps" if parts[1] == "mps" else "shared"
    return Share(isolation, int(parts[2]), int(parts[3]), labels.get(PROJECT, ""))


def _listed(labels: Mapping[str, str], name: str) -> tuple[str, ...]:
    return tuple(filter(None, labels.get(name, "").split(",")))


def _looks(entry: Document) -> tuple[str, str]:
    """What a change would show in; `Status` without its age ("Exited (1) 2 minutes ago")."""
    code = re.match(r"\w+ \(-?\d+\)", entry.get("Status") or "")
    return entry["State"], code.group() if code else ""


def _endpoints(ports: Mapping[str, Any], address: str) -> tuple[Endpoint, ...]:
    found = []
    for name, bindings in sorted(ports.items()):
        number, protocol = name.split("/")
        # The engine publishes on IPv6 too, on a port of its own; one that works from anywhere is enough.
        bound = [binding for binding in bindings or [] if ":" not in binding.get("HostIp", "")] or bindings
        if bound and protocol in {"tcp", "udp"}:
            port = int(bound[0]["HostPort"])
            found.append(Endpoint(container=int(number), protocol=protocol, host=address, port=port))
    return tuple(found)


def _host_endpoints(ports: str, address: str) -> tuple[Endpoint, ...]:
    """On its host's network a container listens on the ports that it asked for."""
    named = [port.split("/") for port in sorted(filter(None, ports.split(",")))]
    return tuple(
        Endpoint.model_validate({"container": number, "protocol": protocol, "host": address, "port": number})
        for number, protocol in named
    )


def _orphan(entry: Document) -> Orphan:
    labels = entry["Labels"]
    name = (entry["Names"] or [entry["Id"]])[0].lstrip("/")
    return Orphan(
        container_id=entry["Id"],
        name=name,
        instance_id=labels.get(INSTANCE, ""),
        control_plane_id=labels.get(CONTROL_PLANE),
    )


def _time(text: str) -> str | None:
    return None if text == _NEVER else text
