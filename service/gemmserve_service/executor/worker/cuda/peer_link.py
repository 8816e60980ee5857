"""Ways between CUDA devices of one host whose workers are processes of their own (CUDA runtime API, interprocess
communication).

Memory of another process is read, never written. Its owner frees it only when nobody has it mapped
(`blocks.panel_table`): to free it before is undefined.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Any, Final

from gemmserve_kernels.device import driver
from gemmserve_service.executor.worker.blocks.panel_table import Offer

_LAZILY: Final = 1
"""cudaIpcMemLazyEnablePeerAccess."""

log = logging.getLogger(__name__)


class CupyPeerLink:
    """`PeerLink` of one device, by CuPy's runtime interface."""

    def __init__(self, cupy: Any, ordinal: int) -> None:
        self._cuda = cupy.cuda
        self._ordinal = ordinal
        self.bus_id: str = self._cuda.runtime.deviceGetPCIBusId(ordinal)
        self.reaches = cache(self._reaches)

    def offer(self, address: int, nbytes: int) -> Offer:
        """See `PeerLink`."""
        start, _ = driver.allocation_of(address)
        return Offer(self._cuda.runtime.ipcGetMemHandle(start), address - start, nbytes)

    def _reaches(self, bus_id: str) -> bool:
        """See `PeerLink`. A device's own parts (MIG) have no way between them either."""
        runtime = self._cuda.runtime
        try:
            other = int(runtime.deviceGetByPCIBusId(bus_id))
            return other != self._ordinal and bool(runtime.deviceCanAccessPeer(self._ordinal, other))
        except RuntimeError as error:  # it is not visible to this process
            log.info("device %s is not known here: %s", bus_id, error)
            return False

    def open(self, handle: bytes) -> int:
        """See `PeerLink`."""
        return int(self._cuda.runtime.ipcOpenMemHandle(handle, _LAZILY))

    def close(self, address: int) -> None:
        """See `PeerLink`."""
        self._cuda.runtime.ipcCloseMemHandle(address)

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """See `PeerLink`."""
        runtime, stream = self._cuda.runtime, self._cuda.get_current_stream()
        runtime.memcpyAsync(target, source, nbytes, runtime.memcpyDeviceToDevice, stream.ptr)
        stream.synchronize()

    def enter(self) -> None:
        """See `PeerLink`."""
        self._cuda.Device(self._ordinal).use()
