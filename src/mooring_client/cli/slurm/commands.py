"""`mooring slurm`: srun, sbatch, squeue and scancel for scripts and habits of Slurm."""

import argparse
import os
import re
import secrets
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from mooring_client.cli.resources import every, for_each
from mooring_client.cli.session import ENDED, chosen_project, connect, project_id, say
from mooring_client.cli.slurm import options
from mooring_client.cli.slurm.options import BadOption
from mooring_client.errors import NotFound
from mooring_client.terminal_text import clean_line

if TYPE_CHECKING:
    from mooring_client.sync.client import Mooring

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    help="Slurm's commands, for scripts that use them: srun, sbatch, squeue, scancel.",
)

_JOB: Final = "slurm-job"
_TASK: Final = "slurm-array-task"
_PROGRAMS: Final = ("srun", "sbatch", "squeue", "scancel")
_RAW: Final = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


@app.command(context_settings=_RAW, add_help_option=False)
def srun(ctx: typer.Context) -> None:
    """Run a command as a job, and show its output. Exit with its exit code."""
    given = _parsed("srun", ctx.args)
    if not given.command:
        raise typer.BadParameter("give a command: srun [OPTIONS] COMMAND [ARG]...")
    if given.output:
        sys.stdout.flush()
        descriptor = os.open(given.output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        os.dup2(descriptor, sys.stdout.fileno())
    name = given.job_name or Path(given.command[0]).name
    with connect() as client:
        fields = {
            "command": given.command,
            "attach": True,
            **({"tty": True, "stdin": True} if given.pty else {}),
        }
        job = _Job(client, given, name)
        created = job.create(fields)
        from mooring_client.cli.attached import Attached

        attached = Attached(
            client, created["id"], created["name"], stdin=given.pty, tty=given.pty, remove=False
        )
        raise typer.Exit(attached.run())


@app.command(context_settings=_RAW, add_help_option=False)
def sbatch(ctx: typer.Context) -> None:
    """Submit a script as a job, or several with --array. `mooring logs NAME` has its output."""
    given = _parsed("sbatch", ctx.args)
    script, arguments = _script(given)
    try:
        given = _parsed("sbatch", [*options.of_script(script), *ctx.args])
        command = options.command_of(script, arguments)
        indexes = options.tasks(given.array) if given.array else [None]
    except BadOption as error:
        raise typer.BadParameter(str(error)) from None
    if given.output:
        say("without effect: --output; `mooring logs` has the output")
    named = Path(given.command[0]).name if given.command and not given.wrap else "wrap"
    with connect() as client:
        job = _Job(client, given, given.job_name or named)
        created = [job.create({"command": command}, index) for index in indexes]
        print(job.number if given.parsable else f"Submitted batch job {job.number}", flush=True)
        if not given.quiet and not given.parsable:
            say(f"output: mooring logs -f {created[0]['name']}")
        if given.wait:
            raise typer.Exit(max(_end_of(client, each["id"]) for each in created))


def _end_of(client: "Mooring", instance_id: str) -> int:
    from mooring_client.cli.instances import end_of

    return end_of(client, instance_id)


@app.command(context_settings=_RAW, add_help_option=False)
def squeue(ctx: typer.Context) -> None:
    """List jobs that have not ended."""
    made = _QueueParser("squeue")
    made.add_argument("-j", "--jobs", "--job", default="")
    made.add_argument("-n", "--name", default="")
    made.add_argument("-t", "--states", default="")
    made.add_argument("-o", "--format", default=_FORMAT)
    made.add_argument("-h", "--noheader", action="store_true")
    made.add_argument("-u", "--user")  # jobs are of a project
    made.add_argument("--me", action="store_true")
    given = made.parse_args(ctx.args)
    wanted = {text.upper() for text in filter(None, given.states.split(","))}
    with connect() as client:
        found = [
            each for each in _jobs(client, given.jobs, given.name) if not wanted or wanted & set(_state(each))
        ]
    if not given.noheader:
        print(_line(given.format, lambda code: _COLUMNS[code][0]))
    for row in reversed(found):
        print(_line(given.format, partial(_cell, row)))


@app.command(context_settings=_RAW, add_help_option=False)
def scancel(ctx: typer.Context) -> None:
    """Stop jobs: by number, by --name, or all of --me."""
    made = _QueueParser("scancel")
    made.add_argument("-n", "--name", default="")
    made.add_argument("-u", "--user")
    made.add_argument("--me", action="store_true")
    made.add_argument("jobs", nargs="*")
    given = made.parse_args(ctx.args)
    if not (given.jobs or given.name or given.me or given.user):
        raise typer.BadParameter("give the number of a job, --name NAME, or --me")
    with connect() as client:
        found = list(_jobs(client, ",".join(given.jobs), given.name))
        if given.jobs and not found:
            raise NotFound(f"there is no job {', '.join(given.jobs)} that runs or waits")
        for_each(found, lambda each: client.instances.stop(each["id"]).name)


@app.command()
def shims(
    folder: Annotated[Path, typer.Argument(help="a folder in your PATH", metavar="FOLDER")],
) -> None:
    """Write srun, sbatch, squeue and scancel into a folder, so that scripts find them."""
    folder.mkdir(parents=True, exist_ok=True)
    for program in _PROGRAMS:
        file = folder / program
        file.write_text(f'#!/bin/sh\nexec mooring slurm {program} "$@"\n')
        file.chmod(0o755)
        print(file)


class _QueueParser(argparse.ArgumentParser):
    def __init__(self, program: str) -> None:
        super().__init__(program, add_help=False, allow_abbrev=False)

    def error(self, message: str) -> Any:
        raise typer.BadParameter(message)


def _parsed(program: str, arguments: Sequence[str]) -> argparse.Namespace:
    try:
        return options.parser(program).parse_args(arguments)
    except BadOption as error:
        raise typer.BadParameter(str(error)) from None


def _script(given: argparse.Namespace) -> tuple[str, list[str]]:
    """The text of the script, and its arguments."""
    if given.wrap:
        return f"#!/bin/sh\n{given.wrap}", []
    name, arguments = (given.command[0], given.command[1:]) if given.command else ("-", [])
    try:
        return sys.stdin.read() if name == "-" else Path(name).read_text(), arguments
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"cannot read the script {name}: {error}") from None


class _Job:
    """What all tasks of a job share."""

    def __init__(self, client: "Mooring", given: argparse.Namespace, name: str) -> None:
        image = given.container_image or os.environ.get("MOORING_SLURM_IMAGE")
        if not image:
            raise typer.BadParameter(
                "a job needs an image: add --container-image=IMAGE, or set MOORING_SLURM_IMAGE"
            )
        try:
            self._spec = options.spec_of(given)
        except BadOption as error:
            raise typer.BadParameter(str(error)) from None
        if unused := options.ignored(given):
            say(f"without effect: {', '.join(unused)}")
        self._client, self._image, self._given = client, options.image_of(image), given
        self._name = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40].strip("-") or "job"
        self._project = self._project_id()
        self.number = self._unused_number()

    def _project_id(self) -> str | None:
        """The account's project, unless `--project` names one."""
        if self._given.account and chosen_project() is None:
            found = next(iter(self._client.projects.list(name=self._given.account)), None)
            if found is None:
                raise NotFound(f"there is no project {self._given.account!r} for the account of this name")
            return found.id
        return project_id(self._client)

    def _unused_number(self) -> int:
        while True:
            number = secrets.randbelow(900_000_000) + 100_000_000
            if not self._client.request("GET", "/v1/instances", params={"label": f"{_JOB}:{number}"})[
                "items"
            ]:
                return number

    def create(self, fields: dict[str, Any], index: int | None = None) -> Any:
        """Create the instance of a task, as JSON."""
        labels = {_JOB: str(self.number), **({} if index is None else {_TASK: str(index)})}
        body = {
            "image": self._image,
            "name": f"{self._name}-{self.number}{'' if index is None else f'-{index}'}",
            "project_id": self._project,
            **self._spec,
            **fields,
            "labels": labels,
            "env": {**self._variables(index), **self._spec.get("env", {})},
        }
        return self._client.request("POST", "/v1/instances", body=body)

    def _variables(self, index: int | None) -> dict[str, str]:
        number, gpus = str(self.number), self._spec.get("gpus", {}).get("count", 0)
        found = {
            "SLURM_JOB_ID": number, "SLURM_JOBID": number, "SLURM_JOB_NAME": self._name,
            "SLURM_NTASKS": "1", "SLURM_NPROCS": "1", "SLURM_NNODES": "1", "SLURM_JOB_NUM_NODES": "1",
            "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0",
        }  # fmt: skip
        if cpus := self._spec.get("cpus"):
            found |= {"SLURM_CPUS_PER_TASK": str(cpus), "OMP_NUM_THREADS": str(cpus)}
        if gpus:
            found |= {"SLURM_GPUS": str(gpus), "SLURM_GPUS_ON_NODE": str(gpus)}
        if index is not None:
            found |= {"SLURM_ARRAY_JOB_ID": number, "SLURM_ARRAY_TASK_ID": str(index)}
        return found


def _jobs(client: "Mooring", numbers: str, name: str) -> Iterator[Any]:
    """Yield the jobs that have not ended, newest first, of all numbers and names or of these."""
    wanted, names = set(filter(None, numbers.split(","))), set(filter(None, name.split(",")))
    for each in every(client, "/v1/instances", project_id=project_id(client)):
        number = each["labels"].get(_JOB)
        if number is None or each["state"] in ENDED:
            continue
        if (not wanted or wanted & {number, _id_of(each)}) and (
            not names or names & {_name_of(each), each["name"]}
        ):
            yield each


def _id_of(row: Any) -> str:
    number, task = row["labels"][_JOB], row["labels"].get(_TASK)
    return number if task is None else f"{number}_{task}"


def _name_of(row: Any) -> str:
    return str(row["name"]).partition(f"-{row['labels'][_JOB]}")[0]


_STATES: Final = {
    "pending": ("PD", "PENDING"), "scheduled": ("CF", "CONFIGURING"), "starting": ("CF", "CONFIGURING"),
    "running": ("R", "RUNNING"), "stopping": ("CG", "COMPLETING"), "unreachable": ("S", "SUSPENDED"),
}  # fmt: skip


def _state(row: Any) -> tuple[str, str]:
    return _STATES.get(row["state"], ("?", str(row["state"]).upper()))


def _elapsed(started_at: str | None) -> str:
    """`M:SS`, `H:MM:SS` or `D-HH:MM:SS`."""
    if started_at is None:
        return "0:00"
    passed = int(max(0.0, (datetime.now(UTC) - datetime.fromisoformat(started_at)).total_seconds()))
    minutes, second = divmod(passed, 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}-{hour:02}:{minute:02}:{second:02}"
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def _where(row: Any) -> str:
    if row["node_name"]:
        return str(row["node_name"])
    return f"({row['reason']['message']})" if row["reason"] else ""


# By the letters of `squeue --format`.
_FORMAT: Final = "%.18i %.9P %.24j %.8u %.2t %.10M %.6D %R"
_COLUMNS: Final[dict[str, tuple[str, Callable[[Any], str]]]] = {
    "i": ("JOBID", _id_of),
    "A": ("JOBID", lambda row: row["labels"][_JOB]),
    "P": ("PARTITION", lambda _row: "mooring"),
    "j": ("NAME", _name_of),
    "u": ("USER", lambda _row: "-"),
    "t": ("ST", lambda row: _state(row)[0]),
    "T": ("STATE", lambda row: _state(row)[1]),
    "M": ("TIME", lambda row: _elapsed(row["started_at"])),
    "D": ("NODES", lambda _row: "1"),
    "N": ("NODELIST", lambda row: row["node_name"] or ""),
    "R": ("NODELIST(REASON)", _where),
    "b": ("TRES_PER_NODE", lambda row: f"gres/gpu:{(row['gpus'] or {}).get('count', 0)}"),
}


def _cell(row: Any, code: str) -> str:
    return _COLUMNS[code][1](row)


def _line(form: str, value: Callable[[str], str]) -> str:
    """A line of `squeue`: `%[.][WIDTH]LETTER`; a dot aligns to the right."""

    def shown(match: "re.Match[str]") -> str:
        right, width, code = match[1], int(match[2] or 0), match[3]
        if code not in _COLUMNS:
            raise typer.BadParameter(f"%{code} is not one of {', '.join(f'%{each}' for each in _COLUMNS)}")
        text = clean_line(value(code))[: width or None]
        return text.rjust(width) if right else text.ljust(width)

    return re.sub(r"%(\.?)(\d*)([A-Za-z])", shown, form).rstrip()
