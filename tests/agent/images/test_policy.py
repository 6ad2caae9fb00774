"""Limits on the configuration of images."""

from typing import Any

import pytest

from mooring.agent.images import policy
from mooring.agent.images.pull import image_of
from mooring.agent.runtime import StartRefused
from mooring.core.images import ImageName

NAME = ImageName.parse("r.example/some/image:1")


def why_not(config: Any) -> str | None:
    try:
        image_of({"Id": "sha256:1", "Config": config}, NAME)
    except StartRefused as refusal:
        assert refusal.reason.code == "image_config_refused"
        assert "r.example/some/image:1" in refusal.reason.message
        return refusal.reason.message
    return None


@pytest.mark.parametrize(
    "config",
    [
        None,
        {},
        {"Labels": None, "Env": None, "ExposedPorts": None},
        {"Labels": {"mooringx": "1", "org.mooring.": "1", "maintainer": "x" * 200_000}},
        {"Env": [f"V{number}=x" for number in range(1024)]},
    ],
)
def test_common_configurations_are_accepted(config: Any) -> None:
    assert why_not(config) is None


@pytest.mark.parametrize("name", ["mooring.cards", "mooring.", "Mooring.Instance", "mooring.anything"])
def test_an_image_with_reserved_labels_is_rejected(name: str) -> None:
    message = why_not({"Labels": {name: "", "maintainer": "me"}})
    assert message is not None and name in message and "build the image" in message


@pytest.mark.parametrize(
    ("config", "message_part"),
    [
        ({"Labels": {f"l{number}": "" for number in range(513)}}, "513 labels"),
        ({"Labels": {"l" * 20_000: ""}}, "names of its labels"),
        ({"Env": [f"V{number}=x" for number in range(1025)]}, "1025 environment variables"),
        ({"Env": ["V=" + "ä" * 70_000]}, "bytes of environment variables"),
        ({"ExposedPorts": {f"{number}/tcp": {} for number in range(1, 300)}}, "299 exposed ports"),
        ({"Labels": {"l": "x" * 600_000}}, "bytes of configuration"),
        ({"Cmd": ["x" * 600_000]}, "bytes of configuration"),
        ({"OnBuild": ["x" * 600_000]}, "bytes of configuration"),
    ],
)
def test_the_size_of_an_images_configuration_is_limited(config: Any, message_part: str) -> None:
    message = why_not(config)
    assert message is not None and message_part in message


def test_a_message_names_only_a_few_labels() -> None:
    message = why_not({"Labels": {f"mooring.{'x' * 1000}{number}": "" for number in range(400)}})
    assert message is not None and len(message) < 1000
    assert policy.MAX_LABELS > 400  # so it is not their number that is rejected
