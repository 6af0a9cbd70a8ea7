"""Settings of admission."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from berth.decisions.policy.check import SHORTEST_LOST_AFTER
from berth.runtime.settings import BerthSettings


class Settings(BerthSettings):
    """`BERTH_*` variables that admission reads; see `python -m berth.runtime.settings`."""

    policy_file: Path | None = Field(
        None, description="policy document for a pool that has none yet; none: jobs are held"
    )
    shortest_lost_after_seconds: int = Field(
        SHORTEST_LOST_AFTER,
        ge=0,
        description="a policy with a shorter lost_after is refused; lower only where clocks run faster",
    )
