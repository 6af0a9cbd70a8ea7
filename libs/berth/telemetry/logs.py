"""Structured logs: one JSON object per line, on standard error.

Our own loggers write directly (about 5 us a line); the standard library's records pass through the same writer, so a
log file is one format. What looks like a secret is never written: fields are judged by their name, and passwords in
addresses, authorization headers and bus seeds inside texts are masked.
"""

import logging
import os
import re
import sys
import traceback
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Final

import orjson

from berth.telemetry.traceparent import trace_id_of

REDACTED: Final = "[redacted]"

_SECRET_NAME: Final = re.compile(
    r"pass(word|wd|phrase)|secret|token|authorization|cookie|credential|dsn|nkey|jwt|bearer|seed|(api|private|signing|access)_?key",
    re.IGNORECASE,
)
# Words of the domain that only look like secrets.
_HARMLESS_NAMES: Final = frozenset(
    {"fencing_token", "tokens_per_second", "credentials_file", "token_file", "seed_number"}
)
_SECRET_IN_TEXT: Final = re.compile(rb"(://[^/@\s:\"]*:)[^@\s\"]+(@)|([Bb]earer )[\w.~+/=-]{8,}|\bS[UAO][A-Z2-7]{56}\b")
_LEVELS: Final = {"debug": 10, "info": 20, "warning": 30, "error": 40, "critical": 50}
_OPTIONS: Final = orjson.OPT_APPEND_NEWLINE | orjson.OPT_NON_STR_KEYS | orjson.OPT_UTC_Z | orjson.OPT_SERIALIZE_NUMPY

# Keyword arguments for uvicorn.Config: our lines instead of its own, none per request.
UVICORN_LOGGING: Final[dict[str, Any]] = {"log_config": None, "access_log": False}

Sink = Callable[[bytes], object]


def _to_stderr(line: bytes) -> None:
    # One write per line: lines of several processes sharing a file do not mix, and none is lost in a buffer at SIGKILL.
    try:
        os.write(sys.__stderr__.fileno() if sys.__stderr__ is not None else 2, line)
    except OSError:
        pass  # nowhere left to say it


class _Output:
    """Where this process logs to, and from which level; one per process."""

    def __init__(self) -> None:
        self.service = "berth"
        self.level = logging.INFO
        self.sink: Sink = _to_stderr


_output: Final = _Output()
_name_verdicts: dict[str, bool] = {}


def configure_logging(service: str, level: str = "info", *, sink: Sink | None = None) -> None:
    """Name this process's logs, set the level and take over the standard library's logging.

    Args:
        service: shown on every line.
        level: `debug`, `info`, `warning` or `error`.
        sink: takes finished lines instead of standard error (tests).
    """
    _output.service = service
    _output.level = _LEVELS[level.lower()]
    _output.sink = sink or _to_stderr
    root = logging.getLogger()
    root.handlers = [_StandardLibraryHandler()]
    root.setLevel(_output.level)
    # Requests are in metrics and traces; a line for each would double the cost of a small request.
    access = logging.getLogger("uvicorn.access")
    access.handlers.clear()
    access.propagate = False
    for name in ("uvicorn", "uvicorn.error"):
        logging.getLogger(name).handlers.clear()
        logging.getLogger(name).propagate = True
    for name in ("asyncio", "httpx", "httpcore", "nats"):
        logging.getLogger(name).setLevel(max(_output.level, logging.WARNING))


class Logger:
    """Writes lines with fields; `with_fields` gives a logger that adds some to each line."""

    __slots__ = ("_fields", "_name")

    def __init__(self, name: str, fields: Mapping[str, object] | None = None) -> None:
        self._name = name
        self._fields = dict(fields) if fields else {}

    def with_fields(self, **fields: object) -> "Logger":
        return Logger(self._name, {**self._fields, **fields})

    def is_debug(self) -> bool:
        """Whether debug lines are written, for callers that would have to compute something for one."""
        return _output.level <= logging.DEBUG

    def debug(self, message: str, /, **fields: object) -> None:
        if _output.level <= logging.DEBUG:
            _write("debug", self._name, message, {**self._fields, **fields})

    def info(self, message: str, /, **fields: object) -> None:
        if _output.level <= logging.INFO:
            _write("info", self._name, message, {**self._fields, **fields})

    def warning(self, message: str, /, **fields: object) -> None:
        if _output.level <= logging.WARNING:
            _write("warning", self._name, message, {**self._fields, **fields})

    def error(self, message: str, /, *, error: BaseException | None = None, **fields: object) -> None:
        """Log an error; `error` adds its type, text and stack."""
        everything = {**self._fields, **fields}
        if error is not None:
            everything["error"] = f"{type(error).__name__}: {error}"
            everything["stack"] = "".join(traceback.format_exception(error))
        _write("error", self._name, message, everything)

    def exception(self, message: str, /, **fields: object) -> None:
        """As `error`, with the exception that is being handled."""
        self.error(message, error=sys.exception(), **fields)


def get_logger(name: str) -> Logger:
    """A logger; `name` is the module's.

    Usual fields: `job`, `tenant`, `node`, `attempt`, and `traceparent`, of which the trace id is written as `trace_id`.
    """
    return Logger(name)


def redacted(value: object) -> object:
    """`value` with the values of secret-looking keys replaced, at any depth."""
    if isinstance(value, Mapping):
        return {key: REDACTED if is_secret_name(str(key)) else redacted(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [redacted(inner) for inner in value]
    return value


def is_secret_name(name: str) -> bool:
    """Whether a field of this name is never written."""
    verdict = _name_verdicts.get(name)
    if verdict is None:
        verdict = name.lower() not in _HARMLESS_NAMES and _SECRET_NAME.search(name) is not None
        if len(_name_verdicts) < 4096:  # names may come from user data: never a leak
            _name_verdicts[name] = verdict
    return verdict


def _write(level: str, logger: str, message: str, fields: dict[str, object]) -> None:
    record: dict[str, object] = {
        "time": datetime.now(UTC),
        "level": level,
        "service": _output.service,
        "logger": logger,
        "message": message,
    }
    for name, value in fields.items():
        if name == "traceparent":
            record["trace_id"] = trace_id_of(value) if isinstance(value, str) else None
        elif is_secret_name(name):
            record[name] = REDACTED
        elif isinstance(value, (dict, list, tuple)):
            record[name] = redacted(value)
        else:
            # A field may not replace what every line has.
            record[name if name not in record else f"field_{name}"] = value
    try:
        line = orjson.dumps(record, default=str, option=_OPTIONS)
    except (TypeError, orjson.JSONEncodeError):
        # For example a lone surrogate or an integer beyond 64 bits: the line matters more than its form.
        line = orjson.dumps({name: _plain(value) for name, value in record.items()}, option=_OPTIONS)
    if b"://" in line or b"earer " in line or b"SU" in line or b"SA" in line:
        line = _SECRET_IN_TEXT.sub(rb"\1\3***\2", line)
    _output.sink(line)


def _plain(value: object) -> object:
    if isinstance(value, (bool, datetime)) or value is None:
        return value
    if isinstance(value, int) and value.bit_length() < 63:
        return value
    return str(value).encode("utf-8", "backslashreplace").decode()


class _StandardLibraryHandler(logging.Handler):
    """Writes records of the standard library's loggers in our form."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            fields: dict[str, object] = {}
            if record.exc_info is not None and record.exc_info[1] is not None:
                fields["error"] = f"{type(record.exc_info[1]).__name__}: {record.exc_info[1]}"
                fields["stack"] = "".join(traceback.format_exception(record.exc_info[1]))
            _write(record.levelname.lower(), record.name, record.getMessage(), fields)
        except Exception:  # a broken log call must not break its caller
            self.handleError(record)
