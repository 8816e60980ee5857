"""Submissions: products as a caller asks for them, checked before anything is sent."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from gemmserve import _errors
from gemmserve._calls.params import check_shapes, compose, results_of, to_json
from gemmserve._handles.handle import ArrayHandle, base_of
from gemmserve._transfer.arrays import as_array, filled_again, sample

if TYPE_CHECKING:
    from gemmserve._handles.view import Base
    from gemmserve._transfer.arrays import AnyArray

Asked: TypeAlias = tuple[str, Mapping[str, Any], Mapping[str, Any]]
"""Operation, operands and encoded parameters of a job, as `submission` gives them."""

Expected: TypeAlias = "Callable[[], Mapping[str, Base | None]]"
"""Function that returns what the results of a product are, by name, where that follows from its operands."""

Sampled: TypeAlias = "tuple[int, str, AnyArray, bytes]"
"""Number of a product, name of a local operand, the array, and some of its elements when it was given."""


def prepare(
    op: str, operands: Mapping[str, Any], params: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any], bool]:
    """(operands without None, parameters as JSON, whether any is remote); local ones checked before anything is sent.

    Raises DtypeUnsupported, ShapeMismatch, ParameterInvalid.
    """
    present = {name: x for name, x in operands.items() if x is not None or name != "c"}
    checked = {name: x if isinstance(x, ArrayHandle) else as_array(x, name) for name, x in present.items()}
    trans = {name: compose(params[name], transposed=False, conjugated=False) for name in ("trans_a", "trans_b")}
    remote = any(isinstance(x, ArrayHandle) for x in checked.values())
    if not remote:
        c = checked.get("c")
        check_shapes(
            checked["a"].shape,
            checked["b"].shape,
            None if c is None else c.shape,
            trans_a=trans["trans_a"],
            trans_b=trans["trans_b"],
            layout=params["layout"],
        )
    encoded = to_json(params)
    if op == "gemm" and "c" not in checked and encoded.get("beta"):
        raise _errors.ParameterInvalid("beta needs c", problem={"parameter": "beta"})
    return checked, encoded, remote


def submission(
    op: str, operands: Mapping[str, Any], params: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(operands, parameters as JSON) of `submit`. Raises as `prepare` does, and ParameterInvalid for `op`."""
    if op not in {"gemm", "gemm_reduce"}:
        raise _errors.ParameterInvalid(f'op must be "gemm" or "gemm_reduce", not {op!r}', problem={"parameter": "op"})
    if op == "gemm_reduce" and operands.get("c") is not None:
        raise _errors.ParameterInvalid("gemm_reduce has no c", problem={"parameter": "c"})
    defaults = {"trans_a": "N", "trans_b": "N", "layout": "interleaved"}
    present, encoded, _ = prepare(op, operands, {**defaults, **params})
    return present, encoded


def submission_of(asked: Mapping[str, Any]) -> Asked:
    """`submission` of a mapping of `Client.submit`'s arguments by name. Raises as that does."""
    params = dict(asked)
    missing = [name for name in ("op", "a", "b") if name not in params]
    if missing:
        raise _errors.ParameterInvalid(f"{missing[0]} is missing", problem={"parameter": missing[0]})
    op = params.pop("op")
    operands = {name: params.pop(name, None) for name in ("a", "b", "c")}
    return (op, *submission(op, operands, params))


def expected_of(op: str, operands: Mapping[str, Any], params: Mapping[str, Any]) -> Expected:
    """The results of a product that the server has accepted. It holds no operand."""
    bases: dict[str, Base | None] = {}
    for name, x in operands.items():
        whole = isinstance(x, ArrayHandle) and x._view is None  # as it is stored: what is known of it will do
        bases[name] = x._known if whole else base_of(x)
    return partial(results_of, op, bases, params)


def sampled(number: int, asked: Asked) -> list[Sampled]:
    """The local operands of a product, for `filled`."""
    return [(number, name, x, sample(x)) for name, x in asked[1].items() if isinstance(x, np.ndarray)]


def filled(samples: Iterable[Sampled]) -> Iterator[tuple[int, _errors.ParameterInvalid]]:
    """The products whose operands an iterator has filled again since they were sampled: all are sent together, and
    earlier products would be computed from later elements.
    """
    for number, name, array, seen in samples:
        if sample(array) != seen:
            yield number, filled_again(name)


def submissions(asked: Iterable[Mapping[str, Any]]) -> list[Asked]:
    """`submission` of each. Raises as that does, and what `filled` finds; `problem["item"]` is the number of the one
    that is wrong.
    """
    found: list[Asked] = []
    samples: list[Sampled] = []
    for number, given in enumerate(asked):
        try:
            found.append(submission_of(given))
        except _errors.APIError as error:
            _errors.numbered(error, number)
            raise
        samples += sampled(number, found[-1])
    for number, changed in filled(samples):
        raise _errors.numbered(changed, number)
    return found
