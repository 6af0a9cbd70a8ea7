"""What must hold after a step: each word of `expect`, and what is said when it does not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from berth.contracts.jobs import JobState
from berth.contracts.nodes import GpuHealthState
from berth.contracts.reasons import Reason
from berth.sim.scenarios.player import Stage
from berth.sim.scenarios.scenario import Step, seconds
from berth.sim.scenarios.views import JobSeen

PLACES = 9


def expectations(stage: Stage, step: Step) -> Iterable[str]:
    """What does not hold."""
    for word, wanted in step.expect.items():
        check = _CHECKS.get(word)
        if check is None:
            yield f"nobody here can check {word}"
        else:
            yield from check(stage, wanted)


def equal(was: float | None, wanted: float) -> bool:
    """Equal to nine places."""
    return was is not None and round(float(was), PLACES) == round(float(wanted), PLACES)


# ---------------------------------------------------------------------------------------------------------------- jobs
def _jobs(stage: Stage, wanted: Mapping[str, Mapping[str, Any]]) -> Iterable[str]:
    for name, words in wanted.items():
        job = stage.job(name)
        if job is None:
            yield f"job {name}: expected {dict(words)}, is not known"
            continue
        for word, value in words.items():
            was, holds = _job_word(stage, job, word, value)
            if not holds:
                yield f"job {name}: expected {word} {value}, was {was}{_why(stage, job)}"


def _why(stage: Stage, job: JobSeen) -> str:
    if job.state is not JobState.WAITING:
        return ""
    codes = [reason.code.value for reason in _reasons(stage, job.id)]
    return f" (waits: {', '.join(codes)})" if codes else ""


def _job_word(stage: Stage, job: JobSeen, word: str, value: Any) -> tuple[Any, bool]:
    """What the word was, and whether that is as wanted."""
    look = _JOB_WORDS.get(word)
    if look is None:
        return "nobody here can look at that", False
    was = look(stage, job, value)
    match word:
        case "state":
            return was, was in (value if isinstance(value, list) else [value])
        case "nodes_within":
            return was, all(place == {value[level]} for level, place in was.items())
        case "reason":
            return was, value in was
        case "progress_at_least":
            return f"{was}s", was >= seconds(value)
        case "progress_at_most":
            return f"{was}s", was <= seconds(value)
        case "attempts_at_most":
            return was, was <= value
        case "nodes":
            return was, was == sorted(value)
        case "gpus_on":
            return was, was == {node: sorted(gpus) for node, gpus in value.items()}
    return was, was == value


def _types(job: JobSeen) -> str:
    return " ".join(sorted({placed.assignment.card_type for placed in job.workers.values()}))


def _cause(job: JobSeen) -> list[str]:
    return [job.cause.code.value] if job.cause else [reason.code.value for reason in job.reasons]


def _domains(stage: Stage, job: JobSeen, levels: Mapping[str, str]) -> dict[str, set[str]]:
    agents = stage.platform.fleet.agents
    return {
        level: {agents[node].description.domain.get(level, node) for node in job.nodes} or {"nowhere"}
        for level in levels
    }


def _gpus_on(stage: Stage, job: JobSeen) -> dict[str, list[int]]:
    on: dict[str, list[int]] = {}
    for placed in job.workers.values():
        node = placed.assignment.node
        index = {gpu.uuid: gpu.index for gpu in stage.platform.fleet.agents[node].description.gpus}
        on.setdefault(node, []).extend(index[gpu] for gpu in placed.assignment.gpus)
    return {node: sorted(set(gpus)) for node, gpus in on.items()}


_JOB_WORDS: Mapping[str, Callable[[Stage, JobSeen, Any], Any]] = {
    "state": lambda stage, job, value: stage.state_of(job),
    "nodes": lambda stage, job, value: job.nodes,
    "nodes_within": _domains,
    "gpus_on": lambda stage, job, value: _gpus_on(stage, job),
    "type": lambda stage, job, value: _types(job),
    "workers_running": lambda stage, job, value: len(stage.platform.fleet.running(job.id)),
    "attempt": lambda stage, job, value: job.attempt,
    "attempts_at_most": lambda stage, job, value: job.attempt,
    "restarts_charged": lambda stage, job, value: job.charged,
    "reason": lambda stage, job, value: _cause(job),
    "progress_at_least": lambda stage, job, value: stage.platform.fleet.work_done(job.id),
    "progress_at_most": lambda stage, job, value: stage.platform.fleet.work_done(job.id),
    "notified": lambda stage, job, value: job.notified_at is not None,
}


# ----------------------------------------------------------------------------------------------------------------- why
def _reasons(stage: Stage, job_id: str) -> tuple[Reason, ...]:
    return stage.placement.explain(job_id, stage.platform.clock.now).reasons


def _whys(stage: Stage, wanted: Mapping[str, Mapping[str, Any]]) -> Iterable[str]:
    for name, words in wanted.items():
        job = stage.job(name)
        if job is None:
            yield f"why {name}: the job is not known"
            continue
        reasons = stage.why(job)
        codes = [reason.code.value for reason in reasons]
        shown = {reason.code.value: {k: v for k, v in reason.facts.items() if k != "remedy"} for reason in reasons}
        missing = [code for code in words.get("reasons", ()) if code not in codes]
        if missing:
            yield f"why {name}: expected {words['reasons']}, was {shown}"
        anyof = words.get("reasons_any")
        if anyof and not set(anyof) & set(codes):
            yield f"why {name}: expected any of {anyof}, was {shown}"
        for key, number in words.get("numbers", {}).items():
            if not any(equal(_number(reason, key), number) for reason in reasons):
                yield f"why {name}: expected {key} {number}, was {shown}"
        blockers = _names_for(stage, reasons, words.get("seen_by"))
        absent = [other for other in words.get("blocked_by", ()) if other not in blockers]
        if absent:
            yield f"why {name}: expected blocked by {words['blocked_by']}, was {sorted(blockers)}"
        text = f"{shown} {sorted(blockers)}"
        for hidden in words.get("hides", ()):
            if hidden in text:
                yield f"why {name}: shows {hidden}"


def _number(reason: Reason, key: str) -> float | None:
    value = reason.facts.get(key)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _names_for(stage: Stage, reasons: Iterable[Reason], user: str | None) -> set[str]:
    """Names of the jobs in the way that the user may see; nobody in particular sees all."""
    ids = {job_id for reason in reasons for job_id in reason.blocked_by}
    tenant, role = stage.role(user) if user else ("", "operator")
    seen = set()
    for job_id in ids:
        job = stage.views.jobs.get(job_id)
        if job is not None and (role == "operator" or job.spec.tenant == tenant):
            seen.add(stage.name_of(job.service or job_id))
    return seen


# ------------------------------------------------------------------------------------------------------ usage and rooms
def _usage(stage: Stage, wanted: Mapping[str, Mapping[str, float]]) -> Iterable[str]:
    for tenant, types in wanted.items():
        for card_type, amount in types.items():
            was = used(stage, tenant, card_type)
            if not equal(was, amount):
                yield f"usage of {tenant}: expected {amount} {card_type}, was {was}"


def used(stage: Stage, tenant: str, card_type: str) -> float:
    """What a tenant holds of a card type."""
    lines = stage.placement.quota(tenant, stage.platform.clock.now).lines
    return next((line.used for line in lines if line.card_type == card_type), 0)


def _borrowed(stage: Stage, wanted: Mapping[str, Mapping[str, float]]) -> Iterable[str]:
    for tenant, types in wanted.items():
        lines = stage.placement.quota(tenant, stage.platform.clock.now).lines
        for card_type, amount in types.items():
            was = next((line.borrowed for line in lines if line.card_type == card_type), 0)
            if not equal(was, amount):
                yield f"borrowed by {tenant}: expected {amount} {card_type}, was {was}"


def _usage_memory(stage: Stage, wanted: Mapping[str, float]) -> Iterable[str]:
    for tenant, amount in wanted.items():
        was = stage.memory_used_gib(tenant)
        if not equal(was, amount):
            yield f"memory used by {tenant}: expected {amount} GiB, was {was}"


def _free(stage: Stage, wanted: Mapping[str, int]) -> Iterable[str]:
    for node, amount in wanted.items():
        was = stage.free_on(node)
        if was != amount:
            yield f"free on {node}: expected {amount}, was {was}"


def _nodes(stage: Stage, wanted: Mapping[str, Mapping[str, Any]]) -> Iterable[str]:
    for node, words in wanted.items():
        status = next(iter(stage.inventory.nodes(node).nodes), None)
        if status is None:
            yield f"node {node} is not known"
            continue
        states = words.get("state", status.state.value)
        if status.state.value not in (states if isinstance(states, list) else [states]):
            yield f"node {node}: expected state {states}, was {status.state.value}"
        usable = sum(gpu.health is GpuHealthState.HEALTHY for gpu in status.description.gpus)
        if "usable_gpus" in words and usable != words["usable_gpus"]:
            yield f"node {node}: expected usable_gpus {words['usable_gpus']}, was {usable}"


# ------------------------------------------------------------------------------------------------------------- services
def _services(stage: Stage, wanted: Mapping[str, Mapping[str, Any]]) -> Iterable[str]:
    for name, words in wanted.items():
        was = stage.service(name)
        for word, value in words.items():
            number = was.get(word.removesuffix("_at_least").removesuffix("_at_most"))
            if word.endswith("_at_least"):
                holds = number is not None and number >= value
            elif word.endswith("_at_most"):
                holds = number is not None and number <= value
            elif word == "versions":
                holds = number == value
            else:
                holds = equal(number, value)
            if not holds:
                yield f"service {name}: expected {word} {value}, was {was}"


# ---------------------------------------------------------------------------------------------------------------- audit
def _audit(stage: Stage, wanted: Iterable[Mapping[str, Any]]) -> Iterable[str]:
    for words in wanted:
        job = words.get("job") or words.get("service")
        found = [
            entry
            for entry in stage.entries
            if entry.word == words["event"]
            and (job is None or stage.name_of(entry.job) == job)
            and ("node" not in words or entry.node == words["node"])
            and ("tenant" not in words or entry.tenant == words["tenant"])
            and ("by" not in words or words["by"] in (entry.by, stage.name_of(entry.by)))
            and ("reason" not in words or words["reason"] in entry.reasons)
        ]
        subject = {key: value for key, value in words.items() if key not in ("times", "at_least", "has")}
        if "times" in words and len(found) != words["times"]:
            yield f"audit {subject}: expected {words['times']} times, was {len(found)}{_near(stage, words)}"
        if "at_least" in words and len(found) < words["at_least"]:
            yield f"audit {subject}: expected at least {words['at_least']} times, was {len(found)}"
        if "times" not in words and "at_least" not in words and not found:
            yield f"audit {subject}: nothing of it is on record{_near(stage, words)}"
        for entry in found:
            lacking = [fact for fact in words.get("has", ()) if fact not in entry.facts]
            if lacking:
                yield f"audit {subject}: lacks {lacking}, has {sorted(entry.facts)}"


def _near(stage: Stage, words: Mapping[str, Any]) -> str:
    same = [e for e in stage.entries if e.word == words["event"]]
    return f"; of that kind: {[(stage.name_of(e.job), e.node, e.by, sorted(e.reasons)) for e in same]}" if same else ""


def _gapless(stage: Stage, wanted: bool) -> Iterable[str]:
    records = stage.platform.audit
    if [record.number for record in records] != list(range(1, len(records) + 1)):
        yield "audit: a number is missing"
    times = [record.recorded_at for record in records]
    if times != sorted(times):
        yield "audit: not in order of the platform's clock"


def _counts(stage: Stage, wanted: Mapping[str, Any]) -> Iterable[str]:
    jobs = stage.views.jobs.values()
    totals = {
        "preemptions": sum(job.preemptions for job in jobs),
        "notices": sum(job.notices for job in jobs),
        "trimmed_workers": sum(job.trimmed for job in jobs),
        "jobs": sum(1 for job in jobs if job.state is not JobState.REFUSED and not job.service),
    }
    for word, value in wanted.items():
        if word in totals:
            if totals[word] != value:
                yield f"count of {word}: expected {value}, was {totals[word]}"
            continue
        kind, at_most = word.removesuffix("_at_most"), word.endswith("_at_most")
        for name, number in value.items():
            was = _count(stage, kind, name)
            if was > number or (was != number and not at_most):
                yield f"count of {word} {name}: expected {number}, was {was}"


def _count(stage: Stage, kind: str, name: str) -> int:
    if kind == "starts":
        job = stage.job(name)
        if job is None:
            return 0
        return job.starts + sum(other.starts for other in stage.views.jobs.values() if other.service == job.id)
    if kind == "starts_on":
        return stage.starts_on.get(name, 0)
    job = stage.job(name)
    return sum(1 for e in stage.entries if e.word == "scaled" and job is not None and e.job == job.id)


# -------------------------------------------------------------------------------------------------------------- answers
def _answers(stage: Stage, wanted: Mapping[str, Mapping[str, Any]]) -> Iterable[str]:
    for label, words in wanted.items():
        answer = stage.answers.get(label)
        if answer is None:
            yield f"answer {label}: nothing was asked"
            continue
        for word, value in words.items():
            if not _answer_holds(stage, label, word, value):
                yield f"answer {label}: expected {word} {value}, was {answer}"


def _answer_holds(stage: Stage, label: str, word: str, value: Any) -> bool:
    answer = stage.answers[label]
    match word:
        case "outcome":
            either = ("forbidden", "not_found") if value == "forbidden_or_not_found" else (value,)
            return answer.outcome in [str(one) for one in either]
        case "field":
            return answer.field == str(value)
        case "reason":
            return str(value) in answer.reasons
        case "same_job_as":
            return answer.job != "" and answer.job == stage.answers[value].job
        case "other_job_than":
            return answer.job != stage.answers[value].job
        case "hides":
            return not any(hidden in answer.text for hidden in value)
        case "lists":
            return all(name in answer.lists for name in value)
        case "within":
            if answer.answered_at is None or answer.asked_at is None:
                return False
            return bool((answer.answered_at - answer.asked_at).total_seconds() <= seconds(value))
    return False


def _alerts(stage: Stage, wanted: Iterable[str]) -> Iterable[str]:
    for alert in wanted:
        if alert not in stage.alerts:
            yield f"alert {alert} was not raised; raised: {sorted(stage.alerts)}"


def _records_hide(stage: Stage, wanted: Iterable[str]) -> Iterable[str]:
    for record in stage.platform.audit:
        text = record.event.to_json().decode()
        for hidden in wanted:
            if hidden in text:
                yield f"record {record.number} shows {hidden}"
                return


def _readings(stage: Stage, wanted: Mapping[str, Mapping[str, Any]]) -> Iterable[str]:
    for name, words in wanted.items():
        found = stage.reading(name)
        was, since = found if found is not None else (None, None)
        if "gpu_util" in words and not equal(was, words["gpu_util"]):
            yield f"reading of {name}: expected gpu_util {words['gpu_util']}, was {was}"
        if "none_after" in words and since is not None and since > stage.scenario.moment(words["none_after"]):
            yield f"reading of {name}: expected none after {words['none_after']}, was {was} from {since}"


def _nothing(stage: Stage, wanted: object) -> Iterable[str]:
    """Metrics belong to the services; on the decisions alone there are none."""
    return ()


_CHECKS: Mapping[str, Callable[[Stage, Any], Iterable[str]]] = {
    "jobs": _jobs,
    "why": _whys,
    "answers": _answers,
    "usage": _usage,
    "borrowed": _borrowed,
    "usage_memory_gib": _usage_memory,
    "free": _free,
    "nodes": _nodes,
    "services": _services,
    "audit": _audit,
    "audit_gapless": _gapless,
    "counts": _counts,
    "metrics": _nothing,
    "alerts": _alerts,
    "records_hide": _records_hide,
    "readings": _readings,
}
