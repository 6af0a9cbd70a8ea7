"""Card types: the names people ask for (`H100-80G`), from what a card says of itself."""

import re
from typing import Final

_FAMILIES: Final = (
    # (all of these words in the model name, family); the first match counts, so the narrower ones come first
    (("gb200",), "GB200"),
    (("gh200",), "GH200"),
    (("b300",), "B300"),
    (("b200",), "B200"),
    (("b100",), "B100"),
    (("h200",), "H200"),
    (("h800",), "H800"),
    (("h100",), "H100"),
    (("h20",), "H20"),
    (("a800",), "A800"),
    (("a100x",), "A100X"),
    (("a100",), "A100"),
    (("a10g",), "A10G"),
    (("a10m",), "A10M"),
    (("a10",), "A10"),
    (("a16",), "A16"),
    (("a2",), "A2"),
    (("a30",), "A30"),
    (("a40",), "A40"),
    (("l40s",), "L40S"),
    (("l40g",), "L40G"),
    (("l40",), "L40"),
    (("l20",), "L20"),
    (("l4",), "L4"),
    (("v100",), "V100"),
    (("v100s",), "V100S"),
    (("p100",), "P100"),
    (("p40",), "P40"),
    (("p4",), "P4"),
    (("t4g",), "T4G"),
    (("t4",), "T4"),
    (("rtx", "pro", "6000", "blackwell"), "RTXPRO6000"),
    (("rtx", "6000", "ada"), "RTX6000ADA"),
    (("rtx", "5000", "ada"), "RTX5000ADA"),
    (("a6000",), "A6000"),
    (("a5000",), "A5000"),
    (("a4000",), "A4000"),
)
_SIZES_GIB: Final = (
    2,
    3,
    4,
    6,
    8,
    10,
    11,
    12,
    16,
    20,
    24,
    32,
    40,
    48,
    64,
    80,
    94,
    96,
    120,
    128,
    141,
    144,
    180,
    192,
    288,
)
"""Sizes cards are sold in. What NVML reports is up to 7 % less: ECC and firmware take their part."""
_NOISE: Final = frozenset(
    {"nvidia", "tesla", "geforce", "quadro", "graphics", "device", "gpu", "generation", "laptop", "with", "max", "q"}
    | {"pcie", "sxm", "sxm2", "sxm3", "sxm4", "sxm5", "nvl", "hgx", "hbm2", "hbm2e", "hbm3", "hbm3e", "gddr6"}
    | {"edition", "server", "workstation"}
)
_MEMORY_WORD: Final = re.compile(r"^\d+g(i?b)?$")
_LEGAL: Final = re.compile(r"[^A-Za-z0-9._+]")


def card_type(model: str, memory_mib: int) -> str:
    """The type of a card: family and the size it is sold with.

    A family that is not in the table is spelt from the model's own words: "NVIDIA GeForce RTX 4090" -> `RTX4090-24G`.
    """
    words = re.split(r"[\s/_-]+", model.strip().lower())
    family = next((name for needed, name in _FAMILIES if all(word in words for word in needed)), "")
    if not family:
        family = _LEGAL.sub("", "".join(w for w in words if w not in _NOISE and not _MEMORY_WORD.match(w))).upper()
    return f"{family or 'GPU'}-{sold_size_gib(memory_mib)}G"


def sold_size_gib(memory_mib: int) -> int:
    """The smallest size sold that is not below what is reported."""
    gib = memory_mib / 1024
    return next((size for size in _SIZES_GIB if size >= gib - 0.5), max(round(gib), 1))


def memory_of(type_: str) -> int:
    """MiB of a card type by its name, for simulated cards. Raises ValueError when the name has no size."""
    match = re.fullmatch(r".+-(\d+)G", type_)
    if match is None:
        raise ValueError(f"{type_!r} does not end in a size such as -80G")
    return int(match[1]) * 1024
