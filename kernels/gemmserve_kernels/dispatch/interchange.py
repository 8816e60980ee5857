"""Interchange with other array libraries: tensors come in by DLPack or `__cuda_array_interface__`, results go out as
tensors of the same library, in memory that is shared and on the stream that the caller works on.

DLPack: dmlc.github.io/dlpack (the Python specification, with its rules of streams); `__cuda_array_interface__` as of
version 3, which names the stream. Nothing moves between a host and a device.
"""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from gemmserve_kernels.problem.arrays import is_foreign
from gemmserve_kernels.problem.errors import DtypeUnsupported, ParameterInvalid

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

_HOST: Final = frozenset({1, 3, 11})
"""DLPack's device types of memory that this process reads: kDLCPU, kDLCUDAHost, kDLROCMHost."""
_GPU: Final = frozenset({2, 10, 13})
"""Those that a kernel reads: kDLCUDA, kDLROCM, kDLCUDAManaged."""


@contextlib.contextmanager
def interchanged(
    arrays: Mapping[str, Any], *, written: frozenset[str] = frozenset()
) -> Iterator[tuple[dict[str, Any], Callable[[Any], Any]]]:
    """Give the arrays as NumPy's or CuPy's, those of other libraries over the same memory, and a function that makes
    a result one of the library of the first that is of another. Work belongs inside the block: there CuPy's stream is
    the caller's.

    `written`: names of the arrays that take results. Raises ParameterInvalid for memory that is not of a host or one
    GPU, for arrays that may not be written, and for tensors that want gradients; DtypeUnsupported for elements that
    NumPy does not know (bfloat16).
    """
    foreign = {name: array for name, array in arrays.items() if is_foreign(array)}
    places = {name: _place(name, array) for name, array in foreign.items()}
    first = next(iter(foreign))
    for name, place in places.items():
        if place != places[first]:
            raise ParameterInvalid(f"{first} is on {_named(places[first])} and {name} is on {_named(place)}", name)
    with _stream(foreign[first], places[first]):
        natives = dict(arrays)
        for name, array in foreign.items():
            natives[name] = _native(name, array, places[name], written=name in written)
        yield natives, _exporter(foreign[first])


def _place(name: str, array: Any) -> int | None:
    """Return the number of the GPU that an array is on; None: it is in memory of the host."""
    if not hasattr(array, "__dlpack_device__"):
        import cupy

        pointer = array.__cuda_array_interface__["data"][0]
        return int(cupy.cuda.runtime.pointerGetAttributes(pointer).device) if pointer else int(cupy.cuda.Device().id)
    try:
        kind, number = array.__dlpack_device__()
    except (BufferError, ValueError):  # DLPack has no name for where it is
        kind = number = 0
    if int(kind) not in _HOST | _GPU:
        raise ParameterInvalid(f"{name} is in memory that is neither a host's nor a CUDA or ROCm device's", name)
    return int(number) if int(kind) in _GPU else None


def _named(place: int | None) -> str:
    return "the host" if place is None else f"GPU {place}"


@contextlib.contextmanager
def _stream(array: Any, place: int | None) -> Iterator[None]:
    """Make the stream that the array's library works on in this thread CuPy's."""
    if place is None:
        yield
        return
    import cupy

    pointer = _stream_of(array, place)
    with cupy.cuda.Device(place):
        if pointer is None:
            yield
            return
        with cupy.cuda.ExternalStream(pointer, place):
            yield


def _stream_of(array: Any, place: int) -> int | None:
    """Return the stream's handle; None: the library does not tell, and DLPack orders its work and CuPy's by events."""
    library = type(array).__module__.partition(".")[0]
    if library == "torch":
        return int(sys.modules["torch"].cuda.current_stream(place).cuda_stream)
    if not hasattr(array, "__dlpack__"):
        stream = array.__cuda_array_interface__.get("stream")
        # 1 and 2 are the legacy default stream and that of the thread, which CUDA knows by these handles.
        return None if stream is None else int(stream)
    return None


def _native(name: str, array: Any, place: int | None, *, written: bool) -> Any:
    """Return the NumPy or CuPy array over the same memory."""
    library = type(array).__module__.partition(".")[0]
    if library == "torch":
        array = _torch_memory(name, array, written=written)
    elif written and library in {"jax", "jaxlib"}:
        raise ParameterInvalid(f"{name} is an array of JAX, which may not be written", name)
    try:
        if place is None:
            found: Any = np.from_dlpack(array)
        else:
            import cupy

            found = cupy.from_dlpack(array) if hasattr(array, "__dlpack__") else cupy.asarray(array)
    except (BufferError, RuntimeError, TypeError) as error:
        described = getattr(array, "dtype", "elements of a dtype that is not known")
        raise DtypeUnsupported(f"{name} has {described}, which cannot be taken over without a copy: {error}") from error
    return found


def _torch_memory(name: str, tensor: Any, *, written: bool) -> Any:
    """Return a tensor that DLPack can describe: a lazily conjugated one is written out, which is torch's own way."""
    if tensor.requires_grad and sys.modules["torch"].is_grad_enabled():
        raise ParameterInvalid(
            f"{name} wants gradients, which this function does not know: use gemmserve_kernels.torch_ops, or "
            f"{name}.detach()",
            name,
        )
    if str(tensor.layout) != "torch.strided":
        raise ParameterInvalid(f"{name} is a sparse tensor", name)
    if written and (tensor.is_conj() or tensor.is_neg()):
        raise ParameterInvalid(f"{name} is a conjugated view, which takes no result", name)
    return tensor.detach().resolve_conj().resolve_neg()


def _exporter(array: Any) -> Callable[[Any], Any]:
    """Return a function that makes a NumPy or CuPy array one of the library of `array`, over the same memory."""
    if not hasattr(array, "__dlpack__"):
        return lambda result: result  # a CuPy array, which such libraries take by the same interface
    if hasattr(array, "__array_namespace__"):
        namespace = array.__array_namespace__()
    else:
        namespace = sys.modules[type(array).__module__.partition(".")[0]]
    exporter: Callable[[Any], Any] = namespace.from_dlpack
    return exporter
