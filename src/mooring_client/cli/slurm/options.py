"""The options of Slurm's commands that most scripts use, and what they become. Pure.

Formats are those of Slurm's manual pages sbatch(1) and srun(1).
"""

import argparse
import re
import shlex
from collections.abc import Iterator, Sequence
from typing import Any, Final, NoReturn

from mooring_client.cli import values

MAX_TASKS: Final = 1000  # of an array
# Options that have no meaning here, and whether they have a value. They are mentioned, and ignored.
_IGNORED: Final = {
    ("-p", "--partition"): True, ("-q", "--qos"): True, ("-C", "--constraint"): True,
    ("-e", "--error"): True, ("--mail-type",): True, ("--mail-user",): True, ("--open-mode",): True,
    ("--exclusive",): False, ("--requeue",): False, ("--no-requeue",): False, ("--nice",): True,
    ("--hint",): True, ("--gpu-bind",): True, ("--cpu-bind",): True, ("--distribution", "-m"): True,
    ("--tmp",): True, ("--unbuffered", "-u"): False, ("--label", "-l"): False,
    ("--kill-on-bad-exit", "-K"): False,
    ("--export-file",): True, ("--licenses", "-L"): True, ("--reservation",): True,
}  # fmt: skip
# Options that would change what runs, so that a job without them would be another.
_REFUSED: Final = {
    ("-w", "--nodelist"): "name nodes by `mooring run --node-selector`",
    ("-x", "--exclude"): "name nodes by `mooring run --node-selector`",
    ("-d", "--dependency"): "start the second job at the end of the first one's script",
    ("--begin",): "submit it later",
}
_GPUS: Final = re.compile(r"(?:([A-Za-z][\w.-]*):)?(\d+)|([A-Za-z][\w.-]*)")
_INTERPRETERS: Final = re.compile(
    r"#!\s*(?:/usr/bin/env\s+)?(\S*?(?:bash|dash|zsh|sh|python[\d.]*))((?:\s+-\w+)*)\s*"
)


class BadOption(Exception):
    """An option or a value that cannot be used; the message says why."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise BadOption(message)


def parser(program: str) -> argparse.ArgumentParser:
    """The options of `sbatch` and `srun`, and then the command or the script with its arguments."""
    made = _Parser(program, add_help=False, allow_abbrev=False)
    add = made.add_argument
    add("-J", "--job-name")
    add("-A", "--account")
    add("-t", "--time")
    add("-c", "--cpus-per-task", type=int)
    add("--mem")
    add("--mem-per-cpu")
    add("--mem-per-gpu")
    add("--gres")
    add("-G", "--gpus")
    add("--gpus-per-node")
    add("--gpus-per-task")
    add("-N", "--nodes", default="1")
    add("-n", "--ntasks", type=int, default=1)
    add("--ntasks-per-node", type=int, default=1)
    add("-D", "--chdir")
    add("-a", "--array")
    add("-o", "--output")
    add("--export", default="")
    add("--container-image")
    add("--wrap")
    add("--parsable", action="store_true")
    add("-Q", "--quiet", action="store_true")
    add("-W", "--wait", action="store_true")
    add("--pty", action="store_true")
    for names, has_value in _IGNORED.items():
        add(*names, action="store" if has_value else "store_true", dest=f"ignored {_long(names)}")
    for names in _REFUSED:
        add(*names, dest=f"refused {_long(names)}")
    add("command", nargs=argparse.REMAINDER)
    return made


def _long(names: tuple[str, ...]) -> str:
    return next(name for name in names if name.startswith("--"))


def of_script(text: str) -> list[str]:
    """The options in the `#SBATCH` lines before the first command of a script."""
    found: list[str] = []
    for line in text.splitlines():
        if line.startswith("#SBATCH"):
            found += shlex.split(line.removeprefix("#SBATCH"), comments=True)
        elif line.strip() and not line.startswith("#"):
            break
    return found


def ignored(options: argparse.Namespace) -> list[str]:
    """The given options that have no effect."""
    return sorted(
        name.removeprefix("ignored ")
        for name, value in vars(options).items()
        if name.startswith("ignored ") and value not in {None, False}
    )


def spec_of(options: argparse.Namespace) -> dict[str, Any]:
    """The fields of an instance that the options ask for, without image, command and name.

    Raises:
        BadOption: an option cannot be carried out.
    """
    for names, hint in _REFUSED.items():
        if getattr(options, f"refused {_long(names)}") is not None:
            raise BadOption(f"{_long(names)} is not supported: {hint}")
    if options.nodes not in {"1", "1-1"} or options.ntasks > 1 or options.ntasks_per_node > 1:
        raise BadOption(
            "a job has one task on one node; `mooring apply` with an instance_group runs one task on each of "
            "several nodes"
        )
    gpus = _gpus(options)
    memory_mib = _memory_mib(options, gpus["count"] if gpus else 0)
    found = {
        "gpus": gpus,
        "cpus": options.cpus_per_task,
        "memory_mib": memory_mib,
        "max_duration_s": options.time and seconds(options.time),
        "working_dir": options.chdir,
        "env": dict(_exported(options.export)),
    }
    return {name: value for name, value in found.items() if value}


def _gpus(options: argparse.Namespace) -> dict[str, Any] | None:
    texts = [options.gpus, options.gpus_per_node, options.gpus_per_task]
    for part in (options.gres or "").split(","):
        kind, _, rest = part.partition(":")
        if kind == "gpu":
            texts.append(rest or "1")
        elif part:
            raise BadOption(f"--gres={part} is not supported, only gpu[:MODEL][:COUNT]")
    given = [text for text in texts if text]
    if not given:
        return None
    match = _GPUS.fullmatch(given[0])
    if match is None:
        raise BadOption(f"{given[0]!r} is no number of GPUs, such as 2 or h100:2")
    count, model = int(match[2] or 1), match[1] or match[3]
    return {"count": count, **({"model": model} if model else {})} if count else None


def _memory_mib(options: argparse.Namespace, gpus: int) -> int | None:
    if options.mem and options.mem != "0":  # 0: all memory of the node
        return values.mib(options.mem)
    if options.mem_per_cpu:
        return values.mib(options.mem_per_cpu) * (options.cpus_per_task or 1)
    if options.mem_per_gpu and gpus:
        return values.mib(options.mem_per_gpu) * gpus
    return None


def seconds(text: str) -> int:
    """A time limit: `M`, `M:S`, `H:M:S`, `D-H`, `D-H:M` or `D-H:M:S`.

    Raises:
        BadOption: it has another form.
    """
    if not re.fullmatch(r"(\d+-)?\d+(:\d+){0,2}", text):
        raise BadOption(f"{text!r} is no time limit, such as 90, 1:30:00 or 2-12")
    days, dash, rest = text.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if dash:
        hours, minutes, second = [*parts, 0, 0][:3]
    elif len(parts) == 3:
        hours, minutes, second = parts
    else:
        hours, (minutes, second) = 0, [*parts, 0][:2]
    return max(1, int(days or 0) * 86_400 + hours * 3600 + minutes * 60 + second)


def _exported(text: str) -> Iterator[tuple[str, str]]:
    """Yield the variables of `--export=A=1,B=2`. ALL and NONE are about those of a login node: none here."""
    for part in filter(None, text.split(",")):
        name, equals, value = part.partition("=")
        if equals:
            yield name, value


def tasks(text: str) -> list[int]:
    """The indexes of an array: `0-9`, `1,3,5`, `0-15:4`; `%4` at the end is ignored: the queue is fair.

    Raises:
        BadOption: it has another form, or too many tasks.
    """
    found: list[int] = []
    for part in text.partition("%")[0].split(","):
        match = re.fullmatch(r"(\d{1,7})(?:-(\d{1,7})(?::(\d{1,7}))?)?", part)
        if match is None or match[3] == "0":
            raise BadOption(f"{text!r} is no array, such as 0-9, 1,3,5 or 0-15:4")
        first, last, step = int(match[1]), int(match[2] or match[1]), int(match[3] or 1)
        found += range(first, last + 1, step)[: MAX_TASKS + 1]
    if not 0 < len(found) <= MAX_TASKS:
        raise BadOption(f"an array has 1 to {MAX_TASKS} tasks, not {len(found)}")
    return found


def image_of(text: str) -> str:
    """The reference of an image in the form of pyxis: `nvcr.io#nvidia/pytorch:25.01-py3`."""
    return text.removeprefix("docker://").replace("#", "/", 1)


# `srun` within a script: the job is one task, so the command runs as it is.
_SRUN: Final = (
    'srun() { while [ $# -gt 0 ]; do case "$1" in --) shift; break;; '
    "--*=*|--pty|--exclusive|--label|--unbuffered|-l|-u) shift;; "
    '--*|-?) shift 2;; -*) shift;; *) break;; esac; done; "$@"; }'
)


def command_of(script: str, arguments: Sequence[str]) -> list[str]:
    """The command that runs a script, which is sent as an argument of its interpreter.

    Raises:
        BadOption: the first line names no interpreter that takes a script with `-c`.
    """
    first = script.partition("\n")[0]
    match = _INTERPRETERS.fullmatch(first)
    if match is None:
        raise BadOption("a script begins with the line #!/bin/bash, or that of another shell or Python")
    program, options = match[1], match[2].split()
    is_shell = not program.rpartition("/")[2].startswith("python")
    text = f"{_SRUN}\n{script}" if is_shell else script
    return [program, *options, "-c", text, *(["slurm_script"] if is_shell else []), *arguments]
