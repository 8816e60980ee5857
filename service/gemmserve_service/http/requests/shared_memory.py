"""A request's shared memory, by its headers: operands that are not in its body, and room for the result."""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, Any

from starlette.responses import Response

from gemmserve.wire import BY_DEVICE, KEPT, NPY, NPY_HEADER, PAGES_HEADER, RESULT_HEADER, SESSION_HEADER
from gemmserve_service.errors import DescriptorRefused, InvalidRequest, StoreFull
from gemmserve_service.scheduling.results.deliveries import DeliveryInDoubtError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.requests import Request
    from starlette.types import Receive, Scope, Send

    from gemmserve_service.http.requests.descriptors import Session
    from gemmserve_service.scheduling.results.deliveries import Deliveries
    from gemmserve_service.store.array_store import ArrayStore
    from gemmserve_service.store.declared import Declared
    from gemmserve_service.store.extents.shared_memory import Memory
    from gemmserve_service.store.pin import Pinned
    from gemmserve_service.store.upload import Upload

log = logging.getLogger(__name__)


class SharedRequest:
    """One request's share in the session that its headers name; without such a header it has none."""

    def __init__(self, request: Request, owner: str) -> None:
        """Raises DescriptorRefused, InvalidRequest."""
        self._owner = owner
        self._session: Session | None = None
        self._result: Memory | None = None
        secret = request.headers.get(SESSION_HEADER)
        if secret is not None:
            self._session = request.app.state.descriptors.session(secret, owner)
            number = request.headers.get(RESULT_HEADER)
            self._result = None if number is None else self.take(number)
        self._lasts = request.headers.get(PAGES_HEADER, "").strip().lower() == KEPT

    def take(self, number: str | None) -> Memory:
        """The memory that a request or a part names as its data. Raises DescriptorRefused, InvalidRequest."""
        if number is None or not (number.isascii() and number.isdigit()) or len(number) > 16:
            raise InvalidRequest("the number of a piece of shared memory is missing, or no number")
        if self._session is None:
            raise DescriptorRefused(f"shared memory is named, and no session: {SESSION_HEADER} is missing")
        return self._session.take(int(number))

    def close(self) -> None:
        """Lets go of the result's memory; idempotent."""
        if self._result is not None:
            self._result.close()
            self._result = None

    async def delivered(
        self, pinned: Pinned, headers: Mapping[str, str], deliveries: Deliveries, timeout_s: float | None
    ) -> Response | None:
        """The answer to a request whose array a device has copied into the client's memory; None: none has, and nothing
        writes there. Where that is in doubt, an answer that breaks off.
        """
        if self._result is None or not self._lasts:
            return None
        try:
            if not await deliveries.deliver(pinned, self._result, self._owner, timeout_s):
                return None
        except DeliveryInDoubtError as doubt:
            log.warning("a connection is closed without an answer: %s", doubt)
            return BrokenResponse()
        self.close()
        return _result_in_memory(pinned.npy_header, headers, BY_DEVICE)

    async def answer(self, pinned: Pinned, headers: Mapping[str, str]) -> Response | None:
        """The answer whose bytes went into the client's memory; None: they are to go by the socket."""
        result, self._result = self._result, None
        if result is None:
            return None
        try:
            if not result.takes(pinned.info.nbytes):
                return None
            header, view = pinned.npy_parts()
            await result.write(view, whole=True)
        except OSError:  # sealed, or opened for reading only
            return None
        finally:
            result.close()
        return _result_in_memory(header, headers, "shared")


def _result_in_memory(header: bytes, headers: Mapping[str, str], how: str) -> Response:
    return Response(header, headers={**headers, RESULT_HEADER: how}, media_type=NPY_HEADER)


class BrokenResponse(Response):
    """A response that ends before its body: the server closes the connection, and the client has no answer."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send its head, which promises a body, and nothing of that: whoever holds the head back lets it go then."""
        del scope, receive
        headers = [(b"content-length", b"1"), (b"content-type", NPY.encode("ascii"))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"", "more_body": True})


async def receive_shared(memory: Memory, declared: Declared, store: ArrayStore, **options: Any) -> Upload:
    """A full upload of what lies in a client's memory: used in place where it is sealed and scratch, else copied.

    `options` are those of `Declared.reserve`. Raises DescriptorRefused, TooLarge, StoreFull, QuotaExceeded.
    """
    try:
        memory.check_holds(declared.nbytes)
        if options.get("scratch") and not declared.byteswap and memory.usable_in_place(declared.nbytes):
            with contextlib.suppress(StoreFull):  # the memory for scratch is used up; a copy may go to a file
                upload = declared.reserve(store, memory=memory, **options)
                upload.filled = upload.nbytes
                return upload
        upload = declared.reserve(store, **options)
        try:
            if upload.nbytes:
                await memory.read(upload.view)
            upload.filled = upload.nbytes
        except BaseException:
            upload.abort()
            raise
        return upload
    finally:
        memory.close()
