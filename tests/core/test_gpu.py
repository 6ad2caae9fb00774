"""Matching of GPU models, and validation of facts and samples."""

import pytest
from pydantic import ValidationError

from mooring.core.gpu import GpuFacts, model_matches
from mooring_client.schemas.gpus import Sample

H100 = "NVIDIA H100 80GB HBM3"


@pytest.mark.parametrize(
    ("wanted", "model", "matches"),
    [
        (None, H100, True),
        ("H100", H100, True),
        ("h100", H100, True),
        ("NVIDIA H100", H100, True),
        ("H100 80GB", H100, True),
        ("80gb h100", H100, True),
        (H100, H100, True),
        ("A100", H100, False),
        ("H10", H100, False),
        ("H100 40GB", H100, False),
        ("A10", "NVIDIA A100-SXM4-80GB", False),
        ("A100", "NVIDIA A100-SXM4-80GB", True),
        ("A10", "NVIDIA A10", True),
        ("L4", "NVIDIA L40S", False),
        ("RTX 4090", "NVIDIA GeForce RTX 4090", True),
        ("4090", "NVIDIA GeForce RTX 4090", True),
        ("", H100, True),
    ],
)
def test_a_model_is_matched_by_words_of_its_name(wanted: str | None, model: str, matches: bool) -> None:
    assert model_matches(wanted, model) is matches


@pytest.mark.parametrize(
    "fields",
    [
        {"uuid": ""},
        {"uuid": "a b"},
        {"uuid": "a\x00"},
        {"index": -1},
        {"memory_mib": -1},
        {"memory_mib": 2**40},
        {"power_limit_w": float("nan")},
        {"nvlink_peers": [{"uuid": "a", "links": 0}]},
    ],
)
def test_impossible_facts_are_rejected(fields: dict[str, object]) -> None:
    good = {"uuid": "GPU-1", "index": 0, "model": H100, "memory_mib": 81559}
    assert GpuFacts.model_validate(good).fault is None
    with pytest.raises(ValidationError):
        GpuFacts.model_validate(good | fields)


def test_a_missing_sample_value_is_null() -> None:
    sample = Sample(uuid="GPU-1", index=0, sampled_at="2026-11-21T08:00:00Z")
    optional = sample.model_dump(exclude={"uuid", "index", "sampled_at", "mig_devices"})
    assert set(optional.values()) == {None}


def test_an_infinite_sample_value_is_rejected() -> None:
    with pytest.raises(ValidationError):
        Sample(uuid="GPU-1", index=0, sampled_at="x", power_w=float("inf"))
