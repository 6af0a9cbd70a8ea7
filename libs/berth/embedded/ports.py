"""Holds a port on loopback for a process that comes and goes.

A port that was found free and given back is taken by anybody who asks for any free port, most likely by another part of
the same platform that starts in that moment. A socket that is bound and never listens keeps it: the kernel hands such a
port out to nobody, while a server that asks for it by number may listen there (both set SO_REUSEADDR).
"""

from __future__ import annotations

import socket

HOST = "127.0.0.1"


def hold_port(wanted: int = 0, *, is_wish: bool = False) -> socket.socket:
    """A socket that holds a port until it is closed; `getsockname()[1]` says which.

    Args:
        wanted: the port; 0: any.
        is_wish: take any other where `wanted` is in use.

    Raises:
        OSError: the port is in use.
    """
    holder = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        holder.bind((HOST, wanted))
        return holder
    except OSError:
        holder.close()
        if not is_wish or not wanted:
            raise
    return hold_port()
