"""Programs as a client sends them."""

from __future__ import annotations

from pydantic import TypeAdapter

from gemmserve_service.schemas import JobRequest

REQUEST = TypeAdapter(JobRequest)


def step(name, a, b, op="gemm", **fields):
    ids = {operand: array if isinstance(array, str) else array.id for operand, array in (("a", a), ("b", b))}
    return {"id": name, "op": op, **ids, **fields}


def program(*steps, **fields):
    return REQUEST.validate_python({"op": "program", "steps": list(steps), **fields}, strict=True)


def powers(a, count=3, **fields):
    """x2, x4, x8 ..."""
    steps = [step("x1", a, a), *(step(f"x{n}", f"$x{n - 1}", f"$x{n - 1}") for n in range(2, count + 1))]
    return program(*steps, **fields)
