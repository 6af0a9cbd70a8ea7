"""Every "no" of the API as an RFC 9457 problem document: stable code, field as the user wrote it, value, remedy.

ApiError                what a route raises; becomes one `application/problem+json` answer
  invalid(faults)       422, one or more faults of the body
  refused(code, ...)    everything else
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pydantic import ValidationError

from berth.client.documents import Document, DocumentError, Place, path_text
from berth.contracts.api import Problem
from berth.contracts.jobs import JobSpec, Role, ServiceSpec

MEDIA_TYPE: Final = "application/problem+json"
MAX_VALUE_CHARS: Final = 80
MAX_FAULTS: Final = 50

TITLES: Final[Mapping[str, tuple[int, str]]] = {
    "invalid": (422, "The request does not make sense"),
    "malformed_json": (400, "The body is not JSON"),
    "malformed_yaml": (400, "The body is not YAML"),
    "not_utf8": (400, "The body is not UTF-8"),
    "duplicate_key": (422, "A key stands twice"),
    "alias_refused": (422, "YAML aliases are not accepted"),
    "tag_refused": (422, "YAML tags are not accepted"),
    "nested_too_deeply": (422, "The body is nested too deeply"),
    "number_too_long": (422, "A number is too long"),
    "not_finite": (422, "A number is not finite"),
    "empty_body": (400, "The body is empty"),
    "body_too_large": (413, "The body is too large"),
    "unsupported_media_type": (415, "The media type is not accepted"),
    "unauthenticated": (401, "No valid token"),
    "forbidden": (403, "This token may not do that"),
    "not_found": (404, "There is no such thing"),
    "ambiguous_name": (409, "Several jobs have this name"),
    "idempotency_conflict": (409, "The idempotency key stands for another submission"),
    "out_of_order": (409, "An earlier message comes first"),
    "method_not_allowed": (405, "The method is not allowed here"),
    "policy_rejected": (422, "The policy document was rejected"),
    "stale": (409, "Somebody else changed it meanwhile"),
    "service_unavailable": (503, "A part of the platform does not answer"),
    "store_unavailable": (503, "The database does not answer"),
    "too_many_requests": (429, "Too many requests"),
    "internal": (500, "Something broke here"),
}


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong with a body. `path` is where, as the user wrote it; empty: the whole."""

    code: str
    path: Place
    detail: str
    remedy: str
    value: str | None = None

    def below(self, prefix: Place) -> Fault:
        """The same fault seen from an enclosing value."""
        return Fault(self.code, (*prefix, *self.path), self.detail, self.remedy, self.value)


class ApiError(Exception):
    """A request is answered with this problem and nothing else happens."""

    def __init__(self, problem: Problem, *, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(f"{problem.status} {problem.code} {problem.field or ''} {problem.detail}")
        self.problem = problem
        self.headers = dict(headers or {})


def refused(
    code: str,
    detail: str,
    *,
    remedy: str,
    field: str | None = None,
    value: object = None,
    status: int | None = None,
    headers: Mapping[str, str] | None = None,
    errors: Sequence[Mapping[str, Any]] = (),
) -> ApiError:
    """A problem with one of the codes in `TITLES`."""
    default_status, title = TITLES.get(code, TITLES["invalid"])
    return ApiError(
        Problem(
            title=title,
            status=status or default_status,
            detail=detail,
            code=code,
            field=field,
            value=None if value is None else shown(value),
            remedy=remedy,
            errors=tuple(dict(error) for error in errors),
        ),
        headers=headers,
    )


def invalid(faults: Sequence[Fault], document: Document | None = None) -> ApiError:
    """One problem for all faults of a body; the first one stands in front."""
    first = faults[0]
    listed = []
    for fault in faults[:MAX_FAULTS]:
        entry: dict[str, Any] = {
            "code": fault.code,
            "field": path_text(fault.path) or None,
            "detail": fault.detail,
            "value": fault.value,
            "remedy": fault.remedy,
        }
        mark = document.mark_of(fault.path) if document is not None and document.marks else None
        if mark is not None:
            entry["line"], entry["column"] = mark
        listed.append(entry)
    field = path_text(first.path) or None
    more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
    return ApiError(
        Problem(
            title=TITLES["invalid"][1],
            status=422,
            detail=f"{field}: {first.detail}{more}" if field else f"{first.detail}{more}",
            code=first.code,
            field=field,
            value=first.value,
            remedy=first.remedy,
            errors=tuple(listed),
        )
    )


def unreadable(fault: DocumentError) -> ApiError:
    """The problem for a text that could not be read."""
    where = {"line": fault.line, "column": fault.column} if fault.line else {}
    return refused(
        fault.code,
        fault.detail,
        remedy=fault.remedy,
        field=fault.field,
        errors=[{"code": fault.code, "field": fault.field, "detail": fault.detail, "remedy": fault.remedy, **where}],
    )


def shown(value: object) -> str | None:
    """A value as it may stand in an answer: short, and scalars only, because structures may hold secrets."""
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, (list, tuple, set)):
        return "a list"
    if isinstance(value, bool) or value is None:
        return json.dumps(value)
    if isinstance(value, int) and value.bit_length() > 256:
        return "a number of very many digits"
    text = value if isinstance(value, str) else str(value)
    text = "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in text[: MAX_VALUE_CHARS + 1])
    return text if len(text) <= MAX_VALUE_CHARS else text[:MAX_VALUE_CHARS] + "…"


# --------------------------------------------------------------------------------------- from pydantic to plain words
def faults_of(error: ValidationError, body: object = None) -> list[Fault]:
    """What pydantic found, one fault each, in plain words, in the order of the fields."""
    return [_fault(dict(entry), body) for entry in error.errors(include_url=False)]


def _fault(entry: dict[str, Any], body: object) -> Fault:
    kind = str(entry["type"])
    path = tuple(part for part in entry["loc"] if part != "[key]")
    value = entry.get("input")
    ctx = entry.get("ctx") or {}
    if kind == "value_error":
        detail, remedy = _own_words(str(ctx.get("error", entry["msg"])))
        if not path or isinstance(value, Mapping):
            path, value = (*path, *_subject_of(detail, value)), None
        return Fault("invalid_value", path, detail, remedy, _value(path, value))
    if kind == "extra_forbidden":
        return Fault("unknown_field", path, "is not a known field", _suggest(path, body), None)
    if kind == "missing":
        return Fault("missing_field", path, "is missing", f"add {path_text(path)}", None)
    code, detail, remedy = _plain(kind, ctx, value, path)
    return Fault(code, path, detail, remedy, _value(path, value))


def _plain(kind: str, ctx: Mapping[str, Any], value: object, path: Place) -> tuple[str, str, str]:  # noqa: PLR0912
    name = path[-1] if path else "it"
    if kind in {"int_type", "int_parsing", "int_from_float"}:
        if isinstance(value, float) and math.isfinite(value):
            near = max(0, math.floor(value))
            return "not_whole", "must be a whole number", f"write {near} or {near + 1}"
        if isinstance(value, str) and value.strip().isdigit() and len(value) < 20:
            return "not_a_number", "must be a number, not text", f"write {value.strip()} without quotes"
        return "not_whole", "must be a whole number", f"write a whole number, for example {name}: 1"
    if kind in {"float_type", "float_parsing"}:
        return "not_a_number", "must be a number", "write a finite number without quotes, for example 0.5"
    if kind == "finite_number":
        return "not_finite", "must be a finite number", "write a finite number, for example 0.5"
    if kind in {"greater_than_equal", "greater_than"}:
        least, word = (ctx["ge"], "at least") if "ge" in ctx else (ctx["gt"], "above")
        return "too_small", f"must be {word} {least}", f"raise {name} to {word} {least}"
    if kind in {"less_than_equal", "less_than"}:
        most = ctx.get("le", ctx.get("lt"))
        return "too_large", f"must be at most {most}", f"lower {name} to at most {most}"
    if kind in {"bool_parsing", "bool_type"}:
        return "not_a_truth_value", "must be true or false", "write true or false"
    if kind in {"enum", "literal_error"}:
        return "not_a_choice", f"must be {ctx.get('expected', 'one of the known words')}", f"use {ctx.get('expected')}"
    if kind == "string_type":
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return "not_text", "must be text", "put it in quotes"
        return "not_text", "must be text", "write text" if value is not None else f"give {name} a value or leave it out"
    if kind == "string_too_short":
        return "empty", "must not be empty", f"give {name} at least {ctx.get('min_length', 1)} character"
    if kind in {"string_too_long", "too_long"}:
        most = ctx.get("max_length")
        return "too_long", f"must have at most {most} characters or entries", f"shorten {name}"
    if kind == "string_unicode":
        return "not_unicode", "holds half of a surrogate pair", "send well-formed Unicode text"
    if kind == "string_pattern_mismatch":
        return "not_a_name", f"must match {ctx.get('pattern')}", "use only the characters that the pattern allows"
    if kind in {"tuple_type", "list_type", "set_type"}:
        if name == "command":
            return "not_a_list", "must be a list of words", 'write a list, for example ["python", "train.py"]'
        return "not_a_list", "must be a list", "write a list, for example [first, second]"
    if kind in {"dict_type", "model_type", "mapping_type", "model_attributes_type"}:
        return "not_a_mapping", "must be a mapping of names to values", "write name: value pairs"
    return "invalid_value", str(ctx.get("error", kind)).replace("_", " "), "see GET /openapi.json for what is accepted"


def _own_words(message: str) -> tuple[str, str]:
    """Validators of ours say `what is wrong; what to do`."""
    detail, _, remedy = message.partition("; ")
    return detail, remedy or "correct it"


def _subject_of(detail: str, value: object) -> Place:
    """Which field a fault of the whole is about: the last of the names that the message begins with."""
    if detail.startswith("two roles"):
        return ("roles",)
    words = detail.replace(",", " ").split()
    names = [word for word in words if isinstance(value, Mapping) and word in value]
    if "exclude" in words and names:
        return (names[-1],)
    return (names[0],) if names else ()


def _value(path: Place, value: object) -> str | None:
    """Values of environment variables are never shown: any of them may be a secret."""
    if path and path[0] in {"env", "jobs"} and "env" in path:
        return None
    return None if value is None else shown(value)


_MODELS: Final[Mapping[str, Any]] = {"": JobSpec, "roles": Role, "service": ServiceSpec}


def _suggest(path: Place, body: object) -> str:
    parent = next((str(part) for part in reversed(path[:-1]) if isinstance(part, str)), "")
    model = _MODELS.get("" if parent == "jobs" else parent)
    known = _fields(model) if model is not None else []
    near = difflib.get_close_matches(str(path[-1]), known, n=1)
    if near:
        return f"did you mean {near[0]}?"
    return "remove it" + (f"; known are {', '.join(sorted(known))}" if known else "")


def _fields(model: Any) -> list[str]:
    fields: Mapping[str, Any] = model.model_fields
    return [field.alias or name for name, field in fields.items()]


def problem_schema_responses(codes: Iterable[int]) -> dict[int | str, dict[str, Any]]:
    """OpenAPI entries for the problem answers of a route."""
    titles: dict[int, list[str]] = {}
    for code, (status, _) in TITLES.items():
        titles.setdefault(status, []).append(code)
    return {
        status: {
            "description": "problem: " + ", ".join(titles.get(status, ["invalid"])),
            "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
        }
        for status in codes
    }
