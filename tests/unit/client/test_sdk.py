"""The typed client against a gateway that listens."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from berth.client import BerthClient, Refused, ServerFault, Unreachable
from berth.contracts.jobs import JobSpec, JobState
from tests.unit.client.conftest import Platform

JOB = {"name": "train", "class": "training", "gpus": 2, "command": ["x"], "time_limit": "1h"}


def test_a_job_from_submission_to_its_end(platform: Platform) -> None:
    with platform.client() as berth:
        made = berth.submit(JOB)
        assert berth.job(made.job_id).state is JobState.SUBMITTED
        assert berth.why(made.job_id).text
        assert berth.cancel(made.job_id, why="enough").cancel_requested
        platform.world.store.progress(made.job_id, state="cancelled")
        assert berth.wait(made.job_id, timeout_seconds=5).state is JobState.CANCELLED
        assert made.job_id in {job.job_id for job in berth.jobs(state="over")}


def test_specifications_go_as_they_are(platform: Platform) -> None:
    spec = JobSpec.model_validate(JOB | {"tenant": "team-a", "name": "spec/with/slashes"})
    with platform.client() as berth:
        made = berth.submit(spec)
        found = berth.job("spec/with/slashes")
        assert found.job_id == made.job_id
        assert found.spec is not None
        assert found.spec.time_limit == 3600
        assert [job.name for job in berth.submit_batch([spec, spec]).jobs] == [spec.name] * 2


def test_pages_are_joined(platform: Platform) -> None:
    with platform.client("operator") as berth:
        berth.submit_batch([JOB | {"tenant": "视觉组", "name": f"p{n}"} for n in range(30)])
        assert len(list(berth.jobs(tenant="视觉组"))) == 30
        assert [job.name for job in berth.jobs(tenant="视觉组", limit=3)] == ["p29", "p28", "p27"]


def test_a_refusal_carries_field_value_and_remedy(platform: Platform) -> None:
    with platform.client() as berth, pytest.raises(Refused) as caught:
        berth.submit(JOB | {"gpus": -1})
    error = caught.value
    assert (error.status, error.code, error.field, error.value) == (422, "too_small", "gpus", "-1")
    assert "raise gpus" in str(error)


def test_waiting_has_an_end(platform: Platform) -> None:
    with platform.client() as berth:
        made = berth.submit(JOB)
        with pytest.raises(TimeoutError, match="submitted"):
            berth.wait(made.job_id, timeout_seconds=0)


def _answers(*answers: httpx.Response | Exception) -> tuple[httpx.MockTransport, list[httpx.Request]]:
    seen: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        found = answers[min(len(seen), len(answers)) - 1]
        if isinstance(found, Exception):
            raise found
        return found

    return httpx.MockTransport(answer), seen


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("berth.client.transport.time.sleep", lambda _: None)


def test_a_submission_without_an_answer_is_sent_again_under_one_key() -> None:
    made = httpx.Response(201, json={"job_id": "j1", "name": "a"})
    transport, seen = _answers(httpx.ReadError("cut"), httpx.Response(503, json={}), made)
    assert BerthClient("http://x", "t", transport=transport).submit(JOB).job_id == "j1"
    assert len({request.headers["idempotency-key"] for request in seen}) == 1
    assert len(seen) == 3


def test_what_may_not_be_repeated_is_sent_once() -> None:
    transport, seen = _answers(httpx.ReadError("cut"))
    with pytest.raises(Unreachable):
        BerthClient("http://x", "t", transport=transport).create_token("u")
    assert len(seen) == 1


def test_a_platform_that_is_not_there_is_unreachable() -> None:
    transport, seen = _answers(httpx.ConnectError("refused"))
    with pytest.raises(Unreachable, match="does not answer"):
        BerthClient("http://x", "t", transport=transport).nodes()
    assert len(seen) == 4


def test_an_answer_that_is_no_problem_document_is_still_an_error() -> None:
    transport, _ = _answers(httpx.Response(500, text="<html>oops"))
    with pytest.raises(ServerFault, match="oops"):
        BerthClient("http://x", "t", transport=transport).nodes()


def test_a_followed_stream_goes_on_behind_its_last_event() -> None:
    def event(number: int) -> str:
        body = f'{{"sequence": {number}, "id": "e", "type": "t", "time": "2026-03-02T08:00:00Z", "subject": "s"}}'
        return f"id: {number}\nevent: t\ndata: {body}\n\n"

    transport, seen = _answers(
        httpx.Response(200, text=": hello\n\n" + event(1) + event(2)),
        httpx.ReadError("cut"),
        httpx.Response(200, text=event(3)),
    )
    events = BerthClient("http://x", "t", transport=transport).events(follow=True, after=0)
    assert [next(events).sequence for _ in range(3)] == [1, 2, 3]
    assert seen[-1].headers["last-event-id"] == "2"
    assert "after" not in seen[-1].url.params


def test_a_followed_log_goes_on_where_it_was() -> None:
    def cut() -> Iterator[bytes]:
        yield "é1".encode()
        raise httpx.ReadError("cut")

    first = httpx.Response(200, headers={"Berth-Offset": "100"}, content=cut())
    transport, seen = _answers(first, httpx.Response(503, json={}), httpx.Response(200, text="end"))
    assert "".join(BerthClient("http://x", "t", transport=transport).logs("j", follow=True)) == "é1end"
    assert [request.url.params["offset"] for request in seen] == ["0", "103", "103"]
