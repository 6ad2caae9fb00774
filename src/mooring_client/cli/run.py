"""`mooring run`: start an instance, show how it waits and starts, and then its output."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mooring_client.cli import values
from mooring_client.cli.completion import names_of
from mooring_client.cli.session import connect, project_id, say

if TYPE_CHECKING:
    from mooring_client.sync.client import Mooring


def run(
    image: Annotated[str | None, typer.Argument(metavar="IMAGE")] = None,
    command: Annotated[
        list[str] | None, typer.Argument(metavar="[-- CMD [ARG]...]", help="instead of the image's own")
    ] = None,
    template: Annotated[
        str | None,
        typer.Option(
            "--template",
            "-T",
            help="a template instead of IMAGE; other options replace its fields",
            autocompletion=names_of("/v1/templates"),
        ),
    ] = None,
    param: Annotated[
        list[str] | None, typer.Option("--param", help="NAME=value: a parameter of the template")
    ] = None,
    name: Annotated[str | None, typer.Option("--name", "-n", help="default: generated")] = None,
    gpus: Annotated[int, typer.Option("--gpus", "-g", min=0, help="whole GPUs, or MIG devices")] = 0,
    model: Annotated[
        list[str] | None, typer.Option("--model", "-m", help="H100; several: alternatives, the best first")
    ] = None,
    share: Annotated[float | None, typer.Option(help="a part of one GPU, such as 0.25")] = None,
    mig: Annotated[str | None, typer.Option(help="a MIG profile, such as 1g.10gb")] = None,
    gpu_memory: Annotated[str | None, typer.Option(help="least memory of each GPU, such as 40g")] = None,
    cpus: Annotated[float | None, typer.Option(help="default: in proportion to the GPUs")] = None,
    memory: Annotated[
        str | None, typer.Option(help="such as 64g; default: in proportion to the GPUs")
    ] = None,
    shm: Annotated[str | None, typer.Option(help="shared memory, such as 8g")] = None,
    disk: Annotated[str | None, typer.Option(help="space for the container's files, such as 50g")] = None,
    env: Annotated[
        list[str] | None, typer.Option("--env", "-e", help="NAME=value, or NAME as it is here")
    ] = None,
    env_file: Annotated[list[Path] | None, typer.Option(help="a file with lines NAME=value")] = None,
    secret: Annotated[
        list[str] | None, typer.Option(help="NAME, or NAME=secret: a secret as a variable")
    ] = None,
    port: Annotated[
        list[int] | None, typer.Option("--port", "-P", help="a port to publish on the node")
    ] = None,
    volume: Annotated[
        list[str] | None,
        typer.Option("--volume", "-v", help="NAME:/path, or NAME:/path:ro: a volume of your project"),
    ] = None,
    label: Annotated[list[str] | None, typer.Option("--label", "-l", help="key=value")] = None,
    node_selector: Annotated[list[str] | None, typer.Option(help="key=value that the node must have")] = None,
    workdir: Annotated[str | None, typer.Option("--workdir", "-w")] = None,
    user: Annotated[str | None, typer.Option("--user", "-u", help="name or uid, and :group")] = None,
    entrypoint: Annotated[str | None, typer.Option(help="instead of the image's own")] = None,
    max_duration: Annotated[
        str | None, typer.Option("--max-duration", help="stop after: 30m, 8h, 2d")
    ] = None,
    restart: Annotated[str | None, typer.Option(help="never, on_failure or always")] = None,
    priority: Annotated[int | None, typer.Option(min=0, max=100)] = None,
    preemptible: Annotated[bool, typer.Option("--preemptible", help="others may take its GPUs")] = False,
    no_queue: Annotated[bool, typer.Option("--no-queue", help="fail if it cannot start now")] = False,
    interactive: Annotated[bool, typer.Option("--interactive", "-i", help="pass your input on")] = False,
    tty: Annotated[bool, typer.Option("--tty", "-t", help="run it in a terminal")] = False,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="print its ID and return")] = False,
    remove: Annotated[bool, typer.Option("--rm", help="delete it after its end")] = False,
) -> None:
    """Start an instance, and show its output until it ends. Exit with its exit code.

    While it waits, its position in the queue, the reason and the predicted start are shown. Ctrl-C stops it;
    a second Ctrl-C leaves it running. With --template, what follows are the command and its arguments.
    """
    image, command = _image_and_command(image, command or [], template, param)
    spec = {
        "image": image,
        "command": command or None,
        "name": name,
        "gpus": _gpus(gpus, model or [], share, mig, gpu_memory),
        "cpus": cpus,
        "memory_mib": memory and values.mib(memory),
        "shm_mib": shm and values.mib(shm),
        "disk_mib": disk and values.mib(disk),
        "env": values.environment(env or (), env_file or (), secret or ()) or None,
        "ports": [{"container": each} for each in port or ()] or None,
        "volumes": values.mounts(volume or ()) or None,
        "labels": values.pairs(label or (), "--label") or None,
        "node_selector": values.pairs(node_selector or (), "--node-selector") or None,
        "working_dir": workdir,
        "user": user,
        "entrypoint": None if entrypoint is None else [entrypoint],
        "max_duration_s": max_duration and values.seconds(max_duration),
        "restart": restart,
        "priority": priority,
        "preemptible": preemptible or None,
        "on_capacity": "fail" if no_queue else None,
        "tty": tty or None,
        "stdin": interactive or None,
        "attach": None if detach else True,
    }
    if tty and not detach:
        from mooring_client.cli.terminal import require_terminal

        require_terminal()
    with connect() as client:
        spec["project_id"] = project_id(client)
        given = {field: value for field, value in spec.items() if value is not None}
        if template is not None:
            given = _joined(_rendered(client, template, param), given)
        created = client.request("POST", "/v1/instances", body=given)
        if not detach:
            raise typer.Exit(_attached(client, created, interactive=interactive, tty=tty, remove=remove))
        print(created["id"])
        if name is None:
            say(f"started as {created['name']}")


def _image_and_command(
    image: str | None, command: list[str], template: str | None, param: list[str] | None
) -> tuple[str | None, list[str]]:
    """Raises typer.BadParameter: there is neither an image nor a template."""
    if template is not None:
        # There is no image, so the first argument is already of the command.
        return None, [*([image] if image else []), *command]
    if image is None:
        raise typer.BadParameter("give an IMAGE, or --template NAME", param_hint="IMAGE")
    if param:
        raise typer.BadParameter("is for --template", param_hint="--param")
    return image, command


def _rendered(client: "Mooring", template: str, param: list[str] | None) -> dict[str, Any]:
    from mooring_client.cli.templates import rendered

    return rendered(client, template, param or ())


def _joined(spec: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """The spec of a template with the fields of options: objects are joined, other fields replaced."""
    both = {name for name in spec.keys() & given.keys() if isinstance(spec[name], dict)}
    return {**spec, **given, **{name: {**spec[name], **given[name]} for name in both}}


def _gpus(
    count: int, models: list[str], share: float | None, mig: str | None, memory: str | None
) -> dict[str, Any] | None:
    wanted: dict[str, Any] = {
        "count": count or None,
        "model": models[0] if len(models) == 1 else models or None,
        "share": share,
        "mig_profile": mig,
        "min_memory_mib": memory and values.mib(memory),
    }
    given = {field: value for field, value in wanted.items() if value is not None}
    if given and not count and share is None and mig is None:
        given["count"] = 1  # `--model H100` alone means one of them
    return given or None


def _attached(client: "Mooring", created: Any, *, interactive: bool, tty: bool, remove: bool) -> int:
    from mooring_client.cli.attached import Attached

    return Attached(client, created["id"], created["name"], stdin=interactive, tty=tty, remove=remove).run()
