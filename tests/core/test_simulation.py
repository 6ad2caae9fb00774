"""Parsing of simulated fleets."""

import pytest

from mooring.core.simulation import MODELS, SimulatedFleet, model_key, parse_fleet, parse_fleets


@pytest.mark.parametrize(
    ("text", "fleet"),
    [
        ("2x8xH100", SimulatedFleet(2, 8, "H100")),
        (" 1 x 4 x a100 ", SimulatedFleet(1, 4, "A100")),
        ("1X1Xrtx4090", SimulatedFleet(1, 1, "RTX 4090")),
        ("1x1xRTX-4090", SimulatedFleet(1, 1, "RTX 4090")),
        ("3x0xT4", SimulatedFleet(3, 0, "T4")),
        ("1000x16xL4", SimulatedFleet(1000, 16, "L4")),
    ],
)
def test_a_fleet_is_parsed(text: str, fleet: SimulatedFleet) -> None:
    assert parse_fleet(text) == fleet


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not NODESxGPUSxMODEL"),
        ("2x8", "is not NODESxGPUSxMODEL"),
        ("H100", "is not NODESxGPUSxMODEL"),
        ("-1x8xH100", "is not NODESxGPUSxMODEL"),
        ("2x8xH100,1x4xA100", "is not a GPU model"),
        ("0x8xH100", "1 to 1000 can be simulated"),
        ("1001x8xH100", "1 to 1000 can be simulated"),
        ("1x17xH100", "0 to 16 can be simulated"),
        ("99999999999999x1xH100", "is not NODESxGPUSxMODEL"),
        ("1x1xH1000", "is not a GPU model that can be simulated: B200, H200"),
    ],
)
def test_the_error_says_why_a_fleet_is_invalid(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_fleet(text)


def test_a_list_of_fleets_is_parsed() -> None:
    assert parse_fleets("2x8xH100, 1x4xA100") == (SimulatedFleet(2, 8, "H100"), SimulatedFleet(1, 4, "A100"))
    assert parse_fleets(" ") == ()


@pytest.mark.parametrize("text", ["2x8xH100,", ",", "600x1xT4,600x1xT4"])
def test_an_invalid_list_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not|more than"):
        parse_fleets(text)


def test_every_model_is_found_by_its_own_name() -> None:
    assert [model_key(key.lower()) for key in MODELS] == list(MODELS)
