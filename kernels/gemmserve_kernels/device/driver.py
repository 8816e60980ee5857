"""The few calls of the CUDA driver that CuPy does not offer or that are cheaper without it, through ctypes.

Every function works on the current context of the thread. Errors are DeviceError. (CUDA driver API, sections on
execution control, memory, graph and stream management, tensor maps; structures of cuda.h.)
"""

from __future__ import annotations

import ctypes
import weakref
from functools import cache
from typing import Any, Final, NamedTuple

from gemmserve_kernels.problem.errors import DeviceError

_LIBRARIES: Final = ("libcuda.so.1", "nvcuda.dll")
_EARLY_START: Final = 6
"""CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION."""


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute; of the union its first word."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_int), ("rest", ctypes.c_char * 60))


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("attribute_count", ctypes.c_uint),
    )

    @classmethod
    def of(cls, grid: int, block: int, shared: int, *, dependent: bool = False) -> LaunchConfig:
        """`grid` blocks of `block` threads. `dependent`: the kernel may start before the one ahead of it has ended, and
        waits for that itself (programmatic dependent launch, CUDA C++ programming guide 4.5).
        """
        config = cls((grid, 1, 1), (block, 1, 1), shared)
        if dependent:
            config.attributes = ctypes.pointer(_Attribute(_EARLY_START, b"", 1))
            config.attribute_count = 1
        return config


@cache
def _function(name: str) -> Any:
    for library in _LIBRARIES:
        try:
            return getattr(ctypes.CDLL(library), name)
        except (OSError, AttributeError):
            continue
    raise DeviceError(f"the CUDA driver has no {name}")


def check(code: int, what: str) -> None:
    """Raises DeviceError unless the driver's answer to `what` is success."""
    if not code:
        return
    text = ctypes.c_char_p()
    _function("cuGetErrorString")(code, ctypes.byref(text))
    raise DeviceError(f"{what}: error {code} of the CUDA driver ({(text.value or b'unknown').decode()})")


class QuickCalls(NamedTuple):
    """Calls that return at once and keep the interpreter meanwhile, each an int: 0 for success.

    A call that gives it up has to get it back: among a dozen threads that copy and start copies, that takes longer than
    what the call does.
    """

    to_device: Any
    """cuMemcpyHtoDAsync(address, host address of pinned memory, bytes, stream)."""
    to_host: Any
    """cuMemcpyDtoHAsync(host address of pinned memory, address, bytes, stream)."""
    record: Any
    """cuEventRecord(event, stream)."""
    query: Any
    """cuEventQuery(event): `NOT_READY` where what it was recorded after is under way."""


NOT_READY: Final = 600
"""CUDA_ERROR_NOT_READY."""


@cache
def quick_calls() -> QuickCalls | None:
    """Return those calls; None without a CUDA driver."""
    address, size = ctypes.c_void_p, ctypes.c_size_t
    for library in _LIBRARIES:
        try:
            found = ctypes.PyDLL(library)
            calls = QuickCalls(
                found.cuMemcpyHtoDAsync_v2, found.cuMemcpyDtoHAsync_v2, found.cuEventRecord, found.cuEventQuery
            )
        except (OSError, AttributeError):
            continue
        calls.to_device.argtypes = calls.to_host.argtypes = (address, address, size, address)
        calls.record.argtypes, calls.query.argtypes = (address, address), (address,)
        return calls
    return None


def argument(address: int) -> Any:
    """Return an address, or a handle, as `launcher` takes it. To make one costs as much as to convert an int at a call:
    they are kept.
    """
    return ctypes.c_void_p.from_param(address)


@cache
def launcher() -> Any:
    """cuLaunchKernelEx(config*, function, parameters**, extra**), each an `argument` or None: an int, 0 for success."""
    return _function("cuLaunchKernelEx")


@cache
def filler() -> Any:
    """cuMemsetD8Async(address, value, bytes, stream): an int, 0 for success."""
    function = _function("cuMemsetD8Async")
    function.argtypes = (ctypes.c_uint64, ctypes.c_ubyte, ctypes.c_size_t, ctypes.c_void_p)
    return function


def allocation_of(address: int) -> tuple[int, int]:
    """Return where the allocation begins that memory of a device is in, and its bytes (cuMemGetAddressRange)."""
    start, nbytes = ctypes.c_uint64(), ctypes.c_size_t()
    function = _function("cuMemGetAddressRange_v2")
    check(function(ctypes.byref(start), ctypes.byref(nbytes), ctypes.c_uint64(address)), "an allocation")
    return start.value, nbytes.value


@cache
def map_encoder() -> Any:
    """CuTensorMapEncodeTiled."""
    return _function("cuTensorMapEncodeTiled")


# ---- graphs


class _KernelNode(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = (
        ("function", ctypes.c_void_p),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("parameters", ctypes.c_void_p),
        ("extra", ctypes.c_void_p),
        ("kernel", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
    )


class _FillNode(ctypes.Structure):
    """CUDA_MEMSET_NODE_PARAMS."""

    _fields_ = (
        ("address", ctypes.c_uint64),
        ("pitch", ctypes.c_size_t),
        ("value", ctypes.c_uint),
        ("element", ctypes.c_uint),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    )


class _Edge(ctypes.Structure):
    """CUgraphEdgeData."""

    _fields_ = (
        ("from_port", ctypes.c_ubyte),
        ("to_port", ctypes.c_ubyte),
        ("type", ctypes.c_ubyte),
        ("reserved", ctypes.c_ubyte * 5),
    )


_AFTER: Final = (0, 0, 0)
"""Edge to a node that begins when the one ahead has ended."""
_EARLY: Final = (1, 0, 1)
"""Edge to a kernel that may begin before that and waits itself: CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC,
CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC."""
_PP: Final = (ctypes.c_void_p, ctypes.c_void_p)
_GRAPH_CALLS: Final[dict[str, tuple[Any, ...] | None]] = {
    "cuGraphCreate": (ctypes.c_void_p, ctypes.c_uint),
    "cuGraphAddKernelNode_v2": (*_PP, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p),
    "cuGraphAddMemsetNode": (*_PP, ctypes.c_void_p, ctypes.c_size_t, *_PP),
    "cuGraphAddDependencies_v2": (*_PP, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t),
    "cuGraphInstantiateWithFlags": (*_PP, ctypes.c_ulonglong),
    "cuGraphExecKernelNodeSetParams_v2": None,
    "cuGraphExecMemsetNodeSetParams": (*_PP, *_PP),
    "cuGraphLaunch": None,
    "cuGraphExecDestroy": (ctypes.c_void_p,),
    "cuGraphDestroy": (ctypes.c_void_p,),
    "cuStreamIsCapturing": None,
    "cuCtxGetCurrent": (ctypes.c_void_p,),
}
"""Types of their arguments; None: each is an `argument`."""


@cache
def _graph_calls() -> dict[str, Any] | None:
    """The functions by name, None where the driver is older than CUDA 12.3."""
    found = {}
    try:
        for name, types in _GRAPH_CALLS.items():
            found[name] = function = _function(name)
            function.argtypes = types
    except DeviceError:
        return None
    return found


class Stream:
    """A stream and what is asked of it at every call, by one thread at a time."""

    def __init__(self, handle: int) -> None:
        self.handle = handle
        self.argument = argument(handle)
        calls = _graph_calls()
        self._ask = None if calls is None else calls["cuStreamIsCapturing"]
        self._status = ctypes.c_int()
        self._asked = (self.argument, ctypes.byref(self._status))

    def is_capturing(self) -> bool:
        """Whether what is enqueued on it becomes part of a graph of the caller's, or might; of no other use where the
        driver is too old for graphs of ours. The legacy stream, 0, is never recorded (CUDA driver API,
        cuStreamBeginCapture), and not asked.
        """
        if not self.handle:
            return False
        return self._ask is None or self._ask(*self._asked) != 0 or self._status.value != 0


class Graph:
    """Kernels and fills one after another that one call of the driver enqueues. What they are given is copied when they
    are added, or set anew. Raises DeviceError where the driver is too old.

    The launches of one graph never overlap, on whatever streams; they have the priority of the stream.
    """

    def __init__(self) -> None:
        calls = _graph_calls()
        if calls is None:
            raise DeviceError("the CUDA driver is too old for graphs")
        self._calls = calls
        graph, context = ctypes.c_void_p(), ctypes.c_void_p()
        check(calls["cuGraphCreate"](ctypes.addressof(graph), 0), "a graph")
        self._graph = graph.value
        self._graph_gone = weakref.finalize(self, calls["cuGraphDestroy"], graph.value)
        self._graph_gone.atexit = False
        check(calls["cuCtxGetCurrent"](ctypes.addressof(context)), "the current context")
        self._context = context.value
        self._nodes: list[int | None] = []
        self._params: list[_KernelNode | _FillNode] = []
        self._at: list[int] = []  # addresses of these
        self._ready: int | None = None
        self._launched: Any = None
        self._set: list[tuple[Any, ...]] = []
        self._set_kernel = calls["cuGraphExecKernelNodeSetParams_v2"]
        self._launch = calls["cuGraphLaunch"]

    def add_kernel(self, config: LaunchConfig, function: int, pointer: int) -> None:
        """Adds the launch of `function` by `config`, its one argument where `pointer` points to a pointer to it."""
        params = _KernelNode(function, config.grid, config.block, config.shared, pointer)
        node = ctypes.c_void_p()
        add = self._calls["cuGraphAddKernelNode_v2"]
        code = add(ctypes.addressof(node), self._graph, None, 0, ctypes.addressof(params))
        self._add(code, node, params, _EARLY if config.attribute_count else _AFTER)

    def add_fill(self, address: int, nbytes: int) -> None:
        """Adds the zeroing of `nbytes` at `address`."""
        params = _FillNode(address, 0, 0, 1, nbytes, 1)
        node = ctypes.c_void_p()
        add = self._calls["cuGraphAddMemsetNode"]
        code = add(ctypes.addressof(node), self._graph, None, 0, ctypes.addressof(params), self._context)
        self._add(code, node, params, _AFTER)

    def _add(self, code: int, node: Any, params: Any, how: tuple[int, int, int]) -> None:
        check(code, "a node of a graph")
        if self._nodes:
            last, edge = ctypes.c_void_p(self._nodes[-1]), _Edge(*how)
            at = (ctypes.addressof(last), ctypes.addressof(node), ctypes.addressof(edge))
            check(self._calls["cuGraphAddDependencies_v2"](self._graph, *at, 1), "an edge of a graph")
        self._nodes.append(node.value)
        self._params.append(params)
        self._at.append(ctypes.addressof(params))

    def finish(self) -> None:
        """Makes it ready: nothing more is added."""
        ready = ctypes.c_void_p()
        check(self._calls["cuGraphInstantiateWithFlags"](ctypes.addressof(ready), self._graph, 0), "a graph")
        self._ready = ready.value
        weakref.finalize(self, self._calls["cuGraphExecDestroy"], ready.value).atexit = False
        self._launched = argument(ready.value or 0)
        self._set = [
            (self._launched, argument(node or 0), argument(at)) for node, at in zip(self._nodes, self._at, strict=True)
        ]

    def set_kernel(self, number: int) -> None:
        """Copies the argument of kernel `number`, counted among all that was added, once more."""
        if code := self._set_kernel(*self._set[number]):
            check(code, "arguments of a kernel in a graph")

    def set_fill(self, number: int, address: int) -> None:
        """Moves fill `number`, counted among all that was added."""
        params = self._params[number]
        params.address = address
        set_params = self._calls["cuGraphExecMemsetNodeSetParams"]
        code = set_params(self._ready, self._nodes[number], self._at[number], self._context)
        check(code, "a fill in a graph")

    def launch(self, stream: Stream) -> None:
        """Enqueues all of it."""
        if code := self._launch(self._launched, stream.argument):
            check(code, "launch of a graph")
