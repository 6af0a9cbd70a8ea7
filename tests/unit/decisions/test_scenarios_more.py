"""More situations of the kind in `tests/scenarios`, one for each rule that those leave open."""

from __future__ import annotations

from pathlib import Path

import pytest

from berth.sim.scenarios.player import play
from berth.sim.scenarios.scenario import load

FOLDER = Path(__file__).parents[2] / "scenarios_more"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.stem)
def test_scenario(path: Path) -> None:
    outcome = play(load(path))
    assert not outcome.failures
