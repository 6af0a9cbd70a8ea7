import pytest

from berth.telemetry.traceparent import (
    TraceParent,
    is_sampled,
    new_traceparent,
    parse_traceparent,
    thinned,
    trace_id_of,
    unsampled,
)

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
SPAN = "00f067aa0ba902b7"


def test_a_header_is_parsed_and_written_back_unchanged() -> None:
    header = f"00-{TRACE}-{SPAN}-01"

    assert parse_traceparent(header) == TraceParent(TRACE, SPAN, True)
    assert str(parse_traceparent(header)) == header


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "nonsense",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE}-{SPAN}-01\r\nx: y",
    ],
)
def test_a_header_that_breaks_the_form_is_no_context(header: str | None) -> None:
    assert parse_traceparent(header) is None


def test_only_the_lowest_flag_means_sampled() -> None:
    assert is_sampled(f"00-{TRACE}-{SPAN}-03")
    assert not is_sampled(f"00-{TRACE}-{SPAN}-02")
    assert not is_sampled(None)
    assert not is_sampled("")


def test_new_contexts_are_well_formed_and_differ() -> None:
    first, second = new_traceparent(), new_traceparent(sampled=True)

    assert parse_traceparent(first) is not None
    assert trace_id_of(first) != trace_id_of(second)
    assert not is_sampled(first)
    assert is_sampled(second)
    assert unsampled(second)[:52] == second[:52]
    assert not is_sampled(unsampled(second))


def test_a_bulk_request_traces_only_its_first_items() -> None:
    parent = new_traceparent(sampled=True)

    contexts = thinned(parent, 1000, keep=3)

    assert [is_sampled(context) for context in contexts].count(True) == 3
    assert {trace_id_of(context) for context in contexts} == {trace_id_of(parent)}
    assert thinned(None, 2) == [None, None]
