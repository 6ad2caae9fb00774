"""Applies the resources of files, and plans it."""

import json
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import typer

from mooring_client.cli.session import project_id, say
from mooring_client.errors import BeingDeleted, Invalid, MooringError, NotFound, RequiresReplacement
from mooring_client.failures import ClientFailure
from mooring_client.manifests.kinds import Manifest
from mooring_client.terminal_text import clean_line

if TYPE_CHECKING:
    from mooring_client.schemas.applying import ApplyPlan
    from mooring_client.sync.client import Mooring

# How long a resource with the same name may take to be deleted: its program may need a while to stop.
_GONE_WITHIN_S: Final = 180.0
_LOOK_EVERY_S: Final = 0.5
# `from` is a keyword of Python.
_RENAMED: Final = {"from": "from_at", "to": "to_at"}


class NotReplaced(ClientFailure):
    """A resource was not replaced, or it was deleted and could not be created again."""


class Applier:
    """Applies resources with one client.

    Args:
        replace: delete and create resources again that cannot be changed.
        yes: do that without a question.
    """

    def __init__(self, client: "Mooring", *, replace: bool = False, yes: bool = False) -> None:
        self._client, self._replace, self._yes = client, replace, yes
        self._default = project_id(client)
        self._projects: dict[str, str] = {}
        self._planned_projects: set[str] = set()

    def apply(self, manifest: Manifest) -> str:
        """Apply one resource. Returns created, changed, unchanged or replaced.

        Raises:
            MooringError, ClientFailure: it was not applied.
        """
        fields = self._fields(manifest)
        try:
            return self._applied(manifest, fields)
        except RequiresReplacement as error:
            if not self._replace:
                raise
            self._delete(manifest, fields, error)
        try:
            self._applied(manifest, fields)
        except (MooringError, ClientFailure) as error:
            raise NotReplaced(
                f"it was deleted, and could not be created again: {error}; apply it again"
            ) from None
        return "replaced"

    def _applied(self, manifest: Manifest, fields: dict[str, Any]) -> str:
        deadline = time.monotonic() + _GONE_WITHIN_S
        has_waited = False
        while True:
            try:
                outcome = _resource(self._client, manifest).apply(manifest.name, **fields).outcome
            except BeingDeleted:
                if time.monotonic() > deadline:
                    raise
                if not has_waited:
                    say(f"{manifest.title}: waiting until the former one is deleted")
                has_waited = True
                time.sleep(_LOOK_EVERY_S)
            else:
                return str(outcome) or "applied"  # a proxy may remove the header that says what was done

    def _delete(self, manifest: Manifest, fields: dict[str, Any], error: RequiresReplacement) -> None:
        plan = _resource(self._client, manifest).plan(manifest.name, **fields)
        for line in changes(plan):
            say(f"  {line}")
        question = f"delete {manifest.title} and create it again?"
        if not self._yes and not typer.confirm(question, err=True):
            raise NotReplaced("it was not replaced: you did not agree")
        _resource(self._client, manifest).delete(error.fields["id"])

    def plan(self, manifest: Manifest) -> "ApplyPlan":
        """What `apply` would do. The server carries it out and rolls back, so it finds what `apply` would.

        Raises:
            MooringError, ClientFailure: it could not be applied.
        """
        from mooring_client.schemas.applying import ApplyPlan

        new = ApplyPlan(outcome="created", id=None, changes=[])
        if manifest.project in self._planned_projects:
            return new
        try:
            plan: ApplyPlan = _resource(self._client, manifest).plan(manifest.name, **self._fields(manifest))
        except BeingDeleted:
            plan = new  # `apply` waits until it is gone
        if manifest.kind.name == "project" and plan.outcome == "created":
            self._planned_projects.add(manifest.name)
        return plan

    def _fields(self, manifest: Manifest) -> dict[str, Any]:
        fields = {_RENAMED.get(name, name): value for name, value in manifest.body.items()}
        del fields["name"]
        if manifest.kind.in_project and manifest.body.get("scope") != "global":
            fields["project_id"] = self._project_id(manifest.project)
        return fields

    def _project_id(self, reference: str | None) -> str | None:
        if reference is None:
            return self._default
        if reference.startswith("prj_"):
            return reference
        if reference not in self._projects:
            found = next(iter(self._client.projects.list(name=reference)), None)
            if found is None:
                raise NotFound(f"there is no project {reference!r} that you can see")
            self._projects[reference] = found.id
        return self._projects[reference]


def _resource(client: "Mooring", manifest: Manifest) -> Any:
    return getattr(client, manifest.kind.resource)


def changes(plan: "ApplyPlan") -> Iterator[str]:
    """A line for each field that differs."""
    for each in plan.changes:
        if each.before is None and each.after is None:
            text = "differs (values of env are not shown)"
        else:
            text = f"{_shown(each.before)} -> {_shown(each.after)}"
        fixed = " (fixed: needs a new one)" if each.fixed else ""
        yield clean_line(f"{each.pointer}: {text}{fixed}")


def _shown(value: str | None) -> str:
    return "(none)" if value is None else value


def new_fields(manifest: Manifest) -> Iterator[str]:
    """A line for each field of a resource that does not exist yet."""
    for name, value in manifest.body.items():
        if name != "name":
            yield clean_line(
                f"/{name}: (none) -> {json.dumps(_without_env(name, value), ensure_ascii=False)}"
            )


def _without_env(name: str, value: Any) -> Any:
    """The value, without the values of variables, which may be secrets."""
    if name == "env" and isinstance(value, dict):
        return dict.fromkeys(value, "...")
    if isinstance(value, dict):
        return {key: _without_env(key, part) for key, part in value.items()}
    return value


def reason(manifest: Manifest, failure: MooringError | ClientFailure, *, may_replace: bool) -> str:
    """Why a resource was not applied, in one line, with the places in the file that are to blame."""
    if isinstance(failure, RequiresReplacement):
        pointers = ", ".join(failure.fields["pointers"])
        hint = "" if may_replace else "; --replace deletes it and creates it again"
        return clean_line(f"{pointers} cannot be changed{hint}")
    if isinstance(failure, Invalid) and failure.fields.get("errors"):
        errors = failure.fields["errors"]
        return clean_line(
            "; ".join(f"{manifest.document.where(each['pointer'])}: {each['message']}" for each in errors)
        )
    code = f" ({failure.code})" if isinstance(failure, MooringError) else ""
    return clean_line(f"{failure}{code}")


def require_terminal(*, replace: bool, yes: bool) -> None:
    """Raises typer.BadParameter: with --replace, nobody could be asked."""
    if replace and not yes and not sys.stdin.isatty():
        raise typer.BadParameter(
            "there is no terminal to ask on before something is deleted; add --yes", param_hint="--replace"
        )
