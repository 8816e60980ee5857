"""Panels from one device to another of the host, by the driver: what comes, and what is left of it when the worker that
had them is killed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from gemmserve_service.executor.worker.blocks.panel_table import PanelsFile, PanelTable
from gemmserve_service.executor.worker.blocks.peer_panels import PeerPanels
from gemmserve_service.executor.worker.cuda.peer_link import CupyPeerLink
from gemmserve_service.store.extents.memfd import create_panel_table

pytestmark = pytest.mark.gpu
cupy = pytest.importorskip("cupy")

NBYTES = 64 << 20
OWNER = f"""
import sys
import cupy
from gemmserve_service.executor.worker.blocks.panel_table import PanelsFile, PanelTable
from gemmserve_service.executor.worker.blocks.peer_panels import PeerPanels
from gemmserve_service.executor.worker.cuda.peer_link import CupyPeerLink
cupy.cuda.Device(0).use()
link = CupyPeerLink(cupy, 0)
peers = PeerPanels(PanelTable(PanelsFile(sys.argv[1], 0), link.bus_id), link)
memory = [cupy.cuda.alloc({NBYTES}) for _ in range(3)]
slots = peers.share("t", [(each.ptr, {NBYTES}) for each in memory])
for slot, each in enumerate(memory):
    assert slots.retract(slot)
    slots.coming(slot, "b", slot)
    cupy.ndarray(({NBYTES},), cupy.uint8, each).fill(40 + slot)
    cupy.cuda.Device(0).synchronize()
    slots.ready(slot)
print("there", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def path():
    try:
        reached = cupy.cuda.runtime.getDeviceCount() > 1 and cupy.cuda.runtime.deviceCanAccessPeer(1, 0)
    except cupy.cuda.runtime.CUDARuntimeError as error:
        pytest.skip(f"no device: {error}")
    if not reached:
        pytest.skip("no two devices that reach each other")
    fd = create_panel_table(2)
    yield f"/proc/{os.getpid()}/fd/{fd}"
    os.close(fd)


def test_panels_of_a_worker_that_is_killed_come_from_elsewhere_and_the_device_goes_on(path) -> None:
    with cupy.cuda.Device(1):
        link = CupyPeerLink(cupy, 1)
        peers = PeerPanels(PanelTable(PanelsFile(path, 1), link.bus_id), link)
        slots = peers.share("t", [])
        array = cupy.zeros((NBYTES,), cupy.uint8)
        for _ in range(2):
            command = [sys.executable, "-c", OWNER, path]
            with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
                try:
                    assert owner.stdout.readline() == "there\n"
                    for panel in (2, 0, 1, 2):
                        assert slots.bring("b", panel, array)
                        assert int(array.min()) == int(array.max()) == 40 + panel
                    assert not slots.bring("a", 0, array)
                finally:
                    owner.kill()
            assert not slots.bring("b", 0, array)
            assert float(cupy.ones((1000, 1000), cupy.float32).sum()) == 1e6
        assert peers.copied == 8
        slots.close([])
        until = time.monotonic() + 60
        while peers._mapped:
            assert time.monotonic() < until, "what is mapped is given up"
            time.sleep(0.001)
        peers.table.close()
