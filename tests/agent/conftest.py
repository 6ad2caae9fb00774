"""What tests of the agent share."""

from pathlib import Path

import pytest

from tests.agent.nvml_children import Standin
from tests.testbed.nvml.standin import NvmlStandin


@pytest.fixture
def standin(tmp_path: Path) -> Standin:
    return lambda *lines, **options: NvmlStandin(tmp_path, *lines, **options)
