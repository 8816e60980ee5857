"""Copies between host and device: copies of operands, forms prepared of those that are used again, results."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
import psutil

from gemmserve_kernels import Operand, plan, prepare
from gemmserve_kernels.device.caching import cached
from gemmserve_kernels.problem.arrays import ArrayKey
from gemmserve_service.executor.worker.cuda.pinned_ring import CupyLink, Staging, flat
from gemmserve_service.executor.worker.memory.residency import Residency
from gemmserve_service.products import build

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gemmserve_kernels import DeviceSpec
    from gemmserve_service.executor.worker.backend import HostArray
    from gemmserve_service.executor.worker.blocks.panel_slots import PanelUse, Pin
    from gemmserve_service.executor.worker.memory.host_arena import HostArena
    from gemmserve_service.executor.worker.memory.registered_mappings import RegisteredMappings
    from gemmserve_service.schemas import GemmParams, GemmReduceParams

    Bytes = np.ndarray[Any, np.dtype[np.uint8]]

_DIRECT: Final = 1 << 20
"""Bytes below which the driver's own way is as fast as the ring of pinned memory."""
_LARGE: Final = 1 << 24  # bytes from which it is worth asking how much memory is left
_LINE: Final = 4 << 10
"""Bytes of a window's rows from which on copies without the ring are as fast: a link takes 32 GB/s of rows so long, and
all that it can of rows of 32 KiB."""
_MATRIX: Final = 2
AGAIN: Final = 2
"""Uses of a copy from which on it pays to prepare it: one is no reason to expect another."""
_FORM_SIZES: Final = {"ozaki": 2}
"""Bytes of a form, by the mode that it is prepared by, for each of its array's; 1 of others."""


class DeviceCopies:
    """Copies on one device, of which `budget` bytes are kept. Everything is enqueued on the caller's current stream."""

    def __init__(
        self,
        cupy: Any,
        ordinal: int,
        spec: DeviceSpec,
        budget: int,
        arena: HostArena | None = None,
        registered: RegisteredMappings | None = None,
    ) -> None:
        """`arena`, `registered`: memory of the host that copies may go straight from and to."""
        self.resident = Residency(budget)
        self._cupy = cupy
        self._spec = spec
        self._arena = arena
        self._registered = registered
        self._link = CupyLink(cupy, ordinal)
        self._staging = Staging(self._link)

    def load(self, operand: HostArray) -> Any:
        """An operand's copy, whole: another thread, on another stream, may use it at once."""
        data = operand.data
        return self.resident.get(operand.cache_id, data.nbytes, lambda: self._whole(self.fresh(operand.read())))

    def load_panel(self, operand: HostArray, use: PanelUse, *, waits: bool) -> Pin:
        """A panel of a large product's operand, likewise, in its slot until it is released: see `PanelSlots.take`."""
        return use.take(lambda array: self.fill(array, operand), waits=waits)

    def fill(self, array: Any, operand: HostArray) -> None:
        """Fill an array of the device with an operand, which is there when this returns."""
        self._whole(self._fill(array, operand))

    def _whole(self, value: Any) -> Any:
        """Wait for what was enqueued to make it."""
        self._cupy.cuda.get_current_stream().synchronize()
        return value

    def fresh(self, data: np.ndarray[Any, Any]) -> Any:
        """A copy of its own. The host array has been read when this returns."""
        array = self._cupy.empty(data.shape, data.dtype, order=order_of(data))
        self._upload(array, data)
        return array

    def _fill(self, array: Any, operand: HostArray) -> Any:
        """Fill an array of the device with an operand: from the copy of what it is part of, if there is one."""
        if operand.part_of is not None:
            name, index = operand.part_of
            whole = self.resident.peek(name)
            if whole is not None:
                array[...] = whole[index]
                return array
        self._upload(array, operand.read())
        return array

    def _upload(self, array: Any, data: np.ndarray[Any, Any]) -> None:
        """Bring elements to an array of the device that is contiguous. The host array has been read on return."""
        memory = flat(data) if data.nbytes >= _DIRECT and _lies_as(array, data) else None
        stream = self._cupy.cuda.get_current_stream()
        if memory is not None and self._straight(memory):
            for _, start, count in self._parts(memory):
                self._link.upload(array.data.ptr + start, memory[start : start + count], stream)
            stream.synchronize()
        elif memory is not None:
            self._staging.to_device(array.data.ptr, memory, stream)
        elif data.nbytes >= _DIRECT and data.ndim > 1:
            lines = _as_c(array, data)
            if (memory := self._straight_lines(lines)) is not None:
                self._start_lines(array, lines, memory, up=True)
                stream.synchronize()
            else:
                self._staging.lines_to_device(array.data.ptr, lines, stream)
        elif data.size:
            array.set(np.asarray(data, order=order_of(array)))

    def store(self, array: Any, out: np.ndarray[Any, Any]) -> None:
        """Copies an array of the device to the host; returns when it is there."""
        memory = flat(out) if out.nbytes >= _DIRECT else None
        stream = self._cupy.cuda.get_current_stream()
        if memory is not None and _lies_as(array, out) and self._straight(memory):
            for _, start, count in self._parts(memory):
                self._link.download(memory[start : start + count], array.data.ptr + start, stream)
            stream.synchronize()
        elif memory is not None and _lies_as(array, out):
            self._staging.to_host(memory, array.data.ptr, stream)
        elif out.nbytes >= _DIRECT and out.ndim > 1 and (array.flags.c_contiguous or array.flags.f_contiguous):
            lines = _as_c(array, out)
            if (memory := self._straight_lines(lines)) is not None:
                self._start_lines(array, lines, memory, up=False)
                stream.synchronize()
            else:
                self._staging.lines_to_host(lines, array.data.ptr, stream)
        elif out.flags.c_contiguous or out.flags.f_contiguous:
            if out.size:
                array.get(out=out, order=order_of(out))
        else:  # part of a result
            out[...] = array.get(order=order_of(out))

    def _straight(self, memory: Bytes) -> bool:
        """Whether the device may copy from and to that memory itself, by parts (`_parts`)."""
        if self._registered is not None and self._registered.covers(memory):
            return True
        return self._arena is not None and self._arena.registered(memory)

    def _straight_lines(self, lines: np.ndarray[Any, Any]) -> Bytes | None:
        """Return the memory from the first element of a window of a matrix to its last, if the device may copy from and
        to it itself, and its rows are long enough that this is faster than the ring.
        """
        if lines.ndim > _MATRIX or lines.strides[1] != lines.itemsize or lines.shape[1] * lines.itemsize < _LINE:
            return None
        rows, pitch = lines.shape[0], lines.strides[0]
        if pitch < lines.shape[1] * lines.itemsize:
            return None
        nbytes = (rows - 1) * pitch + lines.shape[1] * lines.itemsize
        memory: Bytes = np.lib.stride_tricks.as_strided(lines[0].view(np.uint8), (nbytes,), (1,))
        return memory if self._straight(memory) else None

    def _start_lines(self, array: Any, lines: np.ndarray[Any, Any], memory: Bytes, *, up: bool) -> None:
        """Start to copy the rows of a window, whose memory that is, from or to an array of the device, where they lie
        one after the other: as many by one copy as lie in one part, and such a row by itself as lies in two.
        """
        runtime, stream = self._cupy.cuda.runtime, self._cupy.cuda.get_current_stream().ptr
        kind = runtime.memcpyHostToDevice if up else runtime.memcpyDeviceToHost
        rows, width, pitch = lines.shape[0], lines.shape[1] * lines.itemsize, lines.strides[0]
        host, device = memory.ctypes.data, array.data.ptr
        done = 0
        for _, start, nbytes in self._parts(memory):
            end = start + nbytes
            count = min(rows, (end - width) // pitch + 1) - done
            if count > 0:
                ways = [(device + done * width, width), (host + done * pitch, pitch)]
                target, source = ways if up else reversed(ways)
                runtime.memcpy2DAsync(*target, *source, width, count, kind, stream)
                done += count
            if done < rows and done * pitch < end:
                for address, begin, some in self._parts(memory[done * pitch :][:width]):
                    there = device + done * width + begin
                    runtime.memcpyAsync(*((there, address) if up else (address, there)), some, kind, stream)
                done += 1

    def write(self, array: Any, start: int, target: Bytes) -> None:
        """Start to copy bytes of a contiguous array of the device, from byte `start` on, to the host; where the host's
        memory is not known to the driver they are there when this returns.
        """
        source, stream = array.data.ptr + start, self._cupy.cuda.get_current_stream()
        if self._arena is None or not self._arena.registered(target):
            self._staging.to_host(target, source, stream)
            return
        for position, piece in self._arena.pieces(target):
            self._link.download(piece, source + position, stream)

    def start_load(self, array: Any, memory: Bytes) -> None:
        """Start to copy a contiguous array to the device, behind what the current stream has been given, from memory
        of the host, which is read by the time that all is over which the stream has been given by then.
        """
        runtime, stream = self._cupy.cuda.runtime, self._cupy.cuda.get_current_stream().ptr
        target = array.data.ptr
        for source, start, count in self._parts(memory):
            runtime.memcpyAsync(target + start, source, count, runtime.memcpyHostToDevice, stream)

    def start_store(self, array: Any, memory: Bytes, start: int = 0) -> None:
        """Start to copy bytes of a contiguous array of the device, from byte `start` on, to the host: they are there
        once all is over that the current stream has been given by then. Where the driver does not know the host's
        memory it waits for that itself; other threads go on meanwhile.
        """
        runtime, stream = self._cupy.cuda.runtime, self._cupy.cuda.get_current_stream().ptr
        source = array.data.ptr + start
        for target, position, count in self._parts(memory):
            runtime.memcpyAsync(target, source + position, count, runtime.memcpyDeviceToHost, stream)

    def _parts(self, memory: Bytes) -> list[tuple[int, int, int]]:
        """Return address, offset and bytes of the parts of the host's memory that one copy may go to or from."""
        address = memory.ctypes.data
        parts = ((0, memory.size),) if self._arena is None else self._arena.cut(address, memory.size)
        return [(address + start, start, count) for start, count in parts]

    def mark(self) -> Any:
        """Return an event behind what was enqueued on the current stream."""
        event = self._link.event()
        event.record(self._cupy.cuda.get_current_stream())
        return event

    def wait(self, mark: Any) -> None:
        """Return when all before a mark is over, without keeping a processor busy."""
        mark.synchronize()

    def fetch(self, array: Any) -> np.ndarray[Any, Any]:
        """Return a copy in memory of this process, lying as the array does. Raises MemoryError."""
        if array.nbytes >= _LARGE and array.nbytes > (left := psutil.virtual_memory().available):
            # The system would grant it, and end some process once it is filled.
            raise MemoryError(f"{array.nbytes} bytes for an array that has to leave the device, and {left} are left")
        out = np.empty(array.shape, array.dtype, order=order_of(array))
        self.store(array, out)
        return out

    def prepared(
        self, params: GemmParams | GemmReduceParams, operands: Mapping[str, HostArray], copies: Mapping[str, Any]
    ) -> dict[str, Any]:
        """`copies`, with what was prepared of A and B in the place of those that come again and again.

        A product of prepared operands has the same bits.
        """
        found = dict(copies)
        sides = [side for side in ("a", "b") if self.resident.uses(operands[side].cache_id) >= AGAIN]
        if not sides:
            return found
        keys = tuple((name, ArrayKey.of(operand.data)) for name, operand in operands.items())
        compute: str | None = cached(_prepared_by, params, keys, self._spec)
        if compute is None:
            return found
        for side in sides:
            if self.keeps_form(copies[side].nbytes, compute):
                found[side] = self._form(form_key(side, params, compute), operands[side], copies[side])
        return found

    def keeps_form(self, nbytes: int, compute: str) -> bool:
        """Whether a form of an array of so many bytes would be kept beside its copy: else it would be prepared each
        time.
        """
        return (1 + _FORM_SIZES.get(compute, 1)) * nbytes <= self.resident.budget

    def _form(self, key: tuple[str, str, str, str], operand: HostArray, copy: Any) -> Any:
        options = dict(zip(("side", "compute", "trans", "layout"), key, strict=True))
        return self.resident.get(
            operand.cache_id,
            copy.nbytes,
            lambda: self._whole(prepare(copy, **options)),
            form=key,
            measure=lambda form: form.nbytes,
        )


def form_key(side: str, params: GemmParams | GemmReduceParams, compute: str) -> tuple[str, str, str, str]:
    """Return what an operand is prepared for: the side, compute mode (`Plan.prepared_by`), transposition and layout."""
    return side, compute, params.trans_a if side == "a" else params.trans_b, params.layout


def order_of(array: Any) -> Literal["C", "F"]:
    """Return the order of an array's memory, NumPy's or CuPy's; of a part of an array, that of the whole."""
    if array.flags.c_contiguous or array.ndim < 2:
        return "C"
    return "F" if array.flags.f_contiguous or array.strides[-2] < array.strides[-1] else "C"


def _lies_as(array: Any, out: np.ndarray[Any, Any]) -> bool:
    return bool(array.dtype == out.dtype and array.strides == out.strides)


def _as_c(array: Any, data: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return a view of an array of the host whose C order is the order in which one of the device lies."""
    if array.flags.c_contiguous:
        return data
    return data.T  # F order: all axes turned


def _prepared_by(
    params: GemmParams | GemmReduceParams, operands: tuple[tuple[str, ArrayKey], ...], spec: DeviceSpec
) -> str | None:
    chosen = plan(build(params, {name: Operand.of(key) for name, key in operands}), spec)
    return chosen.prepared_by(params.compute)
