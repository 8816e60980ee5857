"""Many products in one exchange: what goes into it, and what comes back of each."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from gemmserve import _errors
from gemmserve._calls import params as _params
from gemmserve._calls import requests
from gemmserve._calls.exchanges import TEMPORARY_TTL_S
from gemmserve._handles.handle import ArrayHandle
from gemmserve._model import ArrayInfo
from gemmserve._transfer.arrays import as_array, filled_again, is_fortran, npy_header, sample
from gemmserve._transfer.bodies import Body, Whole, form_head, json_body, parse_json, part_head, receive_arrays
from gemmserve.wire import NPY, NPZ, format_npy_header

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from gemmserve._calls.exchanges import Flow
    from gemmserve._calls.flows import Flows
    from gemmserve._transfer.arrays import AnyArray

_ALIGNED: Final = 64
_TYPE: Final = f"Content-Type: {NPY}"
_MEMBER: Final = re.compile(r"(\w+)_(\d+)")
_PROBLEMS: Final = "problems.json"


@dataclass(frozen=True)
class Column:
    """One operand of every product: a list, or one array that all of them use."""

    name: str
    entries: list[Any]
    shared: bool
    stacked: bool = False
    """One local array whose first axis runs over the products."""

    @classmethod
    def of(cls, name: str, value: Any, layout: str) -> Column:
        """Return the column that `value` stands for: a list or tuple holds one operand a product, an array of more
        than two dimensions is a stack, anything else is shared.
        """
        if isinstance(value, ArrayHandle):
            return cls(name, [value], shared=True)
        if hasattr(value, "__array__") or isinstance(value, str) or not hasattr(value, "__iter__"):
            array = as_array(value, name)
            if array.ndim > (3 if layout == "planar" else 2):
                return cls(name, list(array), shared=False, stacked=True)
            return cls(name, [array], shared=True)
        entries: list[Any] = []
        samples = []
        for i, each in enumerate(value):
            entries.append(each if isinstance(each, ArrayHandle) else as_array(each, f"{name}[{i}]"))
            if not isinstance(value, list | tuple) and not isinstance(each, ArrayHandle):  # it may fill it again
                samples.append((i, entries[-1], sample(entries[-1])))
        for i, array, seen in samples:
            if sample(array) != seen:
                raise _errors.numbered(filled_again(name), i)
        return cls(name, entries, shared=False)


def columns(operands: Mapping[str, Any], layout: str) -> tuple[int, dict[str, Column]]:
    """Return the number of products, and their operands. Raises ShapeMismatch where lists differ in length."""
    found = {name: Column.of(name, value, layout) for name, value in operands.items() if value is not None}
    counts = {name: len(column.entries) for name, column in found.items() if not column.shared}
    if len(set(counts.values())) > 1:
        said = ", ".join(f"{name} has {count}" for name, count in counts.items())
        raise _errors.ShapeMismatch(f"a batch needs as many of each operand: {said}")
    return next(iter(counts.values()), 1), found


def batch_body(params: Mapping[str, Any], operands: Mapping[str, Column]) -> Body:
    """multipart/form-data: parameters first, then each operand as a stack or as .npy files one behind the other.

    Data begin at multiples of 64 bytes of the body, so that the server can use them where they land.
    """
    boundary = secrets.token_hex(16)
    parts: list[bytes | AnyArray] = [form_head(boundary, params)]
    nbytes = len(parts[0])
    for name, column in operands.items():
        head = part_head(boundary, name)
        pad = -(nbytes + len(head) + len(_TYPE) + 4) % _ALIGNED
        files = [f"{head}Content-Type:{' ' * pad} {NPY}\r\n\r\n".encode(), *_files(column)]
        parts += files
        nbytes += sum(len(part) if isinstance(part, bytes) else part.nbytes for part in files)
    parts.append(f"\r\n--{boundary}--\r\n".encode())
    return Body(f"multipart/form-data; boundary={boundary}", parts)


def _files(column: Column) -> Iterator[bytes | AnyArray]:
    """Matrices of one kind as one stack, which the server multiplies fastest; others one behind the other."""
    arrays: list[AnyArray] = column.entries
    if len(arrays) == 1 and not column.shared and is_fortran(arrays[0]):
        arrays = [np.ascontiguousarray(arrays[0])]  # one file alone would be a stack itself, or used by all
    first = arrays[0]
    alike = all(x.shape == first.shape and x.dtype.newbyteorder("=") == first.dtype.newbyteorder("=") for x in arrays)
    if not column.shared and alike and not any(map(is_fortran, arrays)):
        yield format_npy_header(first.dtype, (len(arrays), *first.shape))
        yield from arrays
        return
    for array in arrays:
        yield npy_header(array)
        yield array


def run_batch(
    flows: Flows,
    op: str,
    operands: Mapping[str, Any],
    params: Mapping[str, Any],
    *,
    timeout: float | None,
) -> Flow[list[Any]]:
    """The results in order: arrays, or ArrayInfos where any operand is remote; a dict by name where a product has
    several; a GemmserveError in the place of a product that failed.
    """
    count, found = columns(operands, params["layout"])
    encoded = _params.to_json(params)
    names = _result_names(op, params)
    if not count:
        return []
    if op == "gemm" and "c" not in found and encoded.get("beta"):
        raise _errors.ParameterInvalid("beta needs c", problem={"parameter": "beta"})
    query: dict[str, str | int | float] = {} if timeout is None else {"timeout_s": timeout}
    wait_s = requests.ONE_SHOT_WAIT_S if timeout is None else timeout
    if any(isinstance(x, ArrayHandle) for column in found.values() for x in column.entries):
        results = yield from _remote(flows, op, found, encoded, count, query, wait_s)
        return [_one(names, result) for result in results]
    request: requests.Request[AnyArray | dict[str, Any]] = requests.Request(
        "POST",
        "/v1/batch",
        receive_arrays,
        query=query,
        headers={"Accept": f"{NPY}, {NPZ}"},
        body=batch_body({"op": op, **encoded}, found),
        label="batch",
        wait_s=wait_s,
    )
    received = yield from flows.call(request)
    return [_one(names, result) for result in _split(received, names, count)]


def _result_names(op: str, params: Mapping[str, Any]) -> list[str] | str:
    """Return the names of a product's results; a string: there is one, which is answered bare."""
    if op == "gemm":
        return "d"
    reduce = params["reduce"]
    if isinstance(reduce, str) and not params.get("return_c"):
        return reduce
    return [*([reduce] if isinstance(reduce, str) else map(str, reduce)), *(["c"] if params.get("return_c") else [])]


def _one(names: list[str] | str, result: Any) -> Any:
    """A product's result from its results by name; an error stays one."""
    return result[names] if isinstance(names, str) and isinstance(result, Mapping) else result


def _split(received: AnyArray | dict[str, Any], names: list[str] | str, count: int) -> list[Any]:
    wanted = [names] if isinstance(names, str) else names
    if not isinstance(received, dict):
        received = {wanted[0]: received}
    problems = json.loads(received.pop(_PROBLEMS, b"{}"))
    results: list[Any] = [{} for _ in range(count)]
    for member, array in received.items():
        match = _MEMBER.fullmatch(member)
        if match is None:
            for result, part in zip(results, array, strict=False):
                result[member] = part
        elif int(match[2]) < count:
            results[int(match[2])][match[1]] = array
    for number, problem in problems.items():
        results[int(number)] = _errors.from_problem(problem)
    if any(isinstance(result, dict) and result.keys() != set(wanted) for result in results):
        raise _errors.ProtocolError("the answer lacks the results of some products")
    return results


def _remote(
    flows: Flows,
    op: str,
    found: Mapping[str, Column],
    encoded: dict[str, Any],
    count: int,
    query: Mapping[str, str | int | float],
    wait_s: float,
) -> Flow[list[Any]]:
    """Compute the products by a JSON request; local operands are stored until it is answered."""

    def document(temporaries: list[str]) -> Flow[Any]:
        copies = yield from _copied(flows, found, temporaries)
        refs: dict[str, list[dict[str, Any]]] = {}
        for name, column in found.items():
            refs[name] = []
            for entry in column.entries:
                if id(entry) in copies:
                    refs[name].append({name: copies[id(entry)]})
                    continue
                if isinstance(entry, ArrayHandle):
                    refs[name].append(_reference(name, entry, encoded))
                    continue
                info = yield from flows.put(entry, ttl_s=TEMPORARY_TTL_S)
                temporaries.append(info.id)
                refs[name].append({name: info.id})
        items: list[dict[str, Any]] = []
        for i in range(count):
            item: dict[str, Any] = {}
            for name, column in found.items():
                item |= refs[name][0 if column.shared else i]
            items.append(item)
        request: requests.Request[Any] = requests.Request(
            "POST",
            "/v1/batch",
            lambda _headers: Whole(parse_json),
            query=query,
            body=json_body({"params": {"op": op, **encoded}, "items": items, "results": "each"}),
            wait_s=wait_s,
        )
        return (yield from flows.call(request))

    return _told((yield from flows.with_temporaries(document)), count)


def _copied(flows: Flows, found: Mapping[str, Column], temporaries: list[str]) -> Flow[dict[int, str]]:
    """Copy the views that no flag expresses, by one program, for the items of a batch name whole arrays alone. Returns
    ids by the handles' identities. Raises JobFailed and what `Client.gemm` raises.
    """
    entries = [(name, x) for name, column in found.items() for x in column.entries if isinstance(x, ArrayHandle)]
    views = {id(x): x for name, x in entries if isinstance(x._operand(trans=None if name == "c" else "N")[0], dict)}
    if not views:
        return {}
    steps = [{"id": f"s{i}", "op": "add", "a": x._operand()[0]} for i, x in enumerate(views.values())]
    info = yield from flows.run_job({"op": "program", "steps": steps, "ttl_s": TEMPORARY_TTL_S}, timeout=None)
    if info.state != "succeeded":
        raise _errors.from_problem(info.error or {"type": "job-failed", "detail": f"job {info.id} is {info.state}"})
    temporaries += info.result.values()
    return {key: info.result[f"s{i}"] for i, key in enumerate(views)}


def _reference(name: str, handle: ArrayHandle[Any], encoded: Mapping[str, Any]) -> dict[str, Any]:
    if name == "c":
        return {"c": handle._operand()[0]}
    field = f"trans_{name}"
    given = encoded.get(field, "N")
    operand, trans = handle._operand(trans=given)
    return {name: operand} | ({} if trans == given else {field: trans})


def _told(document: Any, count: int) -> list[Any]:
    try:
        infos = {info["id"]: ArrayInfo.parse(info) for info in document["arrays"]}
        results: list[Any] = [
            {name: infos[array_id] for name, array_id in item["result"].items()}
            if item["state"] == "succeeded"
            else _errors.from_problem(item["error"])
            for item in document["items"]
        ]
    except (KeyError, TypeError, AttributeError) as error:
        raise _errors.ProtocolError(f"the answer is no batch's: {error!r}") from error
    if len(results) != count:
        raise _errors.ProtocolError(f"the answer tells of {len(results)} products, {count} were asked for")
    return results


def check(results: Sequence[Any], errors: str) -> None:
    """Raises the first product's error, naming it, unless `errors` is "return". Raises ParameterInvalid for others."""
    if errors not in {"raise", "return"}:
        raise _errors.ParameterInvalid(f'errors is "raise" or "return", not {errors!r}')
    if errors == "return":
        return
    for number, result in enumerate(results):
        if isinstance(result, _errors.APIError):
            failed = sum(isinstance(each, _errors.GemmserveError) for each in results)
            note = f"product {number}: {result.detail}" + (
                f" ({failed} of {len(results)} failed)" if failed > 1 else ""
            )
            raise _errors.from_problem({**result.problem, "detail": note, "item": number})


def with_handles(result: Any, handle: Callable[[ArrayInfo], Any]) -> Any:
    """A result with a handle in the place of each stored array's info."""
    if isinstance(result, ArrayInfo):
        return handle(result)
    if isinstance(result, dict):
        return {name: with_handles(each, handle) for name, each in result.items()}
    return result
