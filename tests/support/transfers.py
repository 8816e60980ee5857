"""What tests of transfer processes share: bodies, answers, metrics."""

from __future__ import annotations

from contextlib import contextmanager
from unittest.mock import patch

import numpy as np
import uvloop

from gemmserve_service.http.protocol import body_receiver

MIB = 1 << 20
A = np.random.default_rng(5).standard_normal(MIB)
"""8 MiB."""
OCTETS = {"Content-Type": "application/octet-stream"}
BARE = {"Accept": "application/octet-stream"}
F64 = {"dtype": "float64", "shape": str(A.size)}


@contextmanager
def transferred_by(
    kind, serve, count=1, *, silence_s=600.0, loop_factory=uvloop.new_event_loop, alone_below=0, **fields
):
    """An app with so many transfer processes of a kind (`TransferProcesses`, `TransferThreads`), and these.

    `alone_below`: bytes below which the front moves those of a connection that is alone itself.
    """
    fields = {"min_body_rate": 0, "head_timeout_s": 600, "keep_alive_s": 600, **fields}
    with (
        patch.object(body_receiver, "ALONE_BELOW", alone_below),
        kind(serve(loop_factory=loop_factory, **fields), count, silence_s=silence_s) as transfers,
    ):
        yield transfers.live, transfers


def read_answer(file):
    """Status and body of the next answer."""
    line = file.readline()
    length = 0
    while (field := file.readline()) not in {b"\r\n", b""}:
        name, _, value = field.decode().partition(":")
        length = int(value) if name.lower() == "content-length" else length
    return int(line.split()[1]), file.read(length)


def same(answer, status, body):
    """Without a diff of megabytes where it is not."""
    return answer[0] == status and answer[1] == body


def metric(live, name):
    with live.http() as http:
        lines = http.get("/metrics").text.splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(f"{name} "))


def store(live, array=A):
    """Uploads it; its id."""
    with live.http() as http:
        query = {"dtype": array.dtype.name, "shape": str(array.size)}
        return http.post("/v1/arrays", params=query, headers=OCTETS, content=array.tobytes()).json()["id"]


def download(array_id):
    """The request."""
    return f"GET /v1/arrays/{array_id}/data HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode()
