"""Settings of inventory."""

from __future__ import annotations

from pydantic import Field

from berth.runtime.settings import BerthSettings


class Settings(BerthSettings):
    """`BERTH_*` variables that inventory reads; see `python -m berth.runtime.settings`."""

    telemetry_seconds: float = Field(
        5.0, gt=0, le=60, description="s between a node's telemetry frames; they renew its lease"
    )
