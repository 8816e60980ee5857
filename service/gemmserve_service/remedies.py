"""Remedies: what to do about a problem, by its slug. Shown by /problems and by the pages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

REMEDIES: Final[Mapping[str, str]] = {
    "array-corrupt": "Upload it again, or compute it again. The operator looks at the bucket: its versions may hold "
    "the object as it was.",
    "array-lost": "Compute it again: submit the same job, under a new Idempotency-Key.",
    "body-length": "Send as many bytes as shape and dtype need; for a .npy file, the whole file as it was saved. "
    "`detail` says how many there should be.",
    "cancelled": "Submit it again if the result is still wanted, under a new Idempotency-Key.",
    "cell-away": "Send it again after `Retry-After`: what the cell has accepted and stored is there again when it is. "
    "New work of yours goes to another cell meanwhile.",
    "completed-upload": "Use the array that `Location` names. For other data begin another upload.",
    "compute-unsupported": 'Choose one of the modes in `available`, or leave `compute` at `"auto"`. `GET /v1/devices` '
    "lists the modes of each device.",
    "config-infeasible": "Leave `config` out, so that the server chooses, or stay within the limit "
    "that `detail` names.",
    "descriptor-refused": "Send the data in the body. The Python client does so by itself when shared memory fails.",
    "device-error": "Send the request again: it runs on another worker or a restarted one. If it comes back, look at "
    "the server's log and run `gemmserve doctor` on its machine.",
    "digest-mismatch": "Send it again: it was damaged on the way, and nothing of it was kept. If it comes back, work "
    "out the digest over the bytes that are sent (those of the compressed body, if it is compressed).",
    "draining": "Send it again after `Retry-After`: to this server once it is back, or to another one. Accepted jobs "
    "stay on record and go on after the restart.",
    "dtype-unsupported": "Convert the array: `a.astype(numpy.complex64)`, for example. Products take float16, float32, "
    "float64, complex64 and complex128.",
    "forbidden": "Use a key with the scope that `scope` names, or ask the operator for one: "
    "`gemmserve keys create NAME --scopes ...`.",
    "gone": "Upload or compute it again. `ttl_s` sets how long an array, or a result, stays.",
    "head-too-large": "Send fewer or shorter headers and query parameters; for long lists use a route that takes them "
    "in the body. The operator may raise GEMMSERVE_MAX_HEAD_BYTES.",
    "host-not-allowed": "Use the address `127.0.0.1` or `localhost`. To reach the server by another name, the operator "
    "makes an API key, or adds the name to GEMMSERVE_ALLOWED_HOSTS.",
    "http-version": "Speak HTTP/1.1: `curl --http1.1`, for example. A proxy in front may speak HTTP/2 to its clients.",
    "idempotency-conflict": "Wait for `Retry-After`, or a second, and send the same request again: it is answered with "
    "the first one's job.",
    "idempotency-mismatch": "Use a new Idempotency-Key for another body. The same key belongs to repetitions of one "
    "request alone.",
    "internal": "Send the request again once. If it comes back, it is a fault of the server: report it with the "
    "answer's X-Request-Id, by which its log has the traceback.",
    "invalid-npy": "Save the array with `numpy.save(file, array, allow_pickle=False)`, and send the file's bytes "
    "unchanged. Objects, strings and structured dtypes are never read.",
    "invalid-request": "Change what `detail` names. The operation's description in `/docs` says what is expected.",
    "length-required": "Send Content-Length: most clients do for a file or bytes; a stream of unknown length has none.",
    "malformed-json": "Correct the JSON where `detail` says. Complex numbers are `[re, im]`; there is no NaN and no "
    "Infinity in JSON.",
    "malformed-multipart": "Let the HTTP library build the form (`curl -F`, `httpx` with `files=`), and do not set its "
    "Content-Type by hand: that lacks the boundary.",
    "method-not-allowed": "Use one of the methods in `Allow`.",
    "not-acceptable": "Send an Accept that admits what the resource has, or none at all.",
    "not-found": "Compare the id with `GET /v1/arrays` or `GET /v1/jobs`, asked with the same key. Ids of other "
    "owners, and of what was deleted, look the same as unknown ones.",
    "not-positive-definite": 'Look at the matrix that `index` names. Use `assume` `"general"` if it need not be '
    "positive definite, or add a small multiple of the identity if rounding made it so.",
    "not-ready": "Wait for `Retry-After` and send it again. If it lasts, `reasons` says why; the operator looks at the "
    "server's log and runs `gemmserve doctor`.",
    "other-cell": "Follow `Location` with the same method and body, if `GET /v1/cells` lists that name; the Python "
    "client does, and sends the next large bodies there at once.",
    "origin-not-allowed": "Call the server from its own pages or from a program. For a page of another site the "
    "operator adds that site to GEMMSERVE_ALLOWED_HOSTS.",
    "out-of-device-memory": "Send it again once others are done; or make the operands smaller, or split the product "
    "into several.",
    "parameter-invalid": "Change the fields in `errors`, or the one in `parameter`. Names that are not known are "
    "refused, so look for misspelt ones too.",
    "program-too-large": "Split the program into several jobs, or let it keep fewer results at one time.",
    "queue-full": "Wait for `Retry-After` and send it again; the Python client does. Several small products in one "
    "`POST /v1/batch` take one place in the queue.",
    "quota-exceeded": "Wait where `Retry-After` says so (the day's device seconds begin anew at midnight, UTC). For "
    "stored bytes delete arrays; `GET /v1/usage` shows what is used. The operator may raise the quota.",
    "range-not-satisfiable": "Ask for bytes that there are: `Content-Range` says how many, and ranges count from 0.",
    "request-timeout": "Send it again over a faster line, compressed by zstd, or as an upload in parts, which goes on "
    "where it broke.",
    "shape-mismatch": "Compare the shapes in `detail`. The last dimension of op(A) is the last but one of op(B), and "
    "leading ones are equal or 1; `trans_a` and `trans_b` transpose.",
    "singular-matrix": "Look at the matrix that `index` names: its system has no solution, or many. Use least squares "
    "on your side, or remove dependent rows.",
    "store-full": "Delete arrays that are not needed, or wait until some expire, and send it again. The operator may "
    "raise GEMMSERVE_MAX_STORE_BYTES.",
    "tier-unavailable": "Wait for `Retry-After` and send it again. If it lasts, the operator runs `gemmserve doctor`, "
    "which asks the tier, and looks at GEMMSERVE_TIER and its credentials.",
    "timeout": "Raise `timeout_s`, or submit a job, which may wait in the queue without a connection.",
    "too-large": "Split the array, or ask the operator to raise GEMMSERVE_MAX_ARRAY_BYTES. `detail` says which limit "
    "it was.",
    "too-many-connections": "Close connections that are not used, reuse those that are open, and send it again after "
    "`Retry-After`.",
    "unauthorized": "Send a valid key as `Authorization: Bearer gs_...`; Python and the command line take it from "
    "GEMMSERVE_API_KEY. The operator makes one: `gemmserve keys create NAME`.",
    "unsupported-media-type": "Send the Content-Type that the operation lists, and no Content-Encoding but what "
    "`Accept-Encoding` of the answer admits.",
    "upload-incomplete": "Send the stretches in `missing` as parts, then complete the upload again.",
    "upload-superseded": "Nothing, if another of your requests took its place. Else ask `GET /v1/uploads/{upload_id}` "
    "what has come, and send the rest.",
    "worker-crashed": "Send it again once. If the same product ends so again, report it with the server's log; "
    "`gemmserve doctor` checks the device.",
}
"""Sentences of plain text, with names of fields and commands in backticks."""


def remedy(slug: str) -> str:
    """Return what to do about a problem of that slug; that of `internal` for one that is not known."""
    return REMEDIES.get(slug, REMEDIES["internal"])
