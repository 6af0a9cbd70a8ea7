import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import Field

from berth.runtime.settings import (
    EXIT_BAD_CONFIGURATION,
    BerthSettings,
    LogLevel,
    SettingsError,
    environment_faults,
    load_settings,
    load_settings_or_exit,
    settings_table,
)


class PassSettings(BerthSettings):
    """A service with one knob of its own."""

    pass_interval_seconds: float = Field(1.0, gt=0, description="time between two passes")
    card_types: list[str] = Field(default_factory=list, description="only these")


@pytest.fixture
def own_services(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """An empty `services` package in place of the repository's."""

    package = tmp_path / "services"
    package.mkdir()
    (package / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.partition(".")[0] == "services"]:
        monkeypatch.delitem(sys.modules, name)
    yield package
    for name in [name for name in sys.modules if name.partition(".")[0] == "services"]:
        del sys.modules[name]


@pytest.fixture(autouse=True)
def _empty_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.upper().startswith("BERTH_"):
            monkeypatch.delenv(name)


def faults_of(monkeypatch: pytest.MonkeyPatch, **environment: str) -> list[str]:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError) as caught:
        load_settings(PassSettings)
    return caught.value.faults


def test_defaults_are_a_valid_configuration() -> None:
    settings = load_settings(PassSettings)

    assert (settings.http_host, settings.http_port, settings.log_level) == ("127.0.0.1", 0, LogLevel.INFO)
    assert settings.otlp_endpoint is None


def test_the_environment_is_read_and_arguments_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BERTH_POOL", "east")
    monkeypatch.setenv("BERTH_PASS_INTERVAL_SECONDS", "0.5")

    settings = load_settings(PassSettings, pass_interval_seconds=2)

    assert (settings.pool, settings.pass_interval_seconds) == ("east", 2)


def test_an_empty_variable_counts_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BERTH_OTLP_ENDPOINT", "")

    assert load_settings(PassSettings).otlp_endpoint is None


def test_every_wrong_value_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    faults = faults_of(
        monkeypatch,
        BERTH_HTTP_PORT="99999",
        BERTH_PASS_INTERVAL_SECONDS="0",
        BERTH_POOL="a.b",
        BERTH_OTLP_ENDPOINT="collector:4318",
        BERTH_FAULT_POINT="x:0",
    )

    assert [fault.partition(":")[0] for fault in faults] == [
        "BERTH_FAULT_POINT",
        "BERTH_HTTP_PORT",
        "BERTH_OTLP_ENDPOINT",
        "BERTH_PASS_INTERVAL_SECONDS",
        "BERTH_POOL",
    ]


def test_a_value_that_is_not_json_where_a_list_is_due_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert faults_of(monkeypatch, BERTH_CARD_TYPES="H100") == ["BERTH_CARD_TYPES: is not valid JSON"]


def test_an_unknown_variable_is_refused_with_the_likely_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert faults_of(monkeypatch, BERTH_PASS_INTERVAL_SECOND="3") == [
        "BERTH_PASS_INTERVAL_SECOND: unknown variable; did you mean BERTH_PASS_INTERVAL_SECONDS?"
    ]


def test_values_never_appear_in_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    faults = faults_of(monkeypatch, BERTH_HTTP_PORT="s3cret", BERTH_OTLP_TOKEN="s3cret", BERTH_XYZ="s3cret")

    assert faults
    assert "s3cret" not in " ".join(faults)


def test_variables_of_jobs_and_test_suites_are_not_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BERTH_JOB_ID", "j1")
    monkeypatch.setenv("BERTH_TEST_DSN", "x")

    load_settings(PassSettings)


def test_what_another_service_knows_is_not_unknown(monkeypatch: pytest.MonkeyPatch, own_services: Path) -> None:
    other = own_services / "other"
    other.mkdir()
    (other / "__init__.py").write_text("")
    (other / "settings.py").write_text(
        "from berth.runtime.settings import BerthSettings\n"
        "class OtherSettings(BerthSettings):\n    ttl_seconds: int = 5\n"
        "OTHER_VARIABLES = {'BERTH_OTHER_NAME'}\n"
    )
    monkeypatch.setenv("BERTH_TTL_SECONDS", "7")
    monkeypatch.setenv("BERTH_OTHER_NAME", "x")

    load_settings(PassSettings)

    assert ("other", "BERTH_TTL_SECONDS", "5", "") in settings_table()


def test_a_bad_configuration_leaves_with_code_78(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BERTH_HTTP_PORT", "-1")

    with pytest.raises(SystemExit) as left:
        load_settings_or_exit(PassSettings)

    assert left.value.code == EXIT_BAD_CONFIGURATION
    assert capsys.readouterr().err.startswith("configuration: BERTH_HTTP_PORT: ")


def test_the_token_file_is_read_when_needed_and_the_token_stays_hidden(tmp_path: Path) -> None:
    settings = load_settings(PassSettings, otlp_token_file=tmp_path / "token")
    assert settings.otlp_authorization() is None

    (tmp_path / "token").write_text("t0ken\n")

    assert settings.otlp_authorization() == "Bearer t0ken"
    assert "t0ken" not in repr(load_settings(PassSettings, otlp_token="t0ken"))


def test_every_knob_is_described(capsys: pytest.CaptureFixture[str]) -> None:
    assert [variable for _, variable, _, meaning in settings_table() if not meaning] == []


def test_the_table_can_be_printed() -> None:
    paths = os.pathsep.join(sys.path)
    printed = subprocess.run(
        [sys.executable, "-m", "berth.runtime.settings"],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout

    assert printed.count("`BERTH_POOL`") == 1


def test_whoever_starts_the_services_is_told_what_they_would_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    assert environment_faults() == []

    monkeypatch.setenv("BERTH_FOO", "1")
    monkeypatch.setenv("BERTH_HTTP_PORT", "many")
    monkeypatch.setenv("BERTH_URL", "http://elsewhere")

    assert [fault.split(":")[0] for fault in environment_faults()] == ["BERTH_FOO", "BERTH_HTTP_PORT"]
