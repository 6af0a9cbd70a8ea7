"""Platforms that are really started. They run one after another: `xdist_group` keeps them on one process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from berth.client.sdk import BerthClient
from berth.testing.platform import TestPlatform, embedded_platform
from tests.e2e.cli import Berth

FLEET = "h1=8xH100-80G:nvswitch,a1=4xA100-40G:pcie"


@pytest.fixture(scope="module")
def platform() -> Iterator[TestPlatform]:
    """One node of 8 H100-80G and one of 4 A100-40G, for all tests of a module."""
    with embedded_platform(FLEET) as running:
        yield running


@pytest.fixture
def client(platform: TestPlatform) -> Iterator[BerthClient]:
    with BerthClient(platform.url, platform.token) as client:
        yield client


@pytest.fixture
def berth(platform: TestPlatform) -> Berth:
    return Berth(platform.layout.home)
