"""Limits of bodies' lengths, by route: what is longer is refused by its head, whatever the route would do with it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from gemmserve_service.errors import TooLarge
from gemmserve_service.http.inference.paths import INFER
from gemmserve_service.http.inference.tensors import MAX_JSON
from gemmserve_service.http.routes.jobs import MAX_BODY as MAX_JOB

if TYPE_CHECKING:
    from starlette.types import Scope

    from gemmserve_service.settings import Settings

_HEADS: Final = 1 << 20  # bytes of .npy headers, of parts' headers and of parameters beside arrays
_IGNORED: Final = 1 << 20  # of a body that no route reads


class BodyLimits:
    """Lengths past which a route never takes a body."""

    def __init__(self, settings: Settings) -> None:
        array = settings.max_array_bytes + _HEADS
        self._most = {
            "/v1/arrays": array,
            "/v1/gemm": 3 * array,
            "/v1/gemm-reduce": 2 * array,
            "/v1/batch": settings.max_batch_bytes,
            "/v1/jobs": MAX_JOB,
            **dict.fromkeys(INFER, 3 * array + MAX_JSON),
        }
        self._most_part = settings.max_part_bytes

    def check(self, scope: Scope) -> None:
        """Raises TooLarge by Content-Length."""
        for name, value in scope["headers"]:
            if name == b"content-length" and value.isdigit():
                most = self._most_of(scope["method"], scope["path"])
                digits = value.lstrip(b"0")
                if len(digits) > len(str(most)) or int(digits or b"0") > most:
                    raise TooLarge(f"a body of {digits[:40].decode()} bytes; here {most} are the most")

    def _most_of(self, method: str, path: str) -> int:
        if method == "POST":
            return self._most.get(path, _IGNORED)
        if method == "PUT" and path.startswith("/v1/uploads/"):
            return self._most_part
        return _IGNORED
