"""What belongs to one process."""

from __future__ import annotations

import os

import httpx

import gemmserve
from gemmserve import Client


def test_a_transport_of_ones_own_stays_in_its_process(service) -> None:
    """It has connections that nobody else can make anew: a child is told so."""
    with Client(transport=httpx.MockTransport(service)) as client:
        client.health()
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            try:
                client.health()
            except gemmserve.TransportError as error:
                os.write(writing, str(error).encode())
            finally:
                os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as said:
            assert "another process" in said.read()
        os.waitpid(child, 0)
        client.health()
