"""Acceptance scenarios: read, play against the decision cores under the simulated clock, judge.

`tests/scenarios/README.md` is the meaning of every word here.
"""

from berth.sim.scenarios.player import Failure, Outcome, play
from berth.sim.scenarios.scenario import Scenario, load

__all__ = ["Failure", "Outcome", "Scenario", "load", "play"]
