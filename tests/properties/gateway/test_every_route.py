"""Every operation that the description lists, called with what it says is accepted and with what is not."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings

from berth.contracts.api import Problem
from services.gateway.api.http import make_app
from tests.unit.gateway.fakes import make_world

world = asyncio.run(make_world())
world.deps.policy_wait_seconds = 0
app = make_app(world.deps)
schema = schemathesis.openapi.from_asgi("/openapi.json", app)


@pytest.mark.parametrize("token", ["operator", "member"])
@schema.exclude(path=["/v1/events", "/v1/traces"]).exclude(operation_id="submit_jobs").parametrize()
@settings(
    max_examples=5,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
    derandomize=True,
)
def test_no_request_breaks_the_gateway(case: Any, token: str) -> None:
    answer = case.call(headers={"Authorization": f"Bearer {token}"})
    assert answer.status_code < 500 or answer.status_code == 503, answer.text
    if answer.status_code >= 400:
        problem = Problem.model_validate(answer.json())
        assert problem.code
        assert problem.remedy
