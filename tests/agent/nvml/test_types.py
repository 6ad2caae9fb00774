"""The types that the NVML process sends match the models that the agent validates."""

import subprocess
import sys
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest
from pydantic import BaseModel

from mooring.agent.nvml import types
from mooring.core import gpu
from mooring_client.schemas import gpus

SHAPES: dict[type, type[BaseModel]] = {
    types.NvmlNvLinkPeer: gpus.NvLinkPeer,
    types.NvmlMigDevice: gpu.MigDevice,
    types.NvmlGpuFacts: gpu.GpuFacts,
    types.NvmlProcess: gpus.Process,
    types.NvmlMigSample: gpus.MigSample,
    types.NvmlSample: gpus.Sample,
}
ADDED_BY_THE_AGENT: dict[type[BaseModel], set[str]] = {gpus.Process: {"instance_id"}}


def as_model(annotation: Any) -> Any:
    """Return the type with each TypedDict replaced by its model."""
    if annotation in SHAPES:
        return SHAPES[annotation]
    arguments = tuple(map(as_model, get_args(annotation)))
    if get_origin(annotation) in {Union, UnionType}:
        return frozenset(arguments)
    return (get_origin(annotation), arguments) if arguments else annotation


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.__name__)
def test_typed_dicts_match_their_models(shape: type) -> None:
    model = SHAPES[shape]
    hints = get_type_hints(model)
    names = model.model_fields.keys() - ADDED_BY_THE_AGENT.get(model, set())
    in_model = {name: as_model(hints[name]) for name in names}
    assert {name: as_model(hint) for name, hint in get_type_hints(shape).items()} == in_model


def test_the_nvml_process_imports_no_pydantic() -> None:
    code = "import sys, mooring.agent.nvml.process; sys.exit('pydantic' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
