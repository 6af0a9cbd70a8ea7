"""What is wrong with a submission is said by field, value and remedy; all of it at once."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from berth.contracts.jobs import JobSpec
from services.gateway.policy_view import PolicyView
from services.gateway.problems import ApiError
from services.gateway.submissions import check_jobs, digest_of, read_submission, split_secrets

GOOD: dict[str, Any] = {"name": "train", "class": "training", "gpus": 1, "command": ["python", "train.py"]}
JSON = "application/json"
YAML = "application/yaml"


def specs_of(body: object, content_type: str = JSON) -> list[JobSpec]:
    raw = body if isinstance(body, bytes) else body.encode() if isinstance(body, str) else orjson.dumps(body)
    return check_jobs(read_submission(raw, content_type), tenant="vision")


def problem_of(body: object, content_type: str = JSON) -> Any:
    with pytest.raises(ApiError) as caught:
        specs_of(body, content_type)
    return caught.value.problem


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"gpus": -1}, "gpus", "too_small"),
    ({"gpus": 2.5}, "gpus", "not_whole"),
    ({"gpus": True}, "gpus", "not_whole"),
    ({"gpus": "8; true"}, "gpus", "not_whole"),
    ({"gpus": "8"}, "gpus", "not_a_number"),
    ({"gpus": 1_000_000_000}, "gpus", "too_large"),
    ({"gpus": None, "share": "NaN"}, "share", "not_a_number"),
    ({"gpus": None, "share": 1.5}, "share", "too_large"),
    ({"gpus": None, "share": -0.5}, "share", "too_small"),
    ({"gpus": None, "share": 0}, "share", "too_small"),
    ({"gpus": None, "memory_gib": "Infinity"}, "memory_gib", "not_a_number"),
    ({"gpus": None, "slice": "big"}, "slice", "not_a_name"),
    ({"share": 0.5}, "share", "invalid_value"),
    ({"workers": 0}, "workers", "too_small"),
    ({"workers": 1_000_000_000}, "workers", "too_large"),
    ({"min_workers": 5}, "min_workers", "invalid_value"),
    ({"priority": 2147483648}, "priority", "too_large"),
    ({"priority": -1}, "priority", "too_small"),
    ({"time_limit": "-5m"}, "time_limit", "invalid_value"),
    ({"time_limit": "soon"}, "time_limit", "invalid_value"),
    ({"time_limit": 0}, "time_limit", "too_small"),
    ({"time_limit": 1.5}, "time_limit", "not_whole"),
    ({"name": ""}, "name", "empty"),
    ({"name": "a\u0007b"}, "name", "invalid_value"),
    ({"name": "a\nb"}, "name", "invalid_value"),
    ({"name": " a"}, "name", "invalid_value"),
    ({"name": "a\u202eb"}, "name", "invalid_value"),
    ({"name": "x" * 257}, "name", "too_long"),
    ({"name": 7}, "name", "not_text"),
    ({"class": "batch"}, "class", "not_a_choice"),
    ({"class": None}, "class", "not_a_choice"),
    ({"command": []}, "command", "empty_command"),
    ({"command": [""]}, "command[0]", "empty_command"),
    ({"command": "python train.py"}, "command", "not_a_list"),
    ({"command": ["a\u0000b"]}, "command[0]", "invalid_value"),
    ({"env": {"A B": "x"}}, "env.A B", "not_a_name"),
    ({"env": {"PORT": 8080}}, "env.PORT", "not_text"),
    ({"env": {"BERTH_JOB_ID": "x"}}, "env.BERTH_JOB_ID", "reserved_name"),
    ({"secret_env": ["KEY"]}, "secret_env[0]", "missing_value"),
    ({"types": ["A100-80G", "A100-80G"]}, "types", "invalid_value"),
    ({"types": ["../x"]}, "types[0]", "not_a_name"),
    ({"gang": "perhaps"}, "gang", "not_a_truth_value"),
    ({"gpu": 8}, "gpu", "unknown_field"),
    ({"roles": [{"name": "a", "gpus": 1, "gpu": 2}], "gpus": None}, "roles[0].gpu", "unknown_field"),
    ({"service": {"min": 3, "max": 2}}, "service.max", "invalid_value"),
    ({"labels": {"team": "a\tb"}}, "labels.team", "invalid_value"),
    ({"within_mode": "maybe"}, "within_mode", "not_a_choice"),
]


@pytest.mark.parametrize(("change", "field", "code"), BAD, ids=[f"{f} {c}" for _, f, c in BAD])
def test_a_bad_value_is_refused_by_field_with_a_remedy(change: dict[str, Any], field: str, code: str) -> None:
    body = {key: value for key, value in (GOOD | change).items() if not (key == "gpus" and value is None)}
    problem = problem_of(body)
    assert (problem.status, problem.field, problem.code) == (422, field, code)
    assert problem.remedy
    assert problem.detail.startswith(field)


def test_a_misspelt_field_gets_a_suggestion() -> None:
    assert problem_of(GOOD | {"gpu": 8}).remedy == "did you mean gpus?"
    assert problem_of({"name": "a", "class": "general", "comand": ["x"]}).remedy == "did you mean command?"


def test_every_fault_is_listed_at_once() -> None:
    problem = problem_of({"name": "", "class": "x", "gpus": -1})
    assert [error["field"] for error in problem.errors] == ["name", "class", "gpus", "command"]


@pytest.mark.parametrize("field", ["name", "class", "command"])
def test_a_missing_field_is_named(field: str) -> None:
    problem = problem_of({key: value for key, value in GOOD.items() if key != field})
    assert problem.field == field


@pytest.mark.parametrize(
    ("body", "content_type", "status", "code", "place"),
    [
        ("", JSON, 400, "empty_body", None),
        ("   ", YAML, 400, "empty_body", None),
        ("# only a comment", YAML, 400, "empty_body", None),
        ("{", JSON, 400, "malformed_json", (1, 2)),
        ('{"name": "a",\n "gpus": }', JSON, 400, "malformed_json", (2, 10)),
        ("name: a\n  class: b", YAML, 400, "malformed_yaml", (2, 8)),
        ("name: [a", YAML, 400, "malformed_yaml", (2, 1)),
        ("\tname: a", YAML, 400, "malformed_yaml", (1, 1)),
        ("name: a\x07", YAML, 400, "malformed_yaml", (1, 8)),
        (b"\xff\xfe", JSON, 400, "not_utf8", None),
        (b"\xff\xfe", YAML, 400, "not_utf8", None),
        ('{"gpus": NaN}', JSON, 422, "not_finite", None),
        ('{"gpus": -Infinity}', JSON, 422, "not_finite", None),
        ('{"gpus": ' + "9" * 5000 + "}", JSON, 422, "number_too_long", None),
        ("gpus: " + "9" * 5000, YAML, 422, "number_too_long", (1, 7)),
        ('{"name": "a", "name": "b"}', JSON, 422, "duplicate_key", None),
        ("name: a\nname: b", YAML, 422, "duplicate_key", (2, 1)),
        ("a: &x [1]\nb: *x", YAML, 422, "alias_refused", (2, 4)),
        ("a: &a [*a]", YAML, 422, "alias_refused", (1, 8)),
        ("name: !!python/object/apply:os.system [x]", YAML, 422, "tag_refused", (1, 7)),
        ("[" * 100_000, JSON, 422, "nested_too_deeply", None),
        ('{"a":' * 40 + "1" + "}" * 40, JSON, 422, "nested_too_deeply", None),
        ("[" * 40, YAML, 422, "nested_too_deeply", (1, 33)),
        ("[1]", JSON, 422, "not_a_mapping", None),
        ('"job"', JSON, 422, "not_a_mapping", None),
        ("null", JSON, 422, "not_a_mapping", None),
        ('{"jobs": []}', JSON, 422, "not_a_list", None),
        ('{"jobs": {}}', JSON, 422, "not_a_list", None),
        ('{"jobs": [1]}', JSON, 422, "not_a_mapping", None),
        ('{"jobs": [{}], "name": "x"}', JSON, 422, "unknown_field", None),
        ("name=a", "application/x-www-form-urlencoded", 415, "unsupported_media_type", None),
        ("{}", "", 415, "unsupported_media_type", None),
    ],
)
def test_an_unreadable_body_says_where(
    body: str | bytes, content_type: str, status: int, code: str, place: tuple[int, int] | None
) -> None:
    problem = problem_of(body, content_type)
    assert (problem.status, problem.code) == (status, code)
    assert problem.remedy
    if place is not None:
        assert (problem.errors[0]["line"], problem.errors[0]["column"]) == place


def test_yaml_faults_name_the_line_of_the_field() -> None:
    problem = problem_of("name: a\nclass: general\ncommand: [x]\ngpus: -1\n", YAML)
    assert (problem.field, problem.errors[0]["line"]) == ("gpus", 4)


def test_faults_of_a_batch_name_the_job() -> None:
    problem = problem_of({"jobs": [GOOD, GOOD | {"gpus": -1}]})
    assert problem.field == "jobs[1].gpus"


def test_several_yaml_documents_are_a_batch() -> None:
    text = "name: a\nclass: general\ncommand: [x]\n---\nname: b\nclass: general\ncommand: [x]\n"
    assert [spec.name for spec in specs_of(text, YAML)] == ["a", "b"]


def test_a_batch_above_the_limit_is_refused() -> None:
    with pytest.raises(ApiError) as caught:
        read_submission(orjson.dumps({"jobs": [GOOD] * 4}), JSON, max_batch=3)
    assert (caught.value.problem.field, caught.value.problem.value) == ("jobs", "4")


@pytest.mark.parametrize("name", ["训练-分类-é-🚀", "تدريب", "e\u0301", "\u00e9", "ＡＢＣ", "a/b c", "😀" * 50])
def test_names_in_any_script_stay_as_they_are(name: str) -> None:
    assert specs_of(GOOD | {"name": name})[0].name == name
    assert specs_of(f"name: '{name}'\nclass: general\ncommand: [x]", YAML)[0].name == name


def test_yaml_words_stay_words() -> None:
    text = "name: no\nclass: general\ncommand: [x]\nenv: {A: 'yes', B: \"012\", C: off, D: 1:30}\ntypes: [A100-80G]"
    [spec] = specs_of(text, YAML)
    assert (spec.name, spec.env) == ("no", {"A": "yes", "B": "012", "C": "off", "D": "1:30"})


def test_half_a_surrogate_pair_is_refused() -> None:
    for body in ('{"name": "a\\ud800", "class": "general", "command": ["x"]}',):
        assert problem_of(body).code == "not_unicode"
    body = '{"name": "a", "class": "general", "command": ["x"], "env": {"A": "\\ud800"}}'
    assert problem_of(body).field == "env.A"


def test_environment_values_are_never_shown() -> None:
    secret = "s3cr3t-Zq9"
    bodies = [
        GOOD | {"env": {"KEY": f"{secret}\u0000"}},
        GOOD | {"env": {"BAD NAME": secret}},
        GOOD | {"envs": {"KEY": secret}},
        GOOD | {"api_key": secret},
        {"jobs": [GOOD | {"env": {"KEY": f"{secret}\u0000"}}]},
        GOOD | {"env": [secret]},
        GOOD | {"env": secret},
        GOOD | {"gpus": 1, "share": 0.5, "env": {"KEY": secret}},
    ]
    for body in bodies:
        assert secret not in problem_of(body).model_dump_json()


def test_the_tenant_is_the_askers_own_unless_named() -> None:
    assert specs_of(GOOD)[0].tenant == "vision"
    assert specs_of(GOOD | {"tenant": "nlp"})[0].tenant == "nlp"


def test_a_service_and_roles_need_no_common_command() -> None:
    service = {"name": "s", "class": "inference", "gpus": 1, "service": {"min": 1, "max": 2}}
    assert specs_of(service)[0].service is not None
    roles = {"name": "r", "class": "training", "roles": [{"name": "a", "command": ["x"]}, {"name": "b"}]}
    assert problem_of(roles).field == "roles[1].command"


def test_secrets_are_split_off() -> None:
    [spec] = specs_of(GOOD | {"env": {"KEY": "s3", "MODE": "fast"}, "secret_env": ["KEY"]})
    public, secrets = split_secrets(spec)
    assert (public.env, public.secret_env, secrets) == ({"MODE": "fast"}, ("KEY",), {"KEY": "s3"})


def test_equal_content_has_one_digest_however_it_is_written() -> None:
    one = specs_of(GOOD | {"time_limit": "1h"})
    same = specs_of("command: [python, train.py]\ntime_limit: 3600\ngpus: 1\nclass: training\nname: train", YAML)
    other = specs_of(GOOD | {"time_limit": "2h"})
    assert digest_of(one, salt="k") == digest_of(same, salt="k")
    assert digest_of(one, salt="k") != digest_of(other, salt="k")
    assert digest_of(one, salt="k") != digest_of(one, salt="other")


POLICY = {
    "tenants": {"vision": {}},
    "card_types": {"A100-80G": {}},
    "defaults": {"limits": {"gpus_per_job": 64, "workers_per_job": 8, "priority_max": 1000, "name_length": 10}},
    "classes": {"interactive": {"limits": {"gpus_per_job": 1}}},
}


@pytest.mark.parametrize(
    ("change", "field", "code"),
    [
        ({"tenant": "nobody"}, "tenant", "unknown_tenant"),
        ({"types": ["X1"]}, "types", "unknown_card_type"),
        ({"gpus": 65}, "gpus", "over_limit"),
        ({"gpus": 16, "workers": 5}, "gpus", "over_limit"),
        ({"workers": 9}, "workers", "over_limit"),
        ({"priority": 1001}, "priority", "over_limit"),
        ({"name": "x" * 11}, "name", "over_limit"),
        ({"class": "interactive", "gpus": 2}, "gpus", "over_limit"),
    ],
)
def test_the_policy_bounds_what_may_be_asked(change: dict[str, Any], field: str, code: str) -> None:
    view = PolicyView.from_document(1, POLICY, frozenset())
    [fault, *_] = view.faults(specs_of(GOOD | change)[0])
    assert (fault.path[0], fault.code) == (field, code)
    assert fault.remedy


def test_limits_may_be_reached_exactly() -> None:
    view = PolicyView.from_document(1, POLICY, frozenset())
    job = GOOD | {"gpus": 8, "workers": 8, "priority": 1000, "name": "x" * 10, "types": ["A100-80G"]}
    assert view.faults(specs_of(job)[0]) == []


def test_card_types_of_the_nodes_count_where_the_policy_lists_none() -> None:
    view = PolicyView.from_document(1, {"tenants": {"vision": {}}}, frozenset({"H100-80G"}))
    assert view.faults(specs_of(GOOD | {"types": ["H100-80G"]})[0]) == []
    assert view.faults(specs_of(GOOD | {"types": ["X1"]})[0])[0].code == "unknown_card_type"


def test_nothing_is_judged_without_a_policy() -> None:
    assert PolicyView().faults(specs_of(GOOD | {"types": ["X1"]})[0]) == []
