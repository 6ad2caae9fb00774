"""The example playbook, run by ansible-core: the first run changes, and the second does not."""

import subprocess
from pathlib import Path

import pytest

from mooring_client import Mooring
from tests.service import ADMIN_KEY, RunningService
from tests.test_readme import session
from tests.testbed.parts import skip
from tests.walk.product import clean_environment

ROOT = Path(__file__).parents[2]
ENVIRONMENT = ROOT / "tests" / "ansible" / ".venv"
PLAYBOOK = ROOT / "docs" / "ansible" / "gpus.yaml"


class Ansible:
    """Runs playbooks against one service."""

    def __init__(self, url: str, folder: Path) -> None:
        self.environment = clean_environment() | {
            "MOORING_URL": url,
            "MOORING_API_KEY": ADMIN_KEY,
            "HOME": str(folder),
            "ANSIBLE_LOCALHOST_WARNING": "false",
            "ANSIBLE_INVENTORY_UNPARSED_WARNING": "false",
            "ANSIBLE_NOCOLOR": "1",
            "LC_ALL": "C.UTF-8",
        }

    def run(self, playbook: Path, code: int = 0) -> str:
        """The output; fail if the playbook ends with another exit code."""
        argv = [str(ENVIRONMENT / "bin" / "ansible-playbook"), str(playbook)]
        done = subprocess.run(
            argv, env=self.environment, capture_output=True, text=True, timeout=100, check=False
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout


def _recap(output: str) -> str:
    (line,) = (line for line in output.splitlines() if "ok=" in line)
    return line.strip()


@pytest.fixture
def ansible(shared: RunningService, mooring: Mooring, tmp_path: Path) -> Ansible:
    if not (ENVIRONMENT / ".installed").exists():
        skip("Ansible: not installed; run tests/testbed/install.sh")
    return Ansible(shared.url, tmp_path)


def test_the_playbook_changes_nothing_when_it_is_run_again(
    ansible: Ansible, mooring: Mooring, tmp_path: Path
) -> None:
    _commands, shown = session(ROOT / "docs" / "ansible" / "README.md")
    first, second = _recap(ansible.run(PLAYBOOK)), _recap(ansible.run(PLAYBOOK))
    assert "changed=2 " in first
    assert "changed=0 " in second
    assert [first, second] == [line.strip() for line in shown.splitlines()]
    (train,) = mooring.instances.list(name="train")
    assert (train.state, train.gpus.count) == ("running", 2)

    changed = tmp_path / "changed.yaml"
    changed.write_text(PLAYBOOK.read_text().replace("86400", "3600"))
    assert "changed=1 " in _recap(ansible.run(changed))
    assert mooring.instances.get(train.id).max_duration_s == 3600

    changed.write_text(PLAYBOOK.read_text().replace("count: 2", "count: 4"))
    output = ansible.run(changed, code=2)
    assert "requires_replacement" in output
    assert "/gpus/count" in output
    assert mooring.instances.get(train.id).state == "running"
