"""Reads what people write: YAML or JSON, strictly, and remembers where each value stood.

YAML here is what its 1.2 core schema says and no more: only `true` and `false` are truth values (`no` stays text),
`1:30` is text and not 90, no aliases (a few lines of them unfold into gigabytes), no tags, no key twice. Built from
parser events with a stack of its own, so neither depth nor size can overrun Python's. JSON: no key twice, no NaN.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

Place = tuple[str | int, ...]
Mark = tuple[int, int]

MAX_DEPTH: Final = 32
MAX_DIGITS: Final = 40

_INT: Final = re.compile(r"[-+]?[0-9]+\Z")
_RADIX: Final = re.compile(r"0o[0-7]+\Z|0x[0-9a-fA-F]+\Z")
_FLOAT: Final = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?\Z")
_INF: Final = re.compile(r"[-+]?\.(inf|Inf|INF)\Z")
_NAN: Final = re.compile(r"\.(nan|NaN|NAN)\Z")
_CONSTANTS: Final = {
    "": None,
    "~": None,
    "null": None,
    "Null": None,
    "NULL": None,
    "true": True,
    "True": True,
    "TRUE": True,
    "false": False,
    "False": False,
    "FALSE": False,
}
_PLAIN_TAGS: Final = {"tag:yaml.org,2002:str", "!"}
_UNPRINTABLE: Final = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x84\x86-\x9f\ufffe\uffff]")


class DocumentError(ValueError):
    """The text cannot be read; the author must mend it.

    code: stable. line, column: from 1, where known. field: path of the value concerned, where known.
    """

    def __init__(
        self, code: str, detail: str, *, remedy: str, mark: Mark | None = None, field: str | None = None
    ) -> None:
        super().__init__(detail if mark is None else f"line {mark[0]}, column {mark[1]}: {detail}")
        self.code = code
        self.detail = str(self)
        self.remedy = remedy
        self.line: int | None = mark[0] if mark else None
        self.column: int | None = mark[1] if mark else None
        self.field = field


@dataclass(frozen=True, slots=True)
class Document:
    """One value and where its parts stood (line and column from 1); JSON has no marks."""

    value: Any
    marks: dict[Place, Mark] = field(default_factory=dict)

    def mark_of(self, path: Place) -> Mark | None:
        """Where a path stood, or the closest enclosing one that is known."""
        while path and path not in self.marks:
            path = path[:-1]
        return self.marks.get(path)


def path_text(path: Place) -> str:
    """A path as the author would write it: `roles[0].gpus`."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += f".{part}" if text else part
    return text


def read_json(text: str | bytes) -> Document:
    """The value of a JSON text.

    Raises:
        DocumentError: malformed, a key twice, NaN or Infinity, nested deeper than `MAX_DEPTH`.
    """

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(items)
        if len(found) != len(items):
            seen: set[str] = set()
            for key, _ in items:
                if key in seen:
                    raise DocumentError(
                        "duplicate_key", f"the key {key!r} stands twice", field=key, remedy="keep one of them"
                    )
                seen.add(key)
        return found

    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8-sig")
        value = json.loads(text, object_pairs_hook=pairs, parse_constant=float)
    except json.JSONDecodeError as fault:
        raise DocumentError(
            "malformed_json",
            f"not JSON: {fault.msg.lower()}",
            mark=(fault.lineno, fault.colno),
            remedy="mend the JSON there, or send YAML with Content-Type: application/yaml",
        ) from None
    except UnicodeDecodeError as fault:
        raise _not_utf8(fault) from None
    except RecursionError:
        raise _too_deep(None) from None
    except DocumentError:
        raise
    except ValueError:  # int() refuses thousands of digits
        raise _too_long(None) from None
    _check_depth(value)
    _check_finite(value, {})
    return Document(value)


def read_yaml(text: str | bytes) -> list[Document]:
    """The documents of a YAML text, empty ones left out.

    Raises:
        DocumentError: malformed (with line and column), an alias, a tag, a key twice, or nested too deeply.
    """
    import yaml

    try:
        if isinstance(text, bytes):
            text = text.decode()
    except UnicodeDecodeError as fault:
        raise _not_utf8(fault) from None
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    unprintable = _UNPRINTABLE.search(text)  # the C parser names no place
    if unprintable is not None:
        line = text.count("\n", 0, unprintable.start()) + 1
        column = unprintable.start() - text.rfind("\n", 0, unprintable.start())
        raise DocumentError(
            "malformed_yaml",
            f"the character U+{ord(unprintable.group()):04X} may not stand in YAML",
            mark=(line, column),
            remedy="remove it",
        )
    try:
        found: list[Document] = _build(yaml.parse(text, Loader=loader))
    except yaml.MarkedYAMLError as fault:
        at = fault.problem_mark or fault.context_mark
        what = " ".join(part for part in (fault.context, fault.problem) if part)
        raise DocumentError(
            "malformed_yaml",
            f"not YAML: {what}",
            mark=(at.line + 1, at.column + 1) if at else None,
            remedy="mend the text there; look at indentation, colons and quotes",
        ) from None
    except (yaml.YAMLError, UnicodeError) as fault:
        raise DocumentError(
            "malformed_yaml", f"not YAML: {fault}".splitlines()[0], remedy="send UTF-8 text in YAML"
        ) from None
    for document in found:
        _check_finite(document.value, document.marks)
    return found


def read_jobs(path: Path | None, *, text: str | bytes | None = None) -> list[dict[str, Any]]:
    """The jobs in a file: one, several YAML documents, or a list under `jobs`. `.json` is read as JSON.

    A relative `workdir` means a folder beside the file.

    Raises:
        DocumentError: it cannot be read, or holds no mapping.
    """
    body = path.read_bytes() if text is None and path is not None else (text or b"")
    is_json = path is not None and path.suffix == ".json"
    found = [read_json(body)] if is_json else read_yaml(body)
    jobs: list[dict[str, Any]] = []
    for document in found:
        value = document.value
        entries = value["jobs"] if isinstance(value, dict) and set(value) == {"jobs"} else [value]
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            raise DocumentError("not_a_mapping", "a job is a mapping of names to values", remedy="write name: value")
        jobs += entries
    if not jobs:
        raise DocumentError("empty_body", "there is no job in it", remedy="write a job, see examples/jobs")
    folder = Path.cwd() if path is None else path.absolute().parent
    for job in jobs:
        workdir = job.get("workdir")
        if isinstance(workdir, str) and workdir and not Path(workdir).is_absolute():
            job["workdir"] = str((folder / workdir).resolve())
    return jobs


def _build(events: Any) -> list[Document]:  # noqa: PLR0915 - one branch for each parser event
    import yaml

    documents: list[Document] = []
    stack: list[_Open] = []
    marks: dict[Place, Mark] = {}
    root: list[Any] = []

    def put(value: Any, mark: Mark, *, scalar_key: str | None) -> None:
        if not stack:
            marks[()] = mark
            root.append(value)
            return
        top = stack[-1]
        if isinstance(top.value, list):
            marks[(*top.path, len(top.value))] = mark
            top.value.append(value)
        elif top.key is None:
            if scalar_key is None:
                raise DocumentError("malformed_yaml", "a key must be text", mark=mark, remedy="write a plain key")
            if scalar_key in top.value:
                raise DocumentError(
                    "duplicate_key",
                    f"the key {scalar_key!r} stands twice",
                    mark=mark,
                    field=path_text((*top.path, scalar_key)),
                    remedy="keep one of them",
                )
            top.key = scalar_key
            marks[(*top.path, scalar_key)] = mark
        else:
            top.value[top.key] = value
            top.key = None

    def path_here() -> Place:
        if not stack:
            return ()
        top = stack[-1]
        return (*top.path, len(top.value)) if isinstance(top.value, list) else (*top.path, top.key or "")

    for event in events:
        mark = (event.start_mark.line + 1, event.start_mark.column + 1)
        if isinstance(event, yaml.AliasEvent):
            raise DocumentError(
                "alias_refused", f"the alias *{event.anchor} is not accepted", mark=mark, remedy="write the value out"
            )
        if isinstance(event, yaml.ScalarEvent):
            if event.tag is not None and event.tag not in _PLAIN_TAGS:
                raise _tag(event.tag, mark)
            is_plain = bool(event.implicit[0])
            is_key = bool(stack) and isinstance(stack[-1].value, dict) and stack[-1].key is None
            value = event.value if is_key or not is_plain else _scalar(event.value, mark)
            put(value, mark, scalar_key=event.value)
        elif isinstance(event, (yaml.SequenceStartEvent, yaml.MappingStartEvent)):
            if event.tag is not None:
                raise _tag(event.tag, mark)
            if len(stack) >= MAX_DEPTH:
                raise _too_deep(mark)
            opened = _Open([] if isinstance(event, yaml.SequenceStartEvent) else {}, path_here(), mark)
            if stack and isinstance(stack[-1].value, dict) and stack[-1].key is None:
                put(opened.value, mark, scalar_key=None)
            stack.append(opened)
        elif isinstance(event, (yaml.SequenceEndEvent, yaml.MappingEndEvent)):
            closed = stack.pop()
            put(closed.value, marks.get(closed.path, closed.mark), scalar_key=None)
        elif isinstance(event, yaml.DocumentEndEvent):
            if root and root[0] is not None:
                documents.append(Document(root[0], marks))
            root, marks = [], {}
    return documents


@dataclass(slots=True)
class _Open:
    """A mapping or sequence that is being read."""

    value: Any
    path: Place
    mark: Mark
    key: str | None = None


def _scalar(text: str, mark: Mark) -> Any:
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    if _INT.match(text) or _RADIX.match(text):
        if len(text) > MAX_DIGITS:
            raise _too_long(mark)
        return int(text, 0) if text[:2] in {"0o", "0x"} else int(text)
    if _FLOAT.match(text):
        return float(text)
    if _INF.match(text):
        return float("-inf") if text.startswith("-") else float("inf")
    if _NAN.match(text):
        return float("nan")
    return text


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [
            child
            for item in level
            if isinstance(item, (dict, list))
            for child in (item.values() if isinstance(item, dict) else item)
            if isinstance(child, (dict, list))
        ]
        if not level:
            return
    raise _too_deep(None)


def _check_finite(value: Any, marks: dict[Place, Mark]) -> None:
    """Refuse NaN and infinity wherever they stand: no field takes them, and JSON could not carry them on."""
    waiting: list[tuple[Place, Any]] = [((), value)]
    while waiting:
        path, item = waiting.pop()
        if isinstance(item, dict):
            waiting += [((*path, key), child) for key, child in item.items()]
        elif isinstance(item, list):
            waiting += [((*path, index), child) for index, child in enumerate(item)]
        elif isinstance(item, float) and not math.isfinite(item):
            field = path_text(path)
            detail = f"{field or 'the value'} is {item}, which is no finite number"
            raise DocumentError(
                "not_finite", detail, mark=marks.get(path), field=field or None, remedy="write a finite number"
            )


def _too_deep(mark: Mark | None) -> DocumentError:
    return DocumentError("nested_too_deeply", f"nested deeper than {MAX_DEPTH} levels", mark=mark, remedy="flatten it")


def _too_long(mark: Mark | None) -> DocumentError:
    return DocumentError(
        "number_too_long", f"a number of more than {MAX_DIGITS} digits", mark=mark, remedy="write a smaller number"
    )


def _tag(tag: str, mark: Mark) -> DocumentError:
    return DocumentError("tag_refused", f"the tag {tag} is not accepted", mark=mark, remedy="remove the tag")


def _not_utf8(fault: UnicodeDecodeError) -> DocumentError:
    return DocumentError("not_utf8", f"byte {fault.start} is not UTF-8", remedy="save and send the text as UTF-8")
