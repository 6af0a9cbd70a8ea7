"""Protocol lines and headers, as bytes."""

from __future__ import annotations

import pytest

from berth.bus import wire
from berth.bus.message import read_message

RAW = b"NATS/1.0\r\nNats-Msg-Id: j1.1.JobPlaced\r\nBerth-Type: JobPlaced.1\r\nEmpty:\r\n\r\n"


@pytest.mark.parametrize("subject", ["a", "berth.evt.p.job.j-1_X.placed", "$JS.ACK.S.default=n1.1.2", "_R_.x"])
def test_concrete_subjects_are_publishable(subject: str) -> None:
    assert wire.is_publishable(subject)


@pytest.mark.parametrize("subject", ["", ".", "a.", ".a", "a..b", "a.*", "a.>", "a b", "a\tb", "a\r\nPUB b", "a\n"])
def test_subjects_that_would_break_the_protocol_or_match_others_are_not(subject: str) -> None:
    assert not wire.is_publishable(subject)


def test_message_without_headers_is_a_pub() -> None:
    assert wire.encode_publish(b"a.b", b"", b"", b"xyz") == b"PUB a.b  3\r\nxyz\r\n"
    assert wire.encode_publish(b"a.b", b"r.1", b"", b"") == b"PUB a.b r.1 0\r\n\r\n"


def test_message_with_headers_counts_them_in_both_lengths() -> None:
    fields = wire.encode_headers({"Nats-Msg-Id": "1", "Berth-Type": "ü"})
    head = b"NATS/1.0\r\nNats-Msg-Id: 1\r\nBerth-Type: \xc3\xbc\r\n\r\n"
    assert wire.encode_publish(b"a", b"r", fields, b"xyz") == b"HPUB a r %d %d\r\n%bxyz\r\n" % (
        len(head),
        len(head) + 3,
        head,
    )


@pytest.mark.parametrize("headers", [{"A": "x\r\nB: y"}, {"A": "x\n"}, {"A\r\n": "x"}, {"A:B": "x"}, {"A B": "x"}])
def test_header_that_could_forge_another_is_refused(headers: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="not printable"):
        wire.encode_headers(headers)


def test_acknowledgements_are_one_block() -> None:
    assert wire.encode_acks([b"$JS.ACK.a", b"$JS.ACK.b"]) == b"PUB $JS.ACK.a  0\r\n\r\nPUB $JS.ACK.b  0\r\n\r\n"


def test_one_header_is_found_without_the_others() -> None:
    assert wire.find_header(RAW, "Berth-Type") == "JobPlaced.1"
    assert wire.find_header(RAW, "Empty") == ""
    assert wire.find_header(RAW, "Type") is None
    assert wire.find_header(None, "Berth-Type") is None


def test_all_headers_are_parsed() -> None:
    assert wire.parse_headers(RAW) == {"Nats-Msg-Id": "j1.1.JobPlaced", "Berth-Type": "JobPlaced.1", "Empty": ""}
    assert wire.parse_headers(None) == {}


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"NATS/1.0 503\r\n\r\n", (503, "")),
        (b"NATS/1.0 408 Request Timeout\r\nNats-Pending-Messages: 1\r\n\r\n", (408, "Request Timeout")),
        (b"NATS/1.0 409 Consumer Deleted\r\n\r\n", (409, "Consumer Deleted")),
        (RAW, (0, "")),
        (None, (0, "")),
    ],
)
def test_status_of_an_inline_answer(raw: bytes | None, status: tuple[int, str]) -> None:
    assert wire.parse_status(raw) == status


@pytest.mark.parametrize(
    "ack",
    [
        b"$JS.ACK.BERTH_EVENTS.audit.2.77.5.1796095548185155249.12",
        b"$JS.ACK._.ACCHASH.BERTH_EVENTS.audit.2.77.5.1796095548185155249.12.token",
        b"$JS.ACK.hub.ACCHASH.BERTH_EVENTS.audit.2.77.5.1796095548185155249.12",
    ],
)
def test_both_forms_of_the_acknowledgement_subject_are_read(ack: bytes) -> None:
    message = read_message(b"berth.evt.p.job.j1.placed", ack, b"{}", RAW)

    assert (message.stream_seq, message.consumer_seq, message.num_delivered) == (77, 5, 2)
    assert (message.consumer, message.pending) == ("audit", 12)
    assert message.stored_at.isoformat().startswith("2026-12-01T03:25:48.185155")
    assert message.header("Nats-Msg-Id") == "j1.1.JobPlaced"


@pytest.mark.parametrize("ack", [b"", b"$JS.ACK.S.c", b"$JS.ACK.S.c.one.2.3.4.5", b"_INBOX.x.1"])
def test_message_that_acknowledges_nothing_is_refused(ack: bytes) -> None:
    with pytest.raises(ValueError, match=r".+"):
        read_message(b"s", ack, b"", None)
