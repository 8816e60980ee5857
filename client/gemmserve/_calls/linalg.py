"""Linear algebra of the clients and of programs: which steps a call is, and what its result is. No I/O.

Every call is a method of all four classes: on a Client it computes, on an AsyncClient it is awaited, in a program it is
recorded.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from gemmserve import _errors
from gemmserve._handles.handle import ArrayHandle, base_of
from gemmserve._handles.view import Base
from gemmserve._transfer.arrays import as_array

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from gemmserve._calls.exchanges import Flow

Assume = Literal["general", "positive", "lower", "upper"]
Fill = Literal["both", "lower", "upper"]
Half = Literal["lower", "upper"]
Side = Literal["left", "right"]
Structure = Literal["triangular", "hermitian", "symmetric"]


@dataclass(frozen=True)
class Computation:
    """A call: one step, or the steps that `chain` records; `view`: what of the result is given."""

    op: str
    operands: Mapping[str, Any]
    params: Mapping[str, Any]
    made: Base | None
    view: Callable[[Any], Any] | None = None
    chain: Callable[[Any, Any, str | None], Flow[Any]] | None = field(default=None, compare=False)

    @property
    def remote(self) -> bool:
        """Whether any operand is on the server, or will be."""
        return any(isinstance(x, ArrayHandle) for x in self.operands.values())

    def record(self, program: Any, kind: Any, name: str | None) -> Flow[Any]:
        """Records it; returns the handle of the result. `kind`: the class of the program's handles."""
        if self.chain is not None:
            slot = yield from self.chain(program, kind, name)
        else:
            slot = yield from program._recorded_step(self.op, self.operands, self.params, self.made, name)
        made = kind(program, slot)
        return made if self.view is None else self.view(made)


class LinearAlgebra:
    """Methods of clients and programs. With an AsyncClient, and in its programs, they are awaited.

    NumPy in, NumPy out; with a remote array among the operands the result is one. Leading axes are batches. In a client
    `timeout` is as in `gemm`; in a program `name` is the step's id. float32, float64, complex64 and complex128, of
    `herk` float16 too. Results are checked where `verify` asks for it (docs/http.md says how); `expm` is not.
    """

    _several: Callable[..., Any]
    """Computes or records the steps of a Computation, with the options that only this class has."""

    def herk(
        self,
        a: Any,
        c: Any = None,
        *,
        alpha: float = 1,
        beta: float | None = None,
        fill: Fill = "both",
        compute: str = "auto",
        **options: Any,
    ) -> Any:
        """The Hermitian product alpha a a^H + beta c with about half of the work of a gemm; `alpha`, `beta` are real.

        `beta` is 1 where there is a c, unless it is given.
        `fill`: "both" triangles, or "lower" or "upper" alone, the other zero. `c` is taken to be Hermitian: only its
        lower triangle is read (its upper one for fill="upper"). `ra.H` as `a` gives a^H a. Raises what `gemm` raises.
        """
        if c is None and beta:
            raise _errors.ParameterInvalid("beta is not 0, but there is no c", problem={"parameter": "beta"})
        given = {"alpha": alpha, "beta": beta, "fill": fill, "compute": compute}
        default = {"alpha": 1, "beta": None, "fill": "both", "compute": "auto"}
        params = {name: value for name, value in given.items() if value != default[name]}
        operands = _operands(a=a, **({} if c is None else {"c": c}))
        made = _made(operands, lambda a, *_: (*a[:-1], a[-2]))
        return self._several(Computation("herk", operands, _real(params), made), **options)

    def solve(self, a: Any, b: Any, *, assume: Assume = "general", **options: Any) -> Any:
        """X of a X = b for square matrices `a`, as numpy.linalg.solve: a `b` of one dimension is a vector.

        `assume`: "general", "positive" (Hermitian positive definite: half the work; the lower triangle is read),
        "lower" or "upper" (triangular: the other triangle is not read). Raises SingularMatrix and NotPositiveDefinite
        (each a numpy.linalg.LinAlgError too) when the job ends, ShapeMismatch, DtypeUnsupported, and what `gemm`
        raises.
        """
        operands = _operands(a=a, b=b)
        of_b = base_of(operands["b"])
        vector = of_b is not None and len(of_b.shape) == 1
        if vector:
            operands["b"] = operands["b"][:, None]

        def shape(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
            _square(a)
            if a[-1] != b[-2]:
                raise ValueError(f"a {a} and b {b}: b must have as many rows as a")
            return (*np.broadcast_shapes(a[:-2], b[:-2]), *b[-2:])

        made = _made(operands, shape)
        view = (lambda x: x[..., 0]) if vector else None
        return self._several(Computation("solve", operands, _assumed(assume), made, view), **options)

    def inv(self, a: Any, *, assume: Assume = "general", **options: Any) -> Any:
        """The inverse of square matrices; `assume` and errors as in `solve`."""
        operands = _operands(a=a)
        made = _made(operands, _square)
        return self._several(Computation("inv", operands, _assumed(assume), made), **options)

    def cholesky(self, a: Any, **options: Any) -> Any:
        """The lower L of a = L L^H, as numpy.linalg.cholesky; only the lower triangle of `a` is read.

        Raises NotPositiveDefinite (numpy.linalg.LinAlgError too) when the job ends, and as `inv`.
        """
        operands = _operands(a=a)
        return self._several(Computation("cholesky", operands, {}, _made(operands, _square)), **options)

    def expm(self, a: Any, **options: Any) -> Any:
        """The matrix exponential, as scipy.linalg.expm, by scaling and squaring (N. Higham, 2005). Raises as `inv`."""
        operands = _operands(a=a)
        return self._several(Computation("expm", operands, {}, _made(operands, _square)), **options)

    def triangle(
        self,
        a: Any,
        fill: Half = "lower",
        *,
        structure: Structure = "triangular",
        unit: bool = False,
        **options: Any,
    ) -> Any:
        """The `fill` triangle of matrices, as numpy.tril and triu; the other triangle is not read.

        `structure` "hermitian" or "symmetric": the whole square matrix that the triangle stands for. `unit`: ones on
        the diagonal of a triangular one. float16 too. Raises ParameterInvalid, and as `inv`.
        """
        operands = _operands(a=a)
        made = _made(operands, (lambda a: a) if structure == "triangular" else _square)
        given = {"fill": fill, "structure": structure, "unit": unit}
        return self._several(Computation("triangle", operands, given, made), **options)

    def hemm(self, a: Any, b: Any, *, side: Side = "left", fill: Half = "lower", **options: Any) -> Any:
        """Products a b of Hermitian matrices `a`, of which the `fill` triangle is read; side="right": b a.

        One job of two steps. Operands have two dimensions or more. Raises as `gemm`.
        """
        return self._structured(a, b, side, {"fill": fill, "structure": "hermitian"}, options)

    def trmm(
        self, a: Any, b: Any, *, side: Side = "left", fill: Half = "lower", unit: bool = False, **options: Any
    ) -> Any:
        """Products a b of triangular matrices `a`, of which the `fill` triangle is read, and not its diagonal where it
        is `unit`; else as `hemm`.
        """
        return self._structured(a, b, side, {"fill": fill, "unit": unit}, options)

    def _structured(self, a: Any, b: Any, side: str, params: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
        if side not in {"left", "right"}:
            raise _errors.ParameterInvalid(f'side is "left" or "right", not {side!r}', problem={"parameter": "side"})
        operands = _operands(a=a, b=b)

        def shape(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
            _square(a)
            left, right = (a, b) if side == "left" else (b, a)
            if left[-1] != right[-2]:
                raise ValueError(f"a {a} and b {b} with a on the {side} cannot be multiplied")
            return (*np.broadcast_shapes(a[:-2], b[:-2]), left[-2], right[-1])

        made = _made(operands, shape)
        of_a = _made({"a": operands["a"]}, _square)

        def chain(program: Any, kind: Any, name: str | None) -> Flow[Any]:
            slot = yield from program._recorded_step("triangle", {"a": operands["a"]}, params, of_a, None)
            factors = (kind(program, slot), operands["b"])
            left, right = factors if side == "left" else factors[::-1]
            return (yield from program._recorded_step("gemm", {"a": left, "b": right}, {}, made, name))

        return self._several(Computation("gemm", operands, {}, made, chain=chain), **options)

    def matrix_power(self, a: Any, n: int, **options: Any) -> Any:
        """The n-th power of square matrices by repeated squaring, as numpy.linalg.matrix_power; for negative n that of
        the inverse. One job of at most 2 log2(n) products.
        Raises TypeError unless `n` is an integer, and as `inv`.
        """
        power = operator.index(n)
        operands = _operands(a=a)
        made = _made(operands, _square)

        def chain(program: Any, kind: Any, name: str | None) -> Flow[Any]:
            return _powers(program, kind, operands["a"], power, made, name)

        return self._several(Computation("matrix_power", operands, {}, made, chain=chain), **options)


def _operands(**given: Any) -> dict[str, Any]:
    return {name: x if isinstance(x, ArrayHandle) else as_array(x, name) for name, x in given.items()}


def _made(operands: Mapping[str, Any], shape: Callable[..., tuple[int, ...]]) -> Base | None:
    """The result, where the operands are known: those that are still recorded may not be.

    Raises ShapeMismatch.
    """
    bases = [base_of(x) if getattr(x, "_recorded", False) else Base(x.shape, x.dtype) for x in operands.values()]
    known = [base for base in bases if base is not None]
    if len(known) < len(bases):
        return None
    if any(len(base.shape) < 2 for base in known):
        raise _errors.ShapeMismatch(f"matrices have two dimensions or more: {[base.shape for base in known]}")
    try:
        found = shape(*(base.shape for base in known))
    except ValueError as error:
        raise _errors.ShapeMismatch(str(error)) from None
    return Base(found, np.result_type(*(base.dtype.newbyteorder("=") for base in known)))


def _square(a: tuple[int, ...]) -> tuple[int, ...]:
    if a[-1] != a[-2]:
        raise ValueError(f"a {a} must be square, or a stack of square matrices")
    return a


def _assumed(assume: str) -> dict[str, Any]:
    return {} if assume == "general" else {"assume": assume}


def _real(params: dict[str, Any]) -> dict[str, Any]:
    """The parameters with their factors as JSON numbers. Raises ParameterInvalid."""
    for name in ("alpha", "beta"):
        if name not in params:
            continue
        try:
            value = float(params[name])
        except (TypeError, ValueError, OverflowError):
            value = np.nan
        if not np.isfinite(value):
            raise _errors.ParameterInvalid(
                f"{name} of herk must be a real, finite number, not {params[name]!r}", problem={"parameter": name}
            )
        params[name] = value
    return params


def _powers(program: Any, kind: Any, a: Any, n: int, made: Base | None, name: str | None) -> Flow[Any]:
    """Records a^n by squaring, from the leading digit of n on; returns the slot of the last step."""
    if n == 0:
        if made is None:
            raise _errors.ProgramError("the power 0 of a result whose shape is not known yet")
        identity = np.broadcast_to(np.eye(made.shape[-1], dtype=made.dtype), made.shape)
        return (yield from program._recorded_step("add", {"a": identity}, {}, made, name))
    if not isinstance(a, ArrayHandle):  # sent once
        ids = yield from program._uploaded({"a": a})
        a = kind._plain(program._client, ids["a"], base=made)
    power = abs(n)
    if n < 0:
        slot = yield from program._recorded_step("inv", {"a": a}, {}, made, name if power == 1 else None)
        a = kind(program, slot)
    elif n == 1:
        slot = yield from program._recorded_step("add", {"a": a}, {}, made, name)
    value = a
    products = "".join("s" if digit == "0" else "sa" for digit in f"{power:b}"[1:])
    for number, product in enumerate(products, 1):
        operands = {"a": value, "b": value if product == "s" else a}
        slot = yield from program._recorded_step("gemm", operands, {}, made, name if number == len(products) else None)
        value = kind(program, slot)
    return slot
