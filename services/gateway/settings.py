"""Settings of the gateway, `BERTH_*` variables."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from berth.runtime.settings import BerthSettings, Port


class Settings(BerthSettings):
    """Besides those common to all services; see `python -m berth.runtime.settings`."""

    api_host: str = Field("127.0.0.1", description="address of the API; loopback unless told otherwise")
    api_port: Port = Field(0, description="port of the API; 0: any free one, see <home>/run/gateway-api.json")
    admin_token_file: Path | None = Field(None, description="file with an operator's token, taken over at each start")
    internal_token_file: Path | None = Field(None, description="file with the services' token for sending spans")
    api_max_body_bytes: int = Field(1 << 20, ge=1024, le=64 << 20, description="bytes of a request body at most")
    api_max_batch: int = Field(2000, ge=1, le=10_000, description="jobs in one submission at most")
    api_event_streams: int = Field(200, ge=1, le=10_000, description="open event and log streams at most")
    spans_kept: int = Field(200_000, ge=0, le=10_000_000, description="finished spans kept at most")
    spans_hours: int = Field(24, ge=1, le=24 * 30, description="hours for which spans are kept")
    policy_wait_seconds: float = Field(5.0, ge=0, le=60, description="seconds a policy proposal waits for its answer")
