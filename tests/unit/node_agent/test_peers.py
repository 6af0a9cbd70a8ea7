"""Answers of other agents, and whom to believe."""

import pytest

from services.node_agent.peers import Peers, PeerView, fleet_key


def a_peer(*nodes: str, pool: str = "p", hears: bool = False, key: bytes = b"k", addresses: str = "") -> Peers:
    return Peers(pool=pool, nodes=nodes, hears=lambda: hears, addresses=addresses, key=key)


def test_an_answer_says_who_is_there_and_who_hears() -> None:
    line = a_peer("n2", "n3", hears=True).answer_to(b"nonce")
    assert a_peer("n1").read_answer(line, b"nonce") == PeerView(frozenset({"n2", "n3"}), True)


@pytest.mark.parametrize(
    ("peer", "nonce"),
    [
        (a_peer("n2", key=b"another fleet's"), b"nonce"),
        (a_peer("n2", pool="other"), b"nonce"),
        (a_peer("n2"), b"an older question"),
    ],
)
def test_an_answer_that_is_not_ours_says_nothing(peer: Peers, nonce: bytes) -> None:
    assert a_peer("n1").read_answer(peer.answer_to(nonce), b"nonce") == PeerView()


async def test_who_is_not_there_is_not_reached() -> None:
    server = await a_peer("n2").serve("127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    asking = a_peer("n1", addresses=f"127.0.0.1:{port}, 127.0.0.1:1, no.such.host.invalid:1")
    assert await asking.ask() == PeerView(frozenset({"n2"}), False)
    server.close()


async def test_without_peers_nobody_is_asked() -> None:
    assert await a_peer("n1").ask() == PeerView()


def test_without_credentials_there_is_still_a_key() -> None:
    assert len(fleet_key(None)) == 32
