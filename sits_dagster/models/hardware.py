"""What common data-centre cards can do at most, by their makers' data sheets."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from sits_dagster.errors import ConfigError
from sits_dagster.models.roofline import require

__all__ = ["DEVICES", "LAUNCH_SECONDS_TYPICAL", "DeviceModel", "device_model"]

LAUNCH_SECONDS_TYPICAL: Final = 5e-6
"""What starting one kernel costs, in seconds: the order of magnitude on current drivers.

No data sheet states it. It depends on the host, the driver and the runtime (2 µs to 20 µs), so a
measured figure, as `timing.fit_time_model` finds it, always replaces this one.
"""

PLAIN_TYPE: Final = "float32"
GIGABYTE: Final = 10**9
TERA: Final = 1e12

_NVIDIA: Final = "https://www.nvidia.com/content/dam/en-zz/Solutions/"
_NVIDIA_PAGE: Final = "https://www.nvidia.com/en-us/data-center/"
_AMD: Final = "https://www.amd.com/en/products/accelerators/instinct/"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceModel:
    """The peak figures of one card, as its maker states them; no program reaches all of them.

    Args:
        name: Its key in `DEVICES`, lower case.
        memory_bytes: Its memory. Data sheets say GB; counted here as 10⁹ bytes, so that what is
            planned with it also fits if error correction takes its share.
        bandwidth_bytes_per_second: Peak bandwidth of the device's memory.
        flops_per_second: Peak operations per second by type of number (a multiply-add counts as
            two), dense: without the doubling that data sheets claim for sparse matrices.
            `float32` and `float64` are the plain units, `tf32` and smaller types the matrix
            units. A type is missing where the maker states nothing; `float32` never is.
        launch_seconds: What starting one kernel costs; not from a data sheet.
        source: URL of the data sheet.

    Raises:
        ConfigError: A figure is not above 0, or `float32` is missing.
    """

    name: str
    memory_bytes: int
    bandwidth_bytes_per_second: float
    flops_per_second: Mapping[str, float] = field(hash=False)
    launch_seconds: float = LAUNCH_SECONDS_TYPICAL
    source: str

    def __post_init__(self) -> None:
        """Refuse figures that no time can be told from."""
        if PLAIN_TYPE not in self.flops_per_second:
            known = ", ".join(map(repr, self.flops_per_second)) or "nothing"
            msg = f"The rates of {self.name!r} have no {PLAIN_TYPE!r}, which counts for all other types."
            raise ConfigError(msg, hint=f"add it to `flops_per_second`, which has {known}.")
        figures = {
            "memory_bytes": self.memory_bytes,
            "bandwidth_bytes_per_second": self.bandwidth_bytes_per_second,
            **self.flops_per_second,
        }
        for what, figure in figures.items():
            require(f"{what} of {self.name!r}", figure, holds=0 < figure < math.inf, expected="> 0")
        launch = self.launch_seconds
        require(f"launch_seconds of {self.name!r}", launch, holds=0 <= launch < math.inf, expected=">= 0")

    def ridge_flops_per_byte(self, dtype: str = "float32") -> float:
        """Return the arithmetic intensity from which on arithmetic, not memory, is the limit.

        Args:
            dtype: Type of number, a key of `flops_per_second`.

        Raises:
            ConfigError: The maker states no figure for this type.
        """
        try:
            return self.flops_per_second[dtype] / self.bandwidth_bytes_per_second
        except KeyError:
            known = ", ".join(self.flops_per_second)
            msg = f"The data sheet of {self.name} states no rate for {dtype!r}."
            raise ConfigError(msg, hint=f"choose one of: {known}.") from None


def _card(
    name: str, source: str, *, gigabytes: int, gigabytes_per_second: float, **teraflops: float
) -> DeviceModel:
    if "float16" in teraflops and name not in _WITHOUT_BFLOAT16:
        teraflops["bfloat16"] = teraflops["float16"]  # the makers state one figure for both
    return DeviceModel(
        name=name,
        memory_bytes=gigabytes * GIGABYTE,
        bandwidth_bytes_per_second=float(gigabytes_per_second * GIGABYTE),
        flops_per_second={dtype: rate * TERA for dtype, rate in teraflops.items()},
        source=source,
    )


_WITHOUT_BFLOAT16: Final = frozenset({"t4", "v100-16gb", "v100-32gb"})
_V100: Final = (
    "https://images.nvidia.com/content/technologies/volta/pdf/tesla-volta-v100-datasheet-letter-fnl-web.pdf"
)
_A10G: Final = "https://d1.awsstatic.com/product-marketing/ec2/NVIDIA_AWS_A10G_DataSheet_FINAL_02_17_2022.pdf"
_GA102: Final = "https://www.nvidia.com/content/PDF/nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.pdf"
_T4: Final = f"{_NVIDIA}Data-Center/tesla-t4/t4-tensor-core-datasheet-951643.pdf"
_A10: Final = f"{_NVIDIA}Data-Center/a10/pdf/a10-datasheet.pdf"
_A30: Final = f"{_NVIDIA}data-center/products/a30-gpu/pdf/a30-datasheet.pdf"
_A40: Final = "https://images.nvidia.com/content/Solutions/data-center/a40/nvidia-a40-datasheet.pdf"
_A100: Final = f"{_NVIDIA}Data-Center/a100/pdf/nvidia-a100-datasheet-nvidia-us-2188504-web.pdf"

_VOLTA: Final = {"float64": 7.8, "float32": 15.7, "float16": 125.0}
_AMPERE: Final = {"float64": 9.7, "float32": 19.5, "tf32": 156.0, "float16": 312.0, "int8": 624.0}
# Hopper and Blackwell sheets print sparse figures only; these are their halves, as the footnotes say.
_HOPPER: Final = {"float64": 34.0, "float32": 67.0, "tf32": 494.5, "float16": 989.5, "int8": 1979.0}

_CARDS: Final = (
    _card("t4", _T4, gigabytes=16, gigabytes_per_second=320, float32=8.1, float16=65, int8=130),
    # The SXM2 modules; the PCIe cards reach nine tenths of their arithmetic.
    _card("v100-16gb", _V100, gigabytes=16, gigabytes_per_second=900, **_VOLTA),
    _card("v100-32gb", _V100, gigabytes=32, gigabytes_per_second=900, **_VOLTA),
    _card(
        "a10", _A10, gigabytes=24, gigabytes_per_second=600, float32=31.2, tf32=62.5, float16=125, int8=250
    ),
    # Made for one cloud: faster plain units, but little more than half the A10's matrix units.
    _card("a10g", _A10G, gigabytes=24, gigabytes_per_second=600, float32=35, tf32=35, float16=70, int8=140),
    _card(
        "a30",
        _A30,
        gigabytes=24,
        gigabytes_per_second=933,
        float64=5.2,
        float32=10.3,
        tf32=82,
        float16=165,
        int8=330,
    ),
    _card(
        "a40",
        _A40,
        gigabytes=48,
        gigabytes_per_second=696,
        float32=37.4,
        tf32=74.8,
        float16=149.7,
        int8=299.3,
    ),
    _card("a100-40gb", _A100, gigabytes=40, gigabytes_per_second=1555, **_AMPERE),
    _card("a100-80gb", _A100, gigabytes=80, gigabytes_per_second=2039, **_AMPERE),
    _card("a100-40gb-pcie", _A100, gigabytes=40, gigabytes_per_second=1555, **_AMPERE),
    _card("a100-80gb-pcie", _A100, gigabytes=80, gigabytes_per_second=1935, **_AMPERE),
    _card(
        "rtx-a6000",
        _GA102,
        gigabytes=48,
        gigabytes_per_second=768,
        float32=38.7,
        tf32=77.4,
        float16=154.8,
        int8=309.7,
    ),
    _card(
        "l4",
        f"{_NVIDIA_PAGE}l4/",
        gigabytes=24,
        gigabytes_per_second=300,
        float32=30.3,
        tf32=60,
        float16=121,
        int8=242.5,
    ),
    _card(
        "l40",
        f"{_NVIDIA_PAGE}l40/",
        gigabytes=48,
        gigabytes_per_second=864,
        float32=90.5,
        tf32=90.5,
        float16=181.05,
        int8=362,
    ),
    _card(
        "l40s",
        f"{_NVIDIA_PAGE}l40s/",
        gigabytes=48,
        gigabytes_per_second=864,
        float32=91.6,
        tf32=183,
        float16=362.05,
        int8=733,
    ),
    _card("h100-80gb", f"{_NVIDIA_PAGE}h100/", gigabytes=80, gigabytes_per_second=3350, **_HOPPER),
    _card(
        "h100-pcie",
        "https://resources.nvidia.com/en-us-tensor-core/nvidia-tensor-core-gpu-datasheet",
        gigabytes=80,
        gigabytes_per_second=2000,
        float64=26,
        float32=51,
        tf32=378,
        float16=756.5,
        int8=1513,
    ),
    _card(
        "h100-nvl",
        f"{_NVIDIA_PAGE}h100/",
        gigabytes=94,
        gigabytes_per_second=3900,
        float64=30,
        float32=60,
        tf32=417.5,
        float16=835.5,
        int8=1670.5,
    ),
    _card("h200", f"{_NVIDIA_PAGE}h200/", gigabytes=141, gigabytes_per_second=4800, **_HOPPER),
    # An eighth of what the data sheet states for a board of eight.
    _card(
        "b200",
        f"{_NVIDIA_PAGE}hgx/",
        gigabytes=180,
        gigabytes_per_second=8000,
        float64=37,
        float32=75,
        tf32=1125,
        float16=2250,
        int8=4500,
    ),
    _card(
        "mi210",
        f"{_AMD}mi200/mi210.html",
        gigabytes=64,
        gigabytes_per_second=1638.4,
        float64=22.6,
        float32=22.6,
        float16=181,
        int8=181,
    ),
    # One of the module's two dies, half of the stated figures: a program sees each as a device of its own.
    _card(
        "mi250x",
        f"{_AMD}mi200/mi250x.html",
        gigabytes=64,
        gigabytes_per_second=1638.4,
        float64=23.95,
        float32=23.95,
        float16=191.5,
        int8=191.5,
    ),
    _card(
        "mi300x",
        f"{_AMD}mi300/mi300x.html",
        gigabytes=192,
        gigabytes_per_second=5300,
        float64=81.7,
        float32=163.4,
        tf32=653.7,
        float16=1307.4,
        int8=2614.9,
    ),
)

DEVICES: Final[Mapping[str, DeviceModel]] = {card.name: card for card in _CARDS}
"""Common data-centre cards by name; where both are made, the module (SXM), unless the name says `-pcie`."""


def device_model(name: str) -> DeviceModel:
    """Return the card of this name, whatever its case and with blanks or underscores for hyphens.

    Args:
        name: A key of `DEVICES`, for example `"a100-40gb"`.

    Raises:
        ConfigError: There is no such card; the message names those spelled most alike.

    Example:
        >>> device_model("A100 80GB").bandwidth_bytes_per_second
        2039000000000.0
    """
    key = "-".join(name.lower().replace("_", " ").replace("-", " ").split())
    if key in DEVICES:
        return DEVICES[key]
    alike = difflib.get_close_matches(key, DEVICES, n=3, cutoff=0.4) or list(DEVICES)
    msg = f"There is no figure for a device {name!r}."
    raise ConfigError(msg, hint=f"did you mean {', '.join(alike)}? A DeviceModel of your own serves as well.")
