"""What is asked of each kind of server: the same operands, framed the way that server's own best client frames them.

Operands are small integers, so that every order of summation gives the same product and answers can be compared.
Operations: `product` (n x n by n x n), `axpy` (A (n, 1) times B (1, 1), plus C (n, 1)), `echo` (A of A and C), `upload`
(A, to stay on the server in a place that was used before), `keep` (A, to stay in a new one), `job` (a product of arrays
that are on the server, whose result stays there too), `submission` (the same, not waited for), `jobs` (JOBS such
products submitted by one request and waited for), `batch` (PRODUCTS products in one request), `batch resident` (so many
of arrays that are there; results in one that stays).
"""

from __future__ import annotations

import io
import itertools
import json
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from benchmarks.service.connection import Exchange
from benchmarks.service.http1 import request

OCTET_STREAM = "application/octet-stream"
BOUNDARY = "b4f0c2e6a1d84b5f9a37"
OPERATIONS = {"echo": 0, "product": 1, "axpy": 2, "upload": 3, "keep": 3}
FRAME_BYTES = 16
"""Bytes of the raw frame's header; a multiple of what complex64 is aligned to."""
PRODUCTS = 1000
JOBS = 500
"""Jobs of one request: as many as the client library submits at one time."""
JOBS_TTL_S = 10
"""Life of their results: nobody deletes them."""
RESIDENT = 32
"""Left and right operands there are; every pair of them is another product."""
LARGEST_OPERAND = 64 << 20
"""Bytes of the largest operand: of longer uploads the same memory is sent several times."""


@dataclass(frozen=True)
class Work:
    """One request's work. `n`: extent of a product, elements otherwise."""

    operation: str
    n: int

    @property
    def up(self):
        """Bytes of operands."""
        n = self.n
        sizes = {
            "product": 16 * n**2,
            "axpy": 16 * n + 8,
            "echo": 16 * n,
            "upload": 8 * n,
            "keep": 8 * n,
            "batch": PRODUCTS * 16 * n**2,
        }
        return sizes.get(self.operation, 0)

    @property
    def down(self):
        """Bytes of the result."""
        n = self.n
        sizes = {"product": 8 * n**2, "axpy": 8 * n, "echo": 8 * n, "batch": PRODUCTS * 8 * n**2}
        return sizes.get(self.operation, 0)


STACKED = {"product": (), "job": (), "submission": (), "batch": (PRODUCTS,)}
STACKED |= {"jobs": (RESIDENT,), "batch resident": (RESIDENT,)}
"""Leading extents of the operands of products."""


@lru_cache(maxsize=4)
def operands(work):
    """By name, and "d", what the answer is."""
    rng = np.random.default_rng(work.n)

    def integers(*shape):
        parts = rng.integers(-8, 9, (*shape, 2), np.int8).astype(np.float32)
        return parts.view(np.complex64)[..., 0]

    n = work.n
    if work.operation in STACKED:
        stack = STACKED[work.operation]
        a, b = integers(*stack, n, n), integers(*stack, n, n)
        return {"a": a, "b": b, "d": a @ b}
    if work.operation in {"upload", "keep"}:
        return {"a": integers(min(n, LARGEST_OPERAND // 8))}
    a, c = integers(n, 1), integers(n, 1)
    if work.operation == "echo":
        return {"a": a, "c": c, "d": a}
    b = np.full((1, 1), 2 - 1j, np.complex64)
    return {"a": a, "b": b, "c": c, "d": a * b[0, 0] + c}


def exchange(protocol, work, ask=None):
    """What `protocol` sends for `work`. `ask` sends an exchange and gives the answer's body: for what has to be on the
    server before. Raises LookupError where there is no such thing.
    """
    if protocol == "gemmserve" and work.operation in ON_THE_SERVER:
        return ON_THE_SERVER[work.operation](work, ask)
    try:
        build = PROTOCOLS[protocol, work.operation]
    except KeyError:
        raise LookupError(f"{protocol} has no {work.operation}") from None
    return build(work)


def with_key(exchange, api_key):
    """Return the same request with an API key. Raises LookupError where another one follows, which would have none."""
    if exchange.after:
        raise LookupError("only exchanges that stand alone take a key")
    line, _, rest = bytes(exchange.parts[0]).partition(b"\r\n")
    head = line + b"\r\nAuthorization: Bearer " + api_key.encode() + b"\r\n" + rest
    return replace(exchange, parts=[head, *exchange.parts[1:]])


def bytes_of(array):
    """Its memory."""
    return memoryview(array.reshape(-1).view(np.uint8))


def npy(array):
    """A .npy header."""
    file = io.BytesIO()
    description = {"descr": array.dtype.str, "fortran_order": False, "shape": array.shape}
    np.lib.format.write_array_header_1_0(file, description)
    return file.getvalue()


# ---- gemmserve and the naive endpoint: multipart of .npy


def multipart(work, path="/v1/gemm"):
    """Parts params, a, b, c."""
    arrays = {name: array for name, array in operands(work).items() if name != "d"}
    params = json.dumps({"beta": 1} if "c" in arrays else {}).encode()
    parts = [
        f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="params"\r\n'.encode()
        + b"Content-Type: application/json\r\n\r\n"
        + params
    ]
    for name, array in arrays.items():
        head = f'\r\n--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"; filename="{name}.npy"\r\n'
        parts += [head.encode() + b"Content-Type: application/x-npy\r\n\r\n" + npy(array), bytes_of(array)]
    parts.append(f"\r\n--{BOUNDARY}--\r\n".encode())
    headers = {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"}
    head = request("POST", path, headers, length=sum(map(len, parts)))
    return Exchange([head, *parts], expected=bytes_of(operands(work)["d"]))


def upload(work):
    """Bare bytes to a resident array; `upload` deletes it afterwards, and its place is used again."""
    path = f"/v1/arrays?dtype=complex64&shape={work.n}"
    head = request("POST", path, {"Content-Type": OCTET_STREAM}, length=work.up)
    parts = repeated(bytes_of(operands(work)["a"]), work.up)

    after = None if work.operation == "keep" else lambda body: delete(json.loads(body)["id"])
    return Exchange([head, *parts], status=201, after=after)


def delete(array):
    """A resident array goes."""
    return Exchange([request("DELETE", f"/v1/arrays/{array}")], status=204)


def job(work, ask):
    """A product of two resident arrays, waited for; its result is deleted afterwards."""
    arrays = operands(work)
    ids = {name: stored(arrays[name], ask) for name in "ab"}
    body = json.dumps({"op": "gemm", **ids}).encode()
    head = request("POST", "/v1/jobs", {"Content-Type": "application/json", "Prefer": "wait=30"}, length=len(body))
    return Exchange([head, body], after=lambda answer: delete(json.loads(answer)["result"]["d"]))


def submission(work, ask):
    """A product of two resident arrays, taken and not waited for; its result stays."""
    arrays = operands(work)
    body = json.dumps({"op": "gemm", **{name: stored(arrays[name], ask) for name in "ab"}}).encode()
    head = request("POST", "/v1/jobs", {"Content-Type": "application/json"}, length=len(body))
    return Exchange([head, body], status=202)


def jobs(work, ask):
    """Many of them as jobs, submitted together and waited for; their results expire."""
    asked = [{"op": "gemm", **pair, "ttl_s": JOBS_TTL_S} for pair in resident_pairs(work, JOBS, ask)]
    body = json.dumps({"jobs": asked}).encode()
    head = request("POST", "/v1/jobs", {"Content-Type": "application/json", "Prefer": "wait=30"}, length=len(body))
    return Exchange([head, body])


def resident_pairs(work, count, ask):
    """Return so many pairs of operands, which are put on the server, as JSON names them."""
    arrays = operands(work)
    left, right = ([stored(array, ask) for array in arrays[name]] for name in "ab")
    return [{"a": a, "b": b} for a, b in itertools.islice(itertools.product(left, right), count)]


def resident_batch(work, ask):
    """Many of them in one request, the results in one array, which is deleted afterwards."""
    body = json.dumps({"items": resident_pairs(work, PRODUCTS, ask), "results": "packed"}).encode()
    head = request("POST", "/v1/batch", {"Content-Type": "application/json"}, length=len(body))
    return Exchange([head, body], after=lambda answer: delete(json.loads(answer)["result"]["d"]))


def stored(array, ask):
    """The id of a small array that is put on the server."""
    data = bytes_of(array)
    shape = ",".join(map(str, array.shape))
    path = f"/v1/arrays?dtype=complex64&shape={shape}"
    head = request("POST", path, {"Content-Type": OCTET_STREAM}, length=len(data))
    return json.loads(ask(Exchange([head, data], status=201)))["id"]


def download(path, nbytes):
    """A resident array's bytes; nothing is compared but their number."""
    head = request("GET", path, {"Accept": OCTET_STREAM})
    return Exchange([head], body_length=nbytes)


# ---- the raw frame: 16 bytes, of which the first says what to do, then the operands


def framed(work):
    """The body's parts, and the arrays."""
    arrays = operands(work)
    order = {"product": "ab", "axpy": "acb", "echo": "ac", "upload": "a", "keep": "a"}[work.operation]
    parts = [bytes([OPERATIONS[work.operation]]).ljust(FRAME_BYTES, b"\0"), *(bytes_of(arrays[name]) for name in order)]
    if work.operation in {"upload", "keep"}:
        parts = [parts[0], *repeated(parts[1], work.up)]
    return parts, arrays


def repeated(memory, nbytes):
    """The same memory as often as it takes."""
    whole, rest = divmod(nbytes, len(memory))
    return [memory] * whole + ([memory[:rest]] if rest else [])


def frame(work, path="/"):
    """For servers whose endpoint takes and gives bytes."""
    parts, arrays = framed(work)
    head = request("POST", path, {"Content-Type": OCTET_STREAM}, length=sum(map(len, parts)))
    expected = bytes_of(arrays["d"]) if "d" in arrays else None
    return Exchange([head, *parts], expected=expected, body_length=work.down)


def loop(work):
    """For rivals/loop_server.py, which looks at nothing: so many bytes up, so many down."""
    parts, _ = framed(work)
    head = request("POST", "/", {"X-Answer": str(work.down)}, length=sum(map(len, parts)))
    return Exchange([head, *parts], body_length=work.down)


# ---- the Open Inference Protocol with its binary extension (tritonserver)


def inference(work):
    """Complex numbers are pairs of FP32: the protocol has no complex type."""
    arrays = {name: array for name, array in operands(work).items() if name != "d"}
    shapes = {
        name: [*array.shape, 2] if work.operation == "product" else [2 * array.size] for name, array in arrays.items()
    }
    inputs = [
        {
            "name": name.upper(),
            "shape": shapes[name],
            "datatype": "FP32",
            "parameters": {"binary_data_size": array.nbytes},
        }
        for name, array in arrays.items()
    ]
    outputs = [{"name": "D", "parameters": {"binary_data": True}}]
    document = json.dumps({"inputs": inputs, "outputs": outputs}).encode()
    parts = [document, *map(bytes_of, arrays.values())]
    headers = {
        "Content-Type": OCTET_STREAM,
        "Inference-Header-Content-Length": str(len(document)),
    }
    head = request("POST", f"/v2/models/{work.operation}/infer", headers, length=sum(map(len, parts)))
    return Exchange([head, *parts], expected=bytes_of(operands(work)["d"]))


PROTOCOLS = {
    ("gemmserve", "product"): multipart,
    ("gemmserve", "axpy"): multipart,
    ("gemmserve", "batch"): lambda work: multipart(work, "/v1/batch"),
    ("gemmserve", "upload"): upload,
    ("gemmserve", "keep"): upload,
    ("multipart", "product"): multipart,
    ("multipart", "axpy"): multipart,
    **{("frame", operation): frame for operation in OPERATIONS},
    **{("loop", operation): loop for operation in OPERATIONS},
    **{("predict", operation): lambda work: frame(work, "/predict") for operation in OPERATIONS},
    **{("inference", operation): inference for operation in ("product", "axpy", "echo")},
}
ON_THE_SERVER = {"job": job, "submission": submission, "jobs": jobs, "batch resident": resident_batch}
"""Exchanges of gemmserve that need operands there first."""
