"""The kinds of resources in files, and what is checked of them before anything is applied."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Final

from pydantic import BaseModel, ValidationError

from mooring_client.manifests.documents import Document
from mooring_client.schemas.instance_groups import InstanceGroupApply
from mooring_client.schemas.instances import InstanceApply
from mooring_client.schemas.pointers import escaped
from mooring_client.schemas.projects import ProjectApply
from mooring_client.schemas.reservations import ReservationApply
from mooring_client.schemas.templates import TemplateApply
from mooring_client.schemas.volumes import VolumeApply
from mooring_client.schemas.webhooks import WebhookApply


@dataclass(frozen=True, slots=True)
class ManifestKind:
    """A kind of resource that can be applied.

    Attributes:
        name: as in `kind:` of a document.
        resource: the attribute of the client whose methods `apply`, `plan` and `delete` are used.
        body: the fields of a document, besides `kind` and `project`.
        in_project: whether it belongs to a project.
    """

    name: str
    resource: str
    body: type[BaseModel]
    in_project: bool = True


# In the order in which they are applied: a later one may need an earlier one.
KINDS: Final = (
    ManifestKind("project", "projects", ProjectApply, in_project=False),
    ManifestKind("template", "templates", TemplateApply),
    ManifestKind("webhook", "webhooks", WebhookApply),
    ManifestKind("reservation", "reservations", ReservationApply),
    ManifestKind("volume", "volumes", VolumeApply),
    ManifestKind("instance", "instances", InstanceApply),
    ManifestKind("instance_group", "instance_groups", InstanceGroupApply),
)
_BY_NAME: Final = {kind.name: kind for kind in KINDS}


@dataclass(frozen=True, slots=True)
class Manifest:
    """A resource of a file.

    Attributes:
        body: of the request that applies it, without its project.
        project: name or ID of its project; None: the default.
    """

    kind: ManifestKind
    name: str
    project: str | None
    body: Mapping[str, Any]
    document: Document

    @property
    def title(self) -> str:
        return f"{self.kind.name}/{self.name}"


def manifests_of(documents: Iterable[Document]) -> tuple[list[Manifest], list[str]]:
    """The resources of documents in the order to apply them, and what is wrong with the documents."""
    found: dict[tuple[str, str | None, str], Manifest] = {}
    problems: list[str] = []
    for document in documents:
        own_problems = _problems_of(document)
        problems += own_problems
        if own_problems:
            continue
        made = _manifest(document)
        first = found.setdefault((made.kind.name, made.project, made.name), made)
        if first is not made:
            problems.append(f"{document.where()}: {made.title} is also in {first.document.where()}")
    order = list(_BY_NAME)
    return sorted(found.values(), key=lambda each: order.index(each.kind.name)), problems


def _manifest(document: Document) -> Manifest:
    body = {name: value for name, value in document.value.items() if name not in {"kind", "project"}}
    kind = _BY_NAME[document.value["kind"]]
    project = document.value.get("project") or body.pop("project_id", None)
    return Manifest(kind, body["name"], project, body, document)


def _problems_of(document: Document) -> Sequence[str]:
    value = document.value
    if not isinstance(value, dict):
        return [f"{document.where()}: a document must have fields, such as `kind: instance`"]
    if "kind" not in value:
        return [f"{document.where()}: `kind` is missing: {', '.join(_BY_NAME)}"]
    kind = _BY_NAME.get(value["kind"]) if isinstance(value["kind"], str) else None
    if kind is None:
        known = ", ".join(_BY_NAME)
        return [f"{document.where('/kind')}: unknown kind {value['kind']!r}; it is one of: {known}"]
    return [*_problems_of_name(document), *_problems_of_project(document, kind), *_invalid(document, kind)]


def _problems_of_name(document: Document) -> Iterable[str]:
    if not document.value.get("name"):
        yield f"{document.where('/name')}: `name` is missing: it is what the resource is found by"


def _problems_of_project(document: Document, kind: ManifestKind) -> Iterable[str]:
    if "project" not in document.value:
        return
    if not kind.in_project:
        yield f"{document.where('/project')}: unknown field project in {kind.name}"
    elif "project_id" in document.value:
        yield f"{document.where('/project')}: give project or project_id, not both"
    elif not isinstance(document.value["project"], str):
        yield f"{document.where('/project')}: project must be the name or ID of a project"


def _invalid(document: Document, kind: ManifestKind) -> Iterable[str]:
    body = {name: value for name, value in document.value.items() if name not in {"kind", "project"}}
    try:
        kind.body.model_validate(body)
    except ValidationError as error:
        shown = set()
        for each in error.errors(include_url=False, include_context=False):
            place = _place(document, each["loc"])
            # Each form that a value may have reports an error of its own.
            if place not in shown:
                shown.add(place)
                yield f"{document.where(place)}: {_message(kind, place, each)}"


def _place(document: Document, where: Sequence[int | str]) -> str:
    """The pointer to a value. The end of `where` may name the form that the value was read as."""
    pointer = ""
    for part in where:
        longer = f"{pointer}/{escaped(str(part))}"
        if longer not in document.lines:
            break
        pointer = longer
    return pointer


def _message(kind: ManifestKind, place: str, error: Any) -> str:
    field = place.removeprefix("/").replace("/", ".")
    if error["type"] == "extra_forbidden":
        known = [] if "." in field else list(kind.body.model_fields)
        close = get_close_matches(field, known, n=1)
        return f"unknown field {field} in {kind.name}" + (f"; did you mean {close[0]}?" if close else "")
    if error["type"] == "missing":
        return f"`{'.'.join(map(str, error['loc']))}` is missing"
    if error["type"] == "string_type":
        is_part = isinstance(error["input"], dict | list)
        return f"{field}: must be text" + ("" if is_part else "; quote the value")
    return f"{field}: {error['msg']}" if field else str(error["msg"])
