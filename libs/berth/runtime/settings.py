"""Settings of services: environment variables `BERTH_*`, checked once at start.

A wrong or unknown variable stops the service with exit code 78 and one line per fault: a misspelt knob that silently
keeps its default is found in production otherwise. A variable that another service knows is not unknown, because one
environment is often shared by all.

`python -m berth.runtime.settings` prints every knob of every service.
"""

import difflib
import importlib
import os
import pkgutil
import re
import sys
from collections.abc import Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Final, NoReturn, TypeVar

from pydantic import Field, SecretStr, ValidationError, field_validator
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from berth.runtime.faults import parse_fault_point

PREFIX: Final = "BERTH_"
EXIT_BAD_CONFIGURATION: Final = 78  # EX_CONFIG of sysexits.h

# What the platform sets for the programs it runs (the environment of a job, not of a service). A service started from
# inside a job inherits them.
JOB_VARIABLES: Final = frozenset(
    PREFIX + name
    for name in (
        "ARRAY_INDEX",
        "ATTEMPT",
        "CLASS",
        "FENCE",
        "GRACE_SECONDS",
        "JOB_ID",
        "JOB_NAME",
        "NODE",
        "PORT",
        "ROLE",
        "TENANT",
        "WORKER",
        "WORKERS",
        "WORK_DIR",
    )
)
_JOB_PREFIXES: Final = tuple(PREFIX + name for name in ("CKPT_", "DATA_", "GANG_", "MODEL_", "RESUME_"))
# For test suites, whose environment reaches the services that they start.
_TEST_PREFIX: Final = PREFIX + "TEST_"
# Modules besides `services.*.settings` whose BerthSettings classes, and names in `OTHER_VARIABLES`, count as known.
_MORE_SETTINGS_MODULES: Final = ("berth.client.settings", "berth.embedded.settings")
_NAME_FORM: Final = re.compile(r"[A-Za-z0-9_-]+")

Port = Annotated[int, Field(ge=0, le=65535)]


class LogLevel(StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class SettingsError(Exception):
    """The environment is not a valid configuration; the operator mends it.

    Attributes:
        faults: one readable line each, naming the variable.
    """

    def __init__(self, faults: list[str]) -> None:
        super().__init__("; ".join(faults))
        self.faults = faults


class BerthSettings(BaseSettings):
    """What every process of the platform can be told. A service adds its own knobs in a subclass.

    Each field carries its description and, where it counts something, its unit in the name; values come from arguments
    (tests, the embedded platform) or `BERTH_<NAME>`, in this order.
    """

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        env_file=None,
        env_ignore_empty=True,
        extra="forbid",
        frozen=True,
        validate_default=True,
        hide_input_in_errors=True,
    )

    pool: str = Field("default", description="pool (cell) this process belongs to; letters, digits, _ and -")
    home: Path = Field(Path(".berth"), description="data directory: run files, keys, node state")
    nats_url: str = Field("nats://127.0.0.1:4222", description="bus address; several separated by commas")
    nats_credentials_file: Path | None = Field(None, description="bus credentials (JWT and seed); none: no login")
    postgres_dsn: SecretStr = Field(
        SecretStr("postgresql://berth@127.0.0.1:5432/berth"), description="database address with user and password"
    )
    http_host: str = Field("127.0.0.1", description="address for health and metrics; loopback unless told otherwise")
    http_port: Port = Field(
        0, description="port for health and metrics; 0: any free one, see <home>/run/<service>.json"
    )
    log_level: LogLevel = Field(LogLevel.INFO, description="debug, info, warning or error")
    otlp_endpoint: str | None = Field(None, description="where spans go (OTLP over HTTP); none: tracing is off")
    otlp_token: SecretStr | None = Field(None, description="bearer token for the trace endpoint")
    otlp_token_file: Path | None = Field(None, description="file with that token, read whenever spans are sent")
    trace_sample_ratio: float = Field(1.0, ge=0, le=1, description="share of requests considered for tracing, 0 to 1")
    trace_roots_per_second: float = Field(10.0, ge=0, le=10_000, description="requests traced per second at most")
    fault_point: str | None = Field(None, description="tests only: `<name>:<n>` kills the process at the n-th passing")
    faults_on_signal: bool = Field(
        False, description="tests only: SIGUSR1 arms the fault point written in <home>/run/<service>.fault"
    )

    @field_validator("pool")
    @classmethod
    def _pool_is_a_subject_token(cls, pool: str) -> str:
        if not _NAME_FORM.fullmatch(pool):
            raise ValueError("may hold letters, digits, _ and - only")
        return pool

    @field_validator("otlp_endpoint")
    @classmethod
    def _endpoint_is_http(cls, endpoint: str | None) -> str | None:
        if endpoint is not None and not re.fullmatch(r"https?://[^/\s]+(/\S*)?", endpoint):
            raise ValueError("must begin with http:// or https://")
        return endpoint or None

    @field_validator("fault_point")
    @classmethod
    def _fault_point_is_well_formed(cls, fault_point: str | None) -> str | None:
        if fault_point is not None:
            parse_fault_point(fault_point)
        return fault_point

    @property
    def run_directory(self) -> Path:
        """Where processes report pid and port."""
        return self.home / "run"

    def otlp_authorization(self) -> str | None:
        """The header for the trace endpoint; None without a token. The file may appear after the start."""
        if self.otlp_token is not None:
            return f"Bearer {self.otlp_token.get_secret_value()}"
        if self.otlp_token_file is not None:
            try:
                return f"Bearer {self.otlp_token_file.read_text().strip()}"
            except OSError:
                return None
        return None

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, env_settings


S = TypeVar("S", bound=BerthSettings)


def load_settings(settings_type: type[S], **overrides: Any) -> S:
    """Read and check the environment.

    Raises:
        SettingsError: with every fault at once, unknown variables included.
    """
    faults = [*_unknown_variables(settings_type, os.environ)]
    settings: S | None = None
    try:
        settings = settings_type(**overrides)
    except ValidationError as error:
        faults += [_fault(entry["loc"], entry["msg"]) for entry in error.errors(include_url=False)]
    except ValueError as error:
        # pydantic-settings: a list or mapping that is not JSON; its message names the field, never the value.
        field = re.search(r'field "(\w+)"', str(error))
        faults.append(_fault((field[1],) if field else (), "is not valid JSON" if field else str(error)))
    if faults or settings is None:
        raise SettingsError(sorted(faults))
    return settings


def environment_faults() -> list[str]:
    """What any service would refuse in this environment; what is only missing is no fault here.

    For who starts the services: one that leaves at once because of a misspelt variable is found in its log otherwise.
    """
    faults = {*_unknown_variables(BerthSettings, os.environ)}
    given = {name.upper() for name in os.environ}
    for _, settings_type in all_settings_types():
        try:
            load_settings(settings_type)
        except SettingsError as error:
            faults.update(fault for fault in error.faults if re.split("[ :]", fault)[0].upper() in given)
    return sorted(faults)


def load_settings_or_exit(settings_type: type[S], **overrides: Any) -> S:
    """As `load_settings`, but says the faults on standard error and leaves with exit code 78."""
    try:
        return load_settings(settings_type, **overrides)
    except SettingsError as error:
        refuse(error)


def refuse(error: SettingsError) -> NoReturn:
    """Print the faults, one a line, and leave."""
    for fault in error.faults:
        print(f"configuration: {fault}", file=sys.stderr)
    raise SystemExit(EXIT_BAD_CONFIGURATION)


def variables_of(settings_type: type[BerthSettings]) -> dict[str, FieldInfo]:
    """The environment variables that `settings_type` reads, in order of declaration."""
    return {PREFIX + name.upper(): field for name, field in settings_type.model_fields.items()}


def all_settings_types() -> Iterator[tuple[str, type[BerthSettings]]]:
    """The settings class of every service that is installed, with its owner's name; imports their settings modules."""
    yield "every service", BerthSettings
    seen: set[type[BerthSettings]] = {BerthSettings}
    for owner, module in _settings_modules():
        for value in vars(module).values():
            if isinstance(value, type) and issubclass(value, BerthSettings) and value not in seen:
                seen.add(value)
                yield owner, value


def _settings_modules() -> Iterator[tuple[str, ModuleType]]:
    names = [(name.split(".")[1], name) for name in _MORE_SETTINGS_MODULES]
    try:
        services: ModuleType | None = importlib.import_module("services")
    except ModuleNotFoundError:
        services = None
    if services is not None:
        names += [(found.name, f"services.{found.name}.settings") for found in pkgutil.iter_modules(services.__path__)]
    for owner, name in names:
        try:
            yield owner, importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not name.startswith(error.name):
                raise  # the module is there, something it needs is not


def _unknown_variables(settings_type: type[BerthSettings], environment: Mapping[str, str]) -> Iterator[str]:
    own = variables_of(settings_type)
    # pydantic-settings reads variables in any case; what is compared is what it would take.
    strangers = sorted(name for name in environment if name.upper().startswith(PREFIX) and name.upper() not in own)
    if not strangers:
        return
    known = set(own) | JOB_VARIABLES  # only now is it worth importing what the other services know
    for _, other in all_settings_types():
        known.update(variables_of(other))
    for _, module in _settings_modules():
        known.update(getattr(module, "OTHER_VARIABLES", ()))
    for name in strangers:
        if name.upper() not in known and not name.upper().startswith((_TEST_PREFIX, *_JOB_PREFIXES)):
            near = difflib.get_close_matches(name.upper(), known, n=1, cutoff=0.75)
            yield f"{name}: unknown variable" + (f"; did you mean {near[0]}?" if near else "")


def _fault(location: tuple[int | str, ...], message: str) -> str:
    name = PREFIX + str(location[0]).upper() if location else "settings"
    inner = ".".join(str(part) for part in location[1:])
    text = message.removeprefix("Value error, ")
    return f"{name}{f' ({inner})' if inner else ''}: {text[:1].lower()}{text[1:]}"


def settings_table() -> list[tuple[str, str, str, str]]:
    """Every knob once: owner, variable, default, meaning. What all services inherit is listed only once."""
    rows = []
    common = set(variables_of(BerthSettings))
    for owner, settings_type in all_settings_types():
        for variable, field in variables_of(settings_type).items():
            if settings_type is BerthSettings or variable not in common:
                rows.append((owner, variable, _default_text(field), field.description or ""))
    return rows


def _default_text(field: FieldInfo) -> str:
    default: Any = field.get_default(call_default_factory=True) if not field.is_required() else None
    if field.is_required():
        return "required"
    if isinstance(default, SecretStr):
        return default.get_secret_value()  # a default is in the source anyway
    return "none" if default is None else str(default)


def main() -> None:
    """Print the table as Markdown."""
    owner = None
    for row_owner, variable, default, meaning in settings_table():
        if row_owner != owner:
            owner = row_owner
            print(f"\n## {owner}\n\n| variable | default | meaning |\n| --- | --- | --- |")
        print(f"| `{variable}` | `{default}` | {meaning} |")


if __name__ == "__main__":
    # As `python -m`, this module is `__main__` and its classes would be strangers to the services' settings.
    importlib.import_module("berth.runtime.settings").main()
