"""Jobs flow while parts of the platform are killed; every promise is kept.

`BERTH_TEST_CHAOS=long` draws many faults instead of one of each kind; `python -m tests.chaos` has more knobs.
"""

from __future__ import annotations

import os
import random
from itertools import islice

import pytest

from tests.chaos.campaign import run_alone
from tests.chaos.faults import every_fault, short_list
from tests.chaos.users import Traffic

IS_LONG = os.environ.get("BERTH_TEST_CHAOS") == "long"


@pytest.mark.chaos
@pytest.mark.xdist_group("platform")
@pytest.mark.timeout(3600 if IS_LONG else 280)
def test_every_answered_submission_ends_once_whatever_is_killed() -> None:
    seed = int(os.environ.get("BERTH_TEST_SEED", "1"))
    if IS_LONG:
        faults = list(islice(every_fault(random.Random(seed)), 80))
        report = run_alone(faults, Traffic(at_least=200, flowing=60, seconds=(2.0, 10.0)), seed=seed)
    else:
        report = run_alone(short_list(), Traffic(at_least=60, flowing=30, seconds=(2.0, 4.0)), seed=seed)
    assert not report.missed and not report.violations, report.text()
