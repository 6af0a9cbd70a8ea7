"""The simulated fleet of an embedded platform, as text: `gpu-a=8xH100-80G:nvswitch,gpu-b=...`."""

from __future__ import annotations

import re
from typing import Final

DEFAULT_FLEET: Final = "h100-1=8xH100-80G:nvswitch,h100-2=8xH100-80G:nvswitch,a100-1=4xA100-40G:pcie"
_NODE: Final = re.compile(r"^(?P<name>[A-Za-z0-9_-]+)=(?P<gpus>\d+)x(?P<type>[A-Za-z0-9._+-]+)(:(?P<links>[a-z]+))?$")


def node_names(fleet: str) -> list[str]:
    """Names of the nodes in a fleet text, in order.

    Raises:
        ValueError: it is not such a text; says which part.
    """
    if fleet in ("", "nvml"):
        return []
    names = []
    for part in fleet.split(","):
        found = _NODE.match(part.strip())
        if found is None:
            raise ValueError(f"{part!r} describes no node; write name=8xH100-80G:nvswitch")
        names.append(found["name"])
    return names


def many_nodes(count: int, *, gpus: int = 8, card_type: str = "H100-80G", links: str = "nvswitch") -> str:
    """A fleet of equal nodes, for benches."""
    return ",".join(f"node-{number:04d}={gpus}x{card_type}:{links}" for number in range(count))
