"""A port of a platform stays its own while the process that listens on it comes and goes."""

from __future__ import annotations

import socket

import pytest

from berth.embedded.ports import HOST, hold_port

FREE_PORTS_TRIED = 2000


def listen(port: int) -> socket.socket:
    server = socket.socket()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as every server does
    server.bind((HOST, port))
    server.listen(1)
    return server


def test_its_owner_may_listen_again_and_again() -> None:
    with hold_port() as holder:
        port = holder.getsockname()[1]
        for _ in range(2):
            with listen(port), socket.create_connection((HOST, port), timeout=5):
                pass


def test_nobody_gets_it_who_asks_for_any_port() -> None:
    with hold_port() as holder:
        port = holder.getsockname()[1]
        for _ in range(FREE_PORTS_TRIED):
            with listen(0) as server:
                assert server.getsockname()[1] != port


def test_two_holders_get_two_ports() -> None:
    with hold_port() as one, hold_port() as other:
        assert one.getsockname() != other.getsockname()


def test_a_wish_gives_way_to_a_server_and_a_demand_does_not() -> None:
    with listen(0) as server:
        port = server.getsockname()[1]
        with hold_port(port, is_wish=True) as holder:
            assert holder.getsockname()[1] != port
        with pytest.raises(OSError, match="in use"):
            hold_port(port)
