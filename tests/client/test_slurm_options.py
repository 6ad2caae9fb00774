"""What options of Slurm become."""

import shlex
from typing import Any

import pytest
import typer

from mooring_client.cli.slurm import options as slurm_options
from mooring_client.cli.slurm.options import BadOption


def spec(text: str) -> dict[str, Any]:
    return slurm_options.spec_of(slurm_options.parser("sbatch").parse_args(shlex.split(text)))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("--gres=gpu:2", {"gpus": {"count": 2}}),
        ("--gres gpu:h100:4", {"gpus": {"count": 4, "model": "h100"}}),
        ("--gres=gpu", {"gpus": {"count": 1}}),
        ("--gres=gpu:0", {}),
        ("--gpus=2", {"gpus": {"count": 2}}),
        ("-G a100:8", {"gpus": {"count": 8, "model": "a100"}}),
        ("--gpus-per-node=1", {"gpus": {"count": 1}}),
        ("-c 4 --mem=16G", {"cpus": 4, "memory_mib": 16_384}),
        ("--mem=16000", {"memory_mib": 16_000}),
        ("--mem=0", {}),
        ("-c 4 --mem-per-cpu=2G", {"cpus": 4, "memory_mib": 8192}),
        ("--gpus=2 --mem-per-gpu=64G", {"gpus": {"count": 2}, "memory_mib": 131_072}),
        ("-t 90", {"max_duration_s": 5400}),
        ("-D /data", {"working_dir": "/data"}),
        ("--export=ALL,A=1,B=x=y,C", {"env": {"A": "1", "B": "x=y"}}),
        ("-N 1 -n 1 --ntasks-per-node=1", {}),
        ("--partition=gpu --mail-type END --exclusive", {}),
        ("-J x train.sh --gpus=9", {}),  # the script's own argument
    ],
)
def test_options_become_fields(text: str, expected: dict[str, Any]) -> None:
    assert spec(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("--nodes=2", "one task on one node"),
        ("-n 4", "one task on one node"),
        ("--gres=lustre:1", "only gpu"),
        ("--gpus=two:many", "no number of GPUs"),
        ("-t soon", "no time limit"),
        ("--dependency=afterok:1", "--dependency is not supported"),
        ("-w node-1", "--nodelist is not supported"),
        ("--nosuch", "--nosuch"),
        ("-c many", "invalid int value"),
    ],
)
def test_what_cannot_be_done_is_said(text: str, message: str) -> None:
    with pytest.raises(BadOption, match=message):
        spec(text)


def test_a_size_that_is_none_is_wrong_usage() -> None:
    with pytest.raises(typer.BadParameter, match="is not a size"):
        spec("--mem=much")


def test_options_without_effect_are_known() -> None:
    given = slurm_options.parser("sbatch").parse_args(["-p", "gpu", "--exclusive", "-e", "err.txt"])
    assert slurm_options.ignored(given) == ["--error", "--exclusive", "--partition"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("5", 300), ("1:30", 90), ("1:00:00", 3600), ("2-0", 172_800), ("1-12:30", 131_400),
        ("1-0:0:5", 86_405), ("0", 1),
    ],
)  # fmt: skip
def test_time_limits(text: str, expected: int) -> None:
    assert slurm_options.seconds(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0-3", [0, 1, 2, 3]),
        ("1,3,7", [1, 3, 7]),
        ("0-15:4", [0, 4, 8, 12]),
        ("0-2%1", [0, 1, 2]),
        ("7", [7]),
    ],
)
def test_arrays(text: str, expected: list[int]) -> None:
    assert slurm_options.tasks(text) == expected


@pytest.mark.parametrize("text", ["", "a", "3-1", "0-9:0", "0-1000", "0-9999999", "1-", "1,,2"])
def test_arrays_that_are_none(text: str) -> None:
    with pytest.raises(BadOption):
        slurm_options.tasks(text)


SCRIPT = """\
#!/bin/bash -l
# a comment
#SBATCH --job-name=train --gres=gpu:2   # of one node
#SBATCH -t "1-0"

srun python train.py
#SBATCH --gres=gpu:8
"""


def test_options_are_read_until_the_first_command() -> None:
    assert slurm_options.of_script(SCRIPT) == ["--job-name=train", "--gres=gpu:2", "-t", "1-0"]


def test_a_script_is_an_argument_of_its_interpreter() -> None:
    command = slurm_options.command_of(SCRIPT, ["a b"])
    assert command[:3] == ["/bin/bash", "-l", "-c"]
    assert command[3].endswith(SCRIPT)
    assert command[4:] == ["slurm_script", "a b"]
    python = "#!/usr/bin/env python3\nprint(1)\n"
    assert slurm_options.command_of(python, []) == ["python3", "-c", python]


@pytest.mark.parametrize("text", ["echo no line", "#!/usr/bin/perl\n", ""])
def test_a_script_needs_a_known_interpreter(text: str) -> None:
    with pytest.raises(BadOption, match="#!/bin/bash"):
        slurm_options.command_of(text, [])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("nvcr.io#nvidia/pytorch:25.01-py3", "nvcr.io/nvidia/pytorch:25.01-py3"),
        ("docker://busybox:1", "busybox:1"),
        ("ubuntu", "ubuntu"),
    ],
)
def test_images_of_pyxis(text: str, expected: str) -> None:
    assert slurm_options.image_of(text) == expected
