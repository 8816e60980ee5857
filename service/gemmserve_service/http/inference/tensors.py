"""An inference's JSON, and that of its answer."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from gemmserve_kernels import Operand
from gemmserve_service import products
from gemmserve_service.errors import BodyTooLong, BodyTooShort, InvalidParameters, TooLarge
from gemmserve_service.http.inference.datatypes import operand_dtype, tensor_of
from gemmserve_service.http.inference.json_data import cut_data, read_data, write_data
from gemmserve_service.http.inference.messages import InferenceRequest
from gemmserve_service.http.inference.paths import DEFAULT_PRIORITY, INPUTS, PRIORITIES, VERSION
from gemmserve_service.http.requests.strict_json import parse_object, validate
from gemmserve_service.schemas import GemmParams, GemmReduceParams
from gemmserve_service.store.declared import Declared

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gemmserve_service.http.inference.messages import InputTensor, OutputRequest, SharedMemoryParameters
    from gemmserve_service.runtime.yielding import Turns
    from gemmserve_service.store.pin import Pinned

MAX_JSON: Final = 4 << 20
"""Bytes of a request's JSON: what is longer is sent as binary data."""
MAX_JSON_ELEMENTS: Final = 1 << 18
"""Elements of an output that is answered as JSON."""

_MAX_TIMEOUT_US: Final = 86_400_000_000
_PARAMS: Final[dict[str, type[GemmParams | GemmReduceParams]]] = {"gemm": GemmParams, "gemm_reduce": GemmReduceParams}


@dataclass(frozen=True)
class Place:
    """Place of a tensor in a registered region, in bytes."""

    region: str
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Input:
    """An input: its elements are in `data`, in `place`, or, of neither, behind the JSON."""

    declared: Declared
    data: bytes | None
    """JSON of an array."""
    place: Place | None


@dataclass(frozen=True)
class Output:
    """An output, how it is answered, and the tensor that it will be."""

    name: str
    binary: bool
    place: Place | None
    datatype: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class Inference:
    """A request, every check of it made that takes no binary data."""

    model: str
    id: str | None
    params: GemmParams | GemmReduceParams
    inputs: dict[str, Input]
    """In the order in which their binary data come."""
    outputs: tuple[Output, ...]
    priority: int
    """As `Task.priority`: the higher goes first."""
    timeout_s: float | None

    @property
    def binary_size(self) -> int:
        """Bytes of the binary data behind the JSON."""
        return sum(each.declared.nbytes for each in self.inputs.values() if each.data is None and each.place is None)


async def read_inference(model: str, text: bytearray, turns: Turns) -> Inference:
    """Read the JSON of a request, but for the numbers of its tensors.

    Raises MalformedJson, BodyLength (400), TooLarge (413), InvalidParameters, NpyDtypeError, KernelError (422).
    """
    head, arrays = await cut_data(text, turns)
    request: InferenceRequest = validate(InferenceRequest, parse_object(head))
    options = dict(request.parameters)
    is_complex = _option(options, "complex", bool, default=False)
    binary = _option(options, "binary_data_output", bool, default=False)
    priority = _option(options, "priority", int, default=0)
    timeout_us = _option(options, "timeout", int, default=0)
    if not 0 <= priority <= PRIORITIES:
        raise _invalid("priority", f"1, the highest, to {PRIORITIES}; 0 is {DEFAULT_PRIORITY}")
    if not 0 <= timeout_us <= _MAX_TIMEOUT_US:
        raise _invalid("timeout", f"microseconds, {_MAX_TIMEOUT_US} at most; 0 is the server's own")
    if "order" in options:
        raise _invalid("order", "tensors of this protocol are row-major")
    params: GemmParams | GemmReduceParams = validate(_PARAMS[model], options)
    inputs = _inputs(INPUTS[model], request.inputs, arrays, is_complex=is_complex)
    operands = {
        name: Operand.contiguous(each.declared.shape, each.declared.dtype, "C") for name, each in inputs.items()
    }
    made = products.outputs(products.build(params, operands))
    return Inference(
        model,
        request.id,
        params,
        inputs,
        _outputs(request.outputs, made, binary=binary),
        DEFAULT_PRIORITY - (priority or DEFAULT_PRIORITY),
        timeout_us / 1e6 if timeout_us else None,
    )


def _option(options: dict[str, Any], name: str, kind: type, *, default: Any) -> Any:
    """Take a parameter of the protocol's own out of `options`."""
    value = options.pop(name, default)
    if type(value) is not kind:
        raise _invalid(name, {bool: "true or false is wanted", int: "an integer is wanted"}[kind])
    return value


def _invalid(field: str, message: str) -> InvalidParameters:
    return InvalidParameters(f"{field}: {message}", [{"field": field, "message": message}])


def _inputs(
    names: Sequence[str], given: Sequence[InputTensor], arrays: Sequence[bytes], *, is_complex: bool
) -> dict[str, Input]:
    inputs: dict[str, Input] = {}
    for tensor in given:
        if tensor.name not in names:
            raise _invalid("inputs", f"no input is called {tensor.name[:40]!r}; there are {', '.join(names)}")
        if tensor.name in inputs:
            raise _invalid("inputs", f"{tensor.name} is given twice")
        inputs[tensor.name] = _input(tensor, arrays, is_complex=is_complex)
    missing = [name for name in ("a", "b") if name not in inputs]
    if missing:
        raise _invalid("inputs", f"{' and '.join(missing)} missing")
    return inputs


def _input(tensor: InputTensor, arrays: Sequence[bytes], *, is_complex: bool) -> Input:
    dtype = operand_dtype(tensor.datatype, is_complex=is_complex)
    shape = tuple(tensor.shape)
    if is_complex:
        if shape[-1:] != (2,):
            raise _invalid(tensor.name, f"a complex tensor has a trailing dimension of 2, not {list(shape)}")
        shape = shape[:-1]
    nbytes = math.prod(shape) * dtype.itemsize
    declared = Declared(dtype, shape, "C", nbytes)
    place = _place(tensor.name, tensor.parameters)
    size = tensor.parameters.binary_data_size
    sources = (tensor.data is not None, size is not None, place is not None)
    if sum(sources) != 1:
        raise _invalid(
            tensor.name, "one of data, binary_data_size and shared_memory_region says where its elements are"
        )
    if place is not None:
        size = place.nbytes
    if size is not None and size != nbytes:
        text = f"{tensor.name}: {tensor.datatype} of shape {tensor.shape} has {nbytes} bytes, not {size}"
        raise (BodyTooShort if size < nbytes else BodyTooLong)(text)
    return Input(declared, None if tensor.data is None else _array(tensor, arrays), place)


def _array(tensor: InputTensor, arrays: Sequence[bytes]) -> bytes:
    """Text of the array that `cut_data` has put a number in the place of. Raises InvalidParameters."""
    found = tensor.data
    if isinstance(found, list) and len(found) == 1 and type(found[0]) is int and 0 <= found[0] < len(arrays):
        return arrays[found[0]]
    raise _invalid(tensor.name, "data is an array of numbers, flat or nested as the shape says")


def _place(name: str, parameters: SharedMemoryParameters) -> Place | None:
    region, size = parameters.shared_memory_region, parameters.shared_memory_byte_size
    if (region is None) != (size is None) or (region is None and parameters.shared_memory_offset):
        raise _invalid(name, "shared_memory_region and shared_memory_byte_size belong together")
    return None if region is None or size is None else Place(region, parameters.shared_memory_offset, size)


async def elements(tensor: Input, name: str, turns: Turns) -> np.ndarray[Any, Any]:
    """Bytes of the elements of an input that the JSON has. Raises InvalidParameters, MalformedJson."""
    assert tensor.data is not None
    datatype, shape, dtype = tensor_of(tensor.declared.dtype, tensor.declared.shape)
    found = await read_data(tensor.data, shape, name, turns)
    with np.errstate(over="ignore"):
        made = found.astype(dtype)
    if not np.array_equal(np.isinf(made), np.isinf(found)):
        raise _invalid(name, f"a number is too large for {datatype}")
    return made.view(np.uint8)


def _outputs(
    wanted: Sequence[OutputRequest],
    made: Mapping[str, tuple[tuple[int, ...], np.dtype[Any], str]],
    *,
    binary: bool,
) -> tuple[Output, ...]:
    """The outputs that are answered, in their order. Raises InvalidParameters, TooLarge."""
    if not wanted:
        return tuple(_output(name, made, binary=binary) for name in made)
    names = [each.name for each in wanted]
    for name in names:
        if name not in made:
            raise _invalid("outputs", f"no output is called {name[:40]!r}; there are {', '.join(made)}")
        if names.count(name) > 1:
            raise _invalid("outputs", f"{name} is wanted twice")
    return tuple(
        _output(
            each.name,
            made,
            binary=binary if each.parameters.binary_data is None else each.parameters.binary_data,
            place=_place(each.name, each.parameters),
        )
        for each in wanted
    )


def _output(
    name: str,
    made: Mapping[str, tuple[tuple[int, ...], np.dtype[Any], str]],
    *,
    binary: bool,
    place: Place | None = None,
) -> Output:
    shape, dtype, _ = made[name]
    nbytes = math.prod(shape) * dtype.itemsize
    datatype, shape, dtype = tensor_of(dtype, shape)
    if place is not None:
        if binary:
            raise _invalid(name, "an output is either in shared memory or binary data")
        if place.nbytes < nbytes:
            raise _invalid(name, f"it has {nbytes} bytes, and shared_memory_byte_size is {place.nbytes}")
    elif not binary and math.prod(shape) > MAX_JSON_ELEMENTS:
        raise TooLarge(
            f"{name} has {math.prod(shape)} elements, and JSON {MAX_JSON_ELEMENTS} at most: ask for binary_data"
        )
    return Output(name, binary, place, datatype, shape, nbytes)


async def answer_json(inference: Inference, results: Mapping[str, Pinned], turns: Turns) -> bytes:
    """JSON of the answer, with the elements of the outputs that are not elsewhere. Of outputs in shared memory it has
    the shapes alone, as tritonserver's has: perf_analyzer reads any parameters as those of binary data.
    """
    outputs = []
    for output in inference.outputs:
        entry: dict[str, Any] = {"name": output.name, "datatype": output.datatype, "shape": output.shape}
        if output.binary:
            entry["parameters"] = {"binary_data_size": output.nbytes}
        text = json.dumps(entry).encode("ascii")
        if not output.binary and output.place is None:
            pinned = results[output.name]
            _, _, dtype = tensor_of(np.dtype(pinned.info.dtype), ())
            text = text[:-1] + b', "data": ' + await write_data(np.frombuffer(pinned.view, dtype), turns) + b"}"
        outputs.append(text)
    document: dict[str, Any] = {"model_name": inference.model, "model_version": VERSION}
    if inference.id is not None:
        document["id"] = inference.id
    return json.dumps(document).encode("ascii")[:-1] + b', "outputs": [' + b", ".join(outputs) + b"]}"
