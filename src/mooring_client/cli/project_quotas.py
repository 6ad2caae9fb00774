"""`mooring projects quota`: the quotas of a project, and what it uses of them."""

from collections.abc import Callable, Iterator
from typing import Annotated, Any

import typer

from mooring_client.cli import values
from mooring_client.cli.output import Format, FormatOption, show_one, size, table
from mooring_client.cli.resources import ProjectArgument, find_project
from mooring_client.cli.session import connect

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Change the quotas of projects.")


def limit(text: str | None, parse: Callable[[str], Any], option: str) -> Any:
    """The value of an option for a limit: `none` is None, an option that is not given is UNSET.

    Raises:
        typer.BadParameter: it is no number.
    """
    if text is None or text == "none":
        return given(None) if text is None else None
    try:
        return parse(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is neither a number nor none", param_hint=option) from None


def given(value: Any) -> Any:
    """The value of an option; UNSET if it is not given."""
    from mooring_client.calls import UNSET

    return UNSET if value is None else value


def number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


@app.command("set")
def set_quota(
    project: ProjectArgument,
    gpus: Annotated[str | None, typer.Option(help="number of GPUs, or none")] = None,
    gpus_of: Annotated[
        list[str] | None, typer.Option(help="MODEL=number, or MODEL=none: of GPUs of one model")
    ] = None,
    instances: Annotated[str | None, typer.Option(help="number that have not ended, or none")] = None,
    cpus: Annotated[str | None, typer.Option(help="number of CPUs, or none")] = None,
    memory: Annotated[str | None, typer.Option(help="such as 512g, or none")] = None,
    disk: Annotated[str | None, typer.Option(help="such as 2t, or none")] = None,
    volumes: Annotated[str | None, typer.Option(help="sizes of all volumes, such as 5t, or none")] = None,
    gpu_hours_per_day: Annotated[str | None, typer.Option(help="per UTC day, or none")] = None,
    gpu_hours_per_month: Annotated[str | None, typer.Option(help="per UTC month, or none")] = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Change quotas of a project, and show all; those that are not given stay.

    The JSON is the project, as of GET /v1/projects/{id}.
    """
    from mooring_client.calls import changes, if_match, path

    wanted = changes(
        gpus=limit(gpus, int, "--gpus"),
        instances=limit(instances, int, "--instances"),
        cpus=limit(cpus, float, "--cpus"),
        memory_mib=limit(memory, values.mib, "--memory"),
        disk_mib=limit(disk, values.mib, "--disk"),
        volumes_mib=limit(volumes, values.mib, "--volumes"),
        gpu_hours_per_day=limit(gpu_hours_per_day, float, "--gpu-hours-per-day"),
        gpu_hours_per_month=limit(gpu_hours_per_month, float, "--gpu-hours-per-month"),
    )
    models = values.pairs(gpus_of or [], "--gpus-of")
    of_models = {model: limit(text, int, "--gpus-of") for model, text in models.items()}
    if not wanted and not models:
        raise typer.BadParameter("give at least one quota; --help lists them")
    with connect() as client:
        found = find_project(client, project)
        if models:
            merged = {**found["quotas"]["gpus_by_model"], **of_models}
            wanted["gpus_by_model"] = {model: most for model, most in merged.items() if most is not None}
        # The API replaces the quotas of all models at once, so what others change meanwhile must not be lost.
        version = if_match(found["version"] if models else None)
        route = path("/v1/projects/{}", found["id"])
        changed = client.request("PATCH", route, body={"quotas": wanted}, headers=version)
    if output in {Format.TABLE, Format.WIDE}:
        print("\n".join(table(["QUOTA", "USED", "LIMIT"], list(rows(changed)))))
    else:
        show_one(changed, output, [])


def rows(project: Any) -> Iterator[tuple[str, str, str]]:
    """Each quota of a project with its usage: what it limits, how much is used, and the limit."""
    quotas, usage = project["quotas"], project["usage"]
    yield _row("GPUs", usage["gpus"], quotas["gpus"])
    for model, most in quotas["gpus_by_model"].items():
        yield _row(f"GPUs {model}", usage["gpus_by_model"].get(model, 0), most)
    yield _row("instances", usage["instances"], quotas["instances"])
    yield _row("CPUs", usage["cpus"], quotas["cpus"])
    yield _row("memory", usage["memory_mib"], quotas["memory_mib"], size)
    yield _row("disk", usage["disk_mib"], quotas["disk_mib"], size)
    # A server of an earlier release has no volumes.
    yield _row("volumes", usage.get("volumes_mib", 0), quotas.get("volumes_mib"), size)
    yield _row("GPU-hours today", usage["gpu_hours_today"], quotas["gpu_hours_per_day"])
    yield _row("GPU-hours this month", usage["gpu_hours_this_month"], quotas["gpu_hours_per_month"])


def _row(
    what: str, used: float, most: float | None, shown: Callable[[float], str] = number
) -> tuple[str, str, str]:
    return what, shown(used), "none" if most is None else shown(most)
