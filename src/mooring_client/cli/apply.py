"""`mooring apply` and `mooring diff`: resources from files."""

from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Final

import typer

from mooring_client.cli.applying import Applier, changes, new_fields, reason, require_terminal
from mooring_client.cli.exits import Exit, exit_of, message_of
from mooring_client.cli.manifest_files import FilesOption, manifests_in
from mooring_client.cli.session import connect, say
from mooring_client.errors import MooringError, RequiresReplacement, Unauthorized
from mooring_client.failures import BadAnswer, ClientFailure, ConnectionFailed
from mooring_client.manifests.kinds import Manifest

# Each further request would fail in the same way.
_FINAL: Final = (BadAnswer, ConnectionFailed, Unauthorized)


def apply(
    files: FilesOption,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="only say what would be done")] = False,
    replace: Annotated[
        bool,
        typer.Option("--replace", help="delete and create again what has other values of fixed fields"),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="with --replace: without a question")] = False,
) -> None:
    """Create or change the resources of YAML files. What is as requested already stays as it is.

    Each document has a kind (project, reservation, instance or instance_group), a name, maybe a project, and
    the fields of the API's PUT by name. Variables such as ${NAME} are not substituted. If anything in the
    files is wrong, nothing is applied. The exit code is 1 if a resource could not be applied.
    """
    manifests = manifests_in(files)
    require_terminal(replace=replace and not dry_run, yes=yes)
    with connect() as client:
        applier = Applier(client, replace=replace, yes=yes)

        def planned(manifest: Manifest) -> str:
            plan = applier.plan(manifest)
            if plan.outcome != "requires_replacement":
                return plan.outcome if plan.outcome == "unchanged" else f"would be {plan.outcome}"
            if not replace:
                fixed = [each.pointer for each in plan.changes if each.fixed]
                raise RequiresReplacement("", id=plan.id, pointers=fixed)
            return "would be replaced"

        failures = _for_each(manifests, planned if dry_run else applier.apply, may_replace=replace)
    raise typer.Exit(_exit_of(failures))


def _exit_of(failures: Sequence[Exception]) -> int:
    """That of a failure which ended everything, or 1 if single resources could not be applied."""
    if failures and isinstance(failures[-1], _FINAL):
        return exit_of(failures[-1])
    return Exit.ERROR if failures else 0


def diff(files: FilesOption) -> None:
    """Show each field that `mooring apply` would change, as the server finds it. Nothing is changed.

    Exits with 0 if nothing differs, 1 if something differs, and 2 or more if that is not known.
    """
    manifests = manifests_in(files)
    try:
        outcome = _differing(manifests)
    except (MooringError, ClientFailure) as failure:
        say(message_of(failure))
        outcome = _trouble([failure])
    raise typer.Exit(outcome)


def _trouble(failures: Iterable[Exception]) -> int:
    """The exit code of failures: not 1, which says that something differs."""
    return max(Exit.USAGE, *map(exit_of, failures))


def _differing(manifests: Sequence[Manifest]) -> int:
    differing = False
    with connect() as client:
        applier = Applier(client)

        def compare(manifest: Manifest) -> str | None:
            nonlocal differing
            plan = applier.plan(manifest)
            if plan.outcome == "unchanged":
                return None
            differing = True
            lines = new_fields(manifest) if plan.outcome == "created" else changes(plan)
            return "\n  ".join([_TITLES[plan.outcome], *lines])

        failures = _for_each(manifests, compare, may_replace=False)
    return _trouble(failures) if failures else int(differing)


_TITLES: Final = {
    "created": "would be created",
    "changed": "would be changed",
    "requires_replacement": "cannot be changed, only replaced",
}


def _for_each(
    manifests: Sequence[Manifest], act: Callable[[Manifest], str | None], *, may_replace: bool
) -> list[Exception]:
    """Act on each resource and print what was done. Returns the failures."""
    failures: list[Exception] = []
    for number, manifest in enumerate(manifests, 1):
        try:
            done = act(manifest)
        except (MooringError, ClientFailure) as failure:
            failures.append(failure)
            done = f"failed: {reason(manifest, failure, may_replace=may_replace)}"
        if done is not None:
            print(f"{manifest.title} {done}", flush=True)
        if failures and isinstance(failures[-1], _FINAL):
            if left := len(manifests) - number:
                say(f"mooring: {left} more were not tried")
            break
    return failures
