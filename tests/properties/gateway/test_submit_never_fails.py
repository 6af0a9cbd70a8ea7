"""Whatever is sent to the submission route, the answer is a 2xx or a problem document below 500, and never a secret."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from berth.contracts.api import Problem
from berth.contracts.jobs import JobSpec, Role, ServiceSpec
from services.gateway.api.http import make_app
from tests.unit.gateway.fakes import World, make_world

SECRET = "s3cr3t-Zq9"
KEYS = [field.alias or name for model in (JobSpec, Role, ServiceSpec) for name, field in model.model_fields.items()] + [
    "jobs",
    "job_class",
    "",
    "gpu",
    "é",
    "__proto__",
]
GOOD: dict[str, Any] = {"name": "a", "class": "general", "command": ["x"]}

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=-(10**30), max_value=10**30)
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(["1h30m", "-5m", "training", "NaN", "A100-80G", "1g.10gb", "\x00", "a\u202e"])
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=12,
)
bodies = st.dictionaries(st.sampled_from(KEYS), values, max_size=8)


@pytest.fixture(scope="module")
def world() -> World:
    return asyncio.run(make_world())


def post(world: World, content: bytes, content_type: str) -> httpx.Response:
    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(make_app(world.deps), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            headers = {"Authorization": "Bearer member", "Content-Type": content_type}
            return await client.post("/v1/jobs", content=content, headers=headers)

    return asyncio.run(send())


def check(answer: httpx.Response) -> None:
    if answer.status_code in {200, 201}:
        return
    assert 400 <= answer.status_code < 500, answer.text
    problem = Problem.model_validate(answer.json())
    assert problem.code
    assert problem.remedy
    assert len(answer.content) < 100_000


relaxed = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@relaxed
@given(body=values)
def test_any_json_value(world: World, body: Any) -> None:
    check(post(world, json.dumps(body).encode(), "application/json"))


@relaxed
@given(change=bodies)
def test_any_field_of_a_job(world: World, change: dict[str, Any]) -> None:
    check(post(world, json.dumps(GOOD | change).encode(), "application/json"))


@relaxed
@given(content=st.binary(max_size=200))
def test_any_bytes(world: World, content: bytes) -> None:
    check(post(world, content, "application/json"))
    check(post(world, content, "application/yaml"))


@relaxed
@given(text=st.text(alphabet=st.sampled_from(list("{}[]:,-?&*!|>'\"%@` \n\tab1.~#é🚀\x07")), max_size=60))
def test_any_text_that_looks_like_yaml(world: World, text: str) -> None:
    check(post(world, text.encode(), "application/yaml"))


@relaxed
@given(change=bodies, name=st.text(max_size=8))
def test_no_answer_shows_a_value_of_the_environment(world: World, change: dict[str, Any], name: str) -> None:
    body = GOOD | change | {"env": {name: SECRET, "OTHER": 1, "THIRD": f"{SECRET}\x00"}}
    answer = post(world, json.dumps(body).encode(), "application/json")
    check(answer)
    assert SECRET not in answer.text
