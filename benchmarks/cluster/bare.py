"""Bytes between two hosts without any of our code: `sendall` at one end, `recv_into` at the other.

`python bare.py HOST PORT NBYTES` is the receiving end: it connects, takes one byte, which says that others follow, and
so many bytes into memory that it has touched, again and again until the other end closes; and prints, for each time,
seconds from that first byte on and its own seconds of processor time.
"""

from __future__ import annotations

import json
import socket
import sys
import time

PIECE = 1 << 20


def receive(host, port, nbytes):
    """Take bytes until the other end closes."""
    memory = bytearray(nbytes)
    memory[::4096] = b"\1" * len(memory[::4096])
    with socket.create_connection((host, port)) as connection:
        while connection.recv(1):
            view, began, spent = memoryview(memory), time.perf_counter(), time.process_time()
            while view:
                taken = connection.recv_into(view[:PIECE])
                if not taken:
                    return
                view = view[taken:]
            print(json.dumps([time.perf_counter() - began, time.process_time() - spent]), flush=True)


if __name__ == "__main__":
    receive(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
