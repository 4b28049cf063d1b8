"""Connectors over every layout on the host: what is stored comes back, to the slots named and no others."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from helpers.connector_cases import ALL, PAIRS, Model, check_mixed, check_round_trip, sizes, transfers  # noqa: E402


@pytest.mark.parametrize(("name", "fmt"), PAIRS)
@settings(max_examples=8)
@given(data=st.data())
def test_what_is_stored_comes_back_to_the_slots_named_and_no_others(name: str, fmt: int, data: Any) -> None:
    case = data.draw(sizes(fmt))
    check_round_trip(ALL[name], Model(fmt, case), data.draw(transfers(case.slots)))


@settings(max_examples=40)
@given(data=st.data())
def test_layers_that_differ_in_blocks_heads_and_dtype_come_back_to_their_own_slots(data: Any) -> None:
    check_mixed(data)
