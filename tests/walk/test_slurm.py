"""`mooring slurm` with real containers: srun, sbatch, squeue and scancel."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.service import Client
from tests.testbed.waiting import wait_until
from tests.walk.cli_client import WITHIN_S, CliClient
from tests.walk.conftest import Cluster

SMALL = ("--mem=64M",)
SCRIPT = """\
#!/bin/sh
#SBATCH --job-name=Train_1 --mem=64M
#SBATCH --time=10
echo "job $SLURM_JOB_ID task $SLURM_ARRAY_TASK_ID of $SLURM_JOB_NAME with $1"
srun -n 1 --cpu-bind=none -u echo stepped
exit 3
"""


@pytest.fixture
def cli(cluster: Cluster, tmp_path: Path) -> CliClient:
    made = CliClient(cluster.server.url, tmp_path)
    made.environment["MOORING_SLURM_IMAGE"] = "mooring-test/busybox:1"
    return made


def slurm(cli: CliClient, *arguments: str, given: bytes = b"", code: int = 0) -> str:
    done = cli.run("slurm", *arguments, given=given)
    assert done.returncode == code, (done.stdout, done.stderr)
    return done.stdout.decode()


def submitted(output: str) -> str:
    """The number of a job, as submitit reads it."""
    match = re.fullmatch(r"Submitted batch job (\d+)\n", output)
    assert match is not None, output
    return match[1]


def logs_of(cli: CliClient, name: str) -> str:
    return cli.run("logs", name).stdout.decode()


def test_srun_shows_the_output_and_ends_with_the_exit_code(cli: CliClient, tmp_path: Path) -> None:
    assert slurm(cli, "srun", *SMALL, "-p", "gpu", "sh", "-c", "echo $SLURM_PROCID; exit 5", code=5) == "0\n"
    slurm(cli, "srun", *SMALL, "-o", str(tmp_path / "out.txt"), "echo", "into a file")
    assert (tmp_path / "out.txt").read_text() == "into a file\n"


def test_a_script_runs_with_its_options_and_arguments(cli: CliClient, admin: Client, tmp_path: Path) -> None:
    (tmp_path / "train.sh").write_text(SCRIPT)
    done = cli.run("slurm", "sbatch", "--wait", str(tmp_path / "train.sh"), "an argument")
    number = submitted(done.stdout.decode())
    assert done.returncode == 3
    assert f"output: mooring logs -f train-1-{number}" in done.stderr.decode()
    expected = f"job {number} task  of train-1 with an argument\nstepped\n"
    assert logs_of(cli, f"train-1-{number}") == expected
    (found,) = admin.items("/v1/instances", name=f"train-1-{number}")
    assert (found["max_duration_s"], found["memory_mib"]) == (600, 64)


def test_options_of_the_command_line_come_before_those_of_the_script(cli: CliClient, admin: Client) -> None:
    output = slurm(cli, "sbatch", "--parsable", "-J", "other", "-t", "1:00:00", "-", given=SCRIPT.encode())
    (found,) = admin.items("/v1/instances", name=f"other-{output.strip()}")
    assert found["max_duration_s"] == 3600


def test_an_array_is_one_job_with_a_task_for_each_index(cli: CliClient) -> None:
    number = submitted(
        slurm(cli, "sbatch", *SMALL, "--array=1-3:2", "--wrap", "echo task $SLURM_ARRAY_TASK_ID")
    )
    for index in (1, 3):
        name = f"wrap-{number}-{index}"
        assert cli.run("wait", name).returncode == 0
        assert logs_of(cli, name) == f"task {index}\n"


def test_jobs_are_listed_and_cancelled(cli: CliClient, admin: Client) -> None:
    number = submitted(slurm(cli, "sbatch", *SMALL, "-J", "long", "--wrap", "exec sleep 1000"))
    waiting = submitted(slurm(cli, "sbatch", *SMALL, "--gres=gpu:64", "-J", "large", "--wrap", "true"))
    name = f"long-{number}"
    assert cli.run("wait", name, "--for", "running").returncode == 0
    lines = slurm(cli, "squeue").splitlines()
    assert lines[0].split() == [
        "JOBID",
        "PARTITION",
        "NAME",
        "USER",
        "ST",
        "TIME",
        "NODES",
        "NODELIST(REASON)",
    ]
    rows = {line.split()[0]: line.split() for line in lines[1:]}
    assert rows[number][2:5] == ["long", "-", "R"]
    assert rows[waiting][2:5] == ["large", "-", "PD"]
    assert slurm(cli, "squeue", "-h", "-j", number, "-o", "%i|%T|%.5D") == f"{number}|RUNNING|    1\n"
    assert slurm(cli, "squeue", "-h", "-t", "PD", "-o", "%A").split() == [waiting]
    assert slurm(cli, "scancel", number) == f"{name}\n"
    ended = wait_until(lambda: _ended(admin, name), WITHIN_S)
    assert ended["state"] == "stopped"
    assert slurm(cli, "scancel", "--name", "large") == f"large-{waiting}\n"
    wait_until(lambda: slurm(cli, "squeue", "-h") == "", WITHIN_S)
    slurm(cli, "scancel", number, code=3)


def _ended(admin: Client, name: str) -> Any:
    (found,) = admin.items("/v1/instances", name=name)
    return found if found["state"] == "stopped" else None


def test_wrong_usage_is_explained(cli: CliClient, tmp_path: Path) -> None:
    def error(*arguments: str) -> str:
        done = cli.run("slurm", *arguments)
        assert done.returncode == 2, done
        return " ".join(done.stderr.decode().split())

    assert "give a command" in error("srun")
    assert "one task on one node" in error("srun", "-N", "2", "true")
    assert "cannot read the script nosuch" in error("sbatch", "nosuch")
    assert "begins with the line #!/bin/bash" in error("sbatch", str(Path(__file__)))
    assert "give the number of a job" in error("scancel")
    del cli.environment["MOORING_SLURM_IMAGE"]
    assert "add --container-image=IMAGE" in error("srun", "true")


def test_shims_are_slurms_commands(cli: CliClient, tmp_path: Path) -> None:
    slurm(cli, "shims", str(tmp_path / "bin"))
    (tmp_path / "bin" / "mooring").write_text(f'#!/bin/sh\nexec {" ".join(cli.argv)} "$@"\n')
    (tmp_path / "bin" / "mooring").chmod(0o755)
    environment = cli.environment | {"PATH": f"{tmp_path / 'bin'}:{cli.environment['PATH']}"}
    done = subprocess.run(
        ["sh", "-c", "srun --mem=64M echo hello"],
        env=environment,
        capture_output=True,
        timeout=WITHIN_S,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, b"hello\n"), done.stderr
