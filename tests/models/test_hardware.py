"""The figures of the cards are sane, and a wrong name says which ones are meant."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlparse

import pytest

from sits_dagster.errors import ConfigError
from sits_dagster.models.hardware import DEVICES, DeviceModel, device_model

CARDS = list(DEVICES.values())
DTYPES = {"float64", "float32", "tf32", "float16", "bfloat16", "int8"}


def _name(card: DeviceModel) -> str:
    return card.name


@pytest.mark.parametrize("card", CARDS, ids=_name)
def test_figures_are_of_the_right_order(card: DeviceModel) -> None:
    """A slipped digit, a unit or a sparse figure would leave these ranges."""
    assert 16e9 <= card.memory_bytes <= 200e9
    assert 300e9 <= card.bandwidth_bytes_per_second <= 8e12
    assert 0 < card.launch_seconds < 1e-3
    assert {"float32", "float16", *card.flops_per_second} <= DTYPES
    assert all(1e12 < rate < 5e15 for rate in card.flops_per_second.values())


@pytest.mark.parametrize("card", CARDS, ids=_name)
def test_the_ridge_lies_where_rooflines_have_theirs(card: DeviceModel) -> None:
    """Between 5 and 1,000 operations a byte, later for smaller numbers."""
    plain, half = card.ridge_flops_per_byte(), card.ridge_flops_per_byte("float16")
    assert 5 < plain < half < 1000
    if "int8" in card.flops_per_second:
        assert half <= card.ridge_flops_per_byte("int8") < 1000


@pytest.mark.parametrize("card", CARDS, ids=_name)
def test_smaller_numbers_are_never_slower(card: DeviceModel) -> None:
    """The rates ascend from 64 to 8 bits."""
    order = ("float64", "float32", "tf32", "float16", "int8")
    rates = [card.flops_per_second[dtype] for dtype in order if dtype in card.flops_per_second]
    assert rates == sorted(rates)


@pytest.mark.parametrize("card", CARDS, ids=_name)
def test_every_card_names_its_source(card: DeviceModel) -> None:
    """A page or document of the maker, or of the only cloud that has the card."""
    url = urlparse(card.source)
    assert url.scheme == "https"
    assert url.netloc.endswith(("nvidia.com", "amd.com", "awsstatic.com"))
    assert DEVICES[card.name] is card


def test_only_cards_with_bfloat16_units_claim_a_rate_for_it() -> None:
    """Volta and Turing have none."""
    without = {card.name for card in CARDS if "bfloat16" not in card.flops_per_second}
    assert without == {"t4", "v100-16gb", "v100-32gb"}


@pytest.mark.parametrize("name", ["a100-40gb", "A100-40GB", "a100 40gb", "A100_40GB", " a100  40GB "])
def test_a_name_is_found_however_it_is_spelled(name: str) -> None:
    """Case, blanks and underscores do not matter."""
    assert device_model(name).name == "a100-40gb"


def test_an_unknown_name_is_answered_with_the_nearest_ones() -> None:
    """The message is enough to mend a typing error."""
    with pytest.raises(ConfigError, match=r"'h100-sxm'.*h100-nvl"):
        device_model("h100-sxm")
    with pytest.raises(ConfigError, match=r"'zzz'.*t4.*mi300x"):
        device_model("zzz")


def test_an_unstated_rate_is_an_error_that_names_the_stated_ones() -> None:
    """Nothing is guessed."""
    with pytest.raises(ConfigError, match=r"t4 states no rate for 'tf32'.*float32, float16, int8"):
        device_model("t4").ridge_flops_per_byte("tf32")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"flops_per_second": {"float16": 1e12}}, r"'own' have no 'float32'.*has 'float16'"),
        ({"flops_per_second": {}}, "has nothing"),
        ({"flops_per_second": {"float32": 0.0}}, "float32 of 'own' must be > 0"),
        ({"bandwidth_bytes_per_second": 0.0}, "bandwidth_bytes_per_second of 'own'"),
        ({"memory_bytes": 0}, "memory_bytes of 'own'"),
        ({"launch_seconds": -1.0}, "launch_seconds of 'own'"),
    ],
)
def test_figures_of_ones_own_are_checked(changes: dict[str, Any], expected: str) -> None:
    """A card that no time can be told of is refused where it is made."""
    figures: dict[str, Any] = {
        "memory_bytes": 10**9,
        "bandwidth_bytes_per_second": 1e11,
        "flops_per_second": {"float32": 1e12},
        "source": "",
    }
    assert DeviceModel(name="own", **figures).launch_seconds > 0
    with pytest.raises(ConfigError, match=expected):
        DeviceModel(name="own", **{**figures, **changes})
