"""A small simulated platform with the smallest honest placement."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from berth.decisions.health import InventoryCore
from berth.decisions.lifecycle import LifecycleCore
from berth.sim.platform import Platform
from tests.unit.decisions.desks import START, described
from tests.unit.sim.first_fit import FirstFit


@pytest.fixture
def make_platform() -> Callable[..., Platform]:
    def make(*, nodes: tuple[str, ...] = ("n1", "n2"), gpus: int = 4) -> Platform:
        platform = Platform(START, cores=[InventoryCore, FirstFit, LifecycleCore], through_json=True)
        for node in nodes:
            platform.fleet.add(described(node, gpus=gpus))
        platform.settle()
        return platform

    return make
