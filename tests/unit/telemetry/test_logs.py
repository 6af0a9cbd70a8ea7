import logging
from collections.abc import Callable, Iterator

import orjson
import pytest

from berth.telemetry.logs import configure_logging, get_logger, is_secret_name
from berth.telemetry.traceparent import new_traceparent, trace_id_of

Lines = Callable[[], list[dict[str, object]]]


@pytest.fixture
def lines() -> Iterator[Lines]:
    root = logging.getLogger()
    before = root.handlers[:], root.level
    written: list[bytes] = []
    configure_logging("placement", "info", sink=written.append)
    yield lambda: [orjson.loads(line) for line in written]
    configure_logging("berth", "info")
    root.handlers, root.level = before


def test_a_line_is_one_json_object_with_ids(lines: Lines) -> None:
    traceparent = new_traceparent()

    get_logger("app").info("job placed", job="j1", tenant="vision", gpus=4, traceparent=traceparent)

    (line,) = lines()
    assert {
        key: line[key] for key in ("level", "service", "logger", "message", "job", "tenant", "gpus", "trace_id")
    } == {
        "level": "info",
        "service": "placement",
        "logger": "app",
        "message": "job placed",
        "job": "j1",
        "tenant": "vision",
        "gpus": 4,
        "trace_id": trace_id_of(traceparent),
    }
    assert str(line["time"]).endswith("Z")


def test_levels_below_the_configured_one_are_not_written(lines: Lines) -> None:
    get_logger("app").debug("noise")
    get_logger("app").warning("matters")

    assert [line["message"] for line in lines()] == ["matters"]


def test_bound_fields_are_on_every_line_and_cannot_replace_the_standard_ones(lines: Lines) -> None:
    log = get_logger("app").with_fields(node="n1")

    log.info("first", level="fake")
    log.info("second", node="n2")

    first, second = lines()
    assert (first["node"], first["level"], first["field_level"]) == ("n1", "info", "fake")
    assert second["node"] == "n2"


@pytest.mark.parametrize(
    "name", ["password", "API_KEY", "apikey", "bearer", "otlp_token", "postgres_dsn", "Authorization", "client_secret"]
)
def test_secret_fields_are_never_written_at_any_depth(lines: Lines, name: str) -> None:
    get_logger("app").info("m", **{name: "s3cret"}, nested={"list": [{name: "s3cret"}]})

    assert b"s3cret" not in orjson.dumps(lines())


def test_secrets_inside_texts_are_masked(lines: Lines) -> None:
    seed = "SU" + "A" * 56
    get_logger("app").info(f"cannot reach postgresql://berth:s3cret@db/berth with Bearer s3crets3cret or {seed}")
    logging.getLogger("lib").warning("nats://u:s3cret@host")

    text = orjson.dumps(lines())
    assert b"s3cret" not in text
    assert seed.encode() not in text
    assert b"postgresql://berth:***@db/berth" in text


@pytest.mark.parametrize("name", ["fence", "fencing_token", "job", "tokens_per_second", "idempotency_key"])
def test_words_of_the_domain_are_not_mistaken_for_secrets(name: str) -> None:
    assert not is_secret_name(name)


def test_standard_library_records_and_errors_take_the_same_form(lines: Lines) -> None:
    try:
        raise ConnectionError("bus gone")
    except ConnectionError as error:
        logging.getLogger("nats.client").exception("lost %s", "it")
        get_logger("app").error("gave up", error=error)
        get_logger("app").exception("gave up", job="j1")

    standard, own, handled = lines()
    assert (handled["error"], handled["job"]) == (own["error"], "j1")
    assert (standard["level"], standard["logger"], standard["message"]) == ("error", "nats.client", "lost it")
    assert standard["error"] == own["error"] == "ConnectionError: bus gone"
    assert "Traceback" in str(standard["stack"])


def test_the_access_log_is_off(lines: Lines) -> None:
    logging.getLogger("uvicorn.access").info("GET /healthz 200")

    assert lines() == []


def test_values_that_json_cannot_hold_do_not_lose_the_line(lines: Lines) -> None:
    get_logger("app").info("odd", big=1 << 80, broken="\ud800", thing=object())

    (line,) = lines()
    assert line["message"] == "odd"
    assert line["big"] == str(1 << 80)
