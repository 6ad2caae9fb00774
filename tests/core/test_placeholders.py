"""Placeholders of templates: `${name}` in the texts of a JSON document."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooring.core.placeholders import filled, names_in

VALUES = {"n": 2, "name": "x ${n}", "on": True, "part": 0.5}


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ("${n}", 2),
        ("${on}", True),
        ("n=${n}, on=${on}, part=${part}", "n=2, on=true, part=0.5"),
        ("${name}", "x ${n}"),  # a value is not searched for placeholders
        ("-${name}-", "-x ${n}-"),
        ("$${n}", "${n}"),
        ("$$${n}", "$${n}"),
        ("${HOME} $n ${", "${HOME} $n ${"),
        ([{"${n}": "${n}"}, 7, None], [{"${n}": 2}, 7, None]),
    ],
)
def test_placeholders_are_replaced(document: Any, expected: Any) -> None:
    assert filled(document, VALUES) == expected


def test_a_placeholder_without_a_value_is_an_error() -> None:
    with pytest.raises(KeyError):
        filled({"a": ["${other}"]}, VALUES)


def test_the_names_are_found_at_every_depth() -> None:
    document = {"a": "${n} $${escaped} ${HOME}", "b": [{"c": "${on}"}], "${key}": 1}
    assert sorted(names_in(document)) == ["n", "on"]


@given(st.text())
def test_a_text_whose_dollars_are_escaped_stays_as_it_is(text: str) -> None:
    assert filled(text.replace("${", "$${"), {}) == text
