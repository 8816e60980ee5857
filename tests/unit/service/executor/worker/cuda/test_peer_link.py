"""Ways between devices: what the runtime is asked."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from gemmserve_kernels.device import driver
from gemmserve_service.executor.worker.blocks.panel_table import Offer
from gemmserve_service.executor.worker.cuda.peer_link import CupyPeerLink


class Runtime:
    """Three devices, of which the first two reach each other; the last one is not visible here."""

    memcpyDeviceToDevice = 3  # noqa: N815

    def __init__(self):
        self.calls = []

    def deviceGetPCIBusId(self, ordinal):  # noqa: N802
        return f"0000:0{ordinal}:00.0"

    def deviceGetByPCIBusId(self, bus_id):  # noqa: N802
        self.calls.append(bus_id)
        if bus_id == "0000:09:00.0":
            raise RuntimeError("cudaErrorInvalidDevice")
        return int(bus_id[6])

    def deviceCanAccessPeer(self, device, peer):  # noqa: N802
        return int(device != peer and max(device, peer) < 2)

    def ipcGetMemHandle(self, address):  # noqa: N802
        return address.to_bytes(64, "little")

    def ipcOpenMemHandle(self, handle, flags):  # noqa: N802
        self.calls.append((handle, flags))
        return 4096

    def ipcCloseMemHandle(self, address):  # noqa: N802
        self.calls.append(address)

    def memcpyAsync(self, *arguments):  # noqa: N802
        self.calls.append(arguments)


@pytest.fixture
def link():
    runtime = Runtime()
    stream = SimpleNamespace(ptr=7, synchronize=lambda: runtime.calls.append("waited"))
    cuda = SimpleNamespace(
        runtime=runtime,
        get_current_stream=lambda: stream,
        Device=lambda ordinal: SimpleNamespace(use=lambda: runtime.calls.append(f"device {ordinal}")),
    )
    return CupyPeerLink(SimpleNamespace(cuda=cuda), 0)


def test_memory_is_offered_by_its_allocation(link, monkeypatch) -> None:
    """What a pool gives is often a part of one."""
    monkeypatch.setattr(driver, "allocation_of", lambda address: (address - 512, 1 << 30))
    assert link.offer(10_512, 100) == Offer((10_000).to_bytes(64, "little"), 512, 100)


def test_other_devices_are_reached_where_the_driver_says_so(link) -> None:
    """Not the device itself, whose parts (MIG) have no way between them; each is asked about once."""
    buses = [f"0000:0{number}:00.0" for number in (0, 1, 2, 9)]
    assert [link.reaches(bus) for bus in (*buses, *buses)] == [False, True, False, False] * 2
    assert link._cuda.runtime.calls == buses


def test_memory_of_others_is_mapped_and_copied_from(link) -> None:
    assert link.open(bytes(64)) == 4096
    link.copy(100, 4200, 10)
    link.close(4096)
    link.enter()
    assert link._cuda.runtime.calls == [(bytes(64), 1), (100, 4200, 10, 3, 7), "waited", 4096, "device 0"]
