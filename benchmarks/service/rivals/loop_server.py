"""What the sockets themselves allow: heads are looked at for two numbers, bodies are received in memory that is kept
and never looked at. `python loop_server.py PORT` or `python loop_server.py PATH`.
"""

import re
import socket
import sys
import threading
from pathlib import Path

NUMBERS = re.compile(rb"(?i)\r\n(content-length|x-answer): *(\d+)")
SEND = 1 << 20


def serve(connection):
    """One connection until it ends. Bodies lie one after another in the same memory."""
    kept = memoryview(bytearray(1 << 20))
    first = bytearray(1 << 16)
    with connection:
        while True:
            held = 0
            while (end := first.find(b"\r\n\r\n", 0, held)) < 0:
                count = connection.recv_into(memoryview(first)[held:])
                if not count:
                    return
                held += count
            numbers = {name.lower(): int(value) for name, value in NUMBERS.findall(bytes(first[:end]))}
            length, answer = numbers.get(b"content-length", 0), numbers.get(b"x-answer", 0)
            if len(kept) < max(length, answer):
                kept = memoryview(bytearray(max(length, answer)))
            filled = held - end - 4
            while filled < length:
                count = connection.recv_into(kept[filled:length])
                if not count:
                    return
                filled += count
            head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % answer
            if answer <= SEND:
                connection.sendall(head + kept[:answer])
            else:
                connection.sendall(head)
                connection.sendall(kept[:answer])


def main(where):
    if where.isdigit():
        listener = socket.create_server(("127.0.0.1", int(where)))
    else:
        Path(where).unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(where)
        listener.listen(128)
    while True:
        connection, _ = listener.accept()
        if where.isdigit():
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=serve, args=(connection,), daemon=True).start()


if __name__ == "__main__":
    main(sys.argv[1])
