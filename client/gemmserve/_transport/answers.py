"""Answers: whether one belongs to its request, and what takes its body, its error or its digest in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from gemmserve import _errors
from gemmserve._transfer.bodies import Placing, Whole
from gemmserve._transfer.parts import Span
from gemmserve._transport.content_coding import ZSTD, DecodingReceiver
from gemmserve._transport.digests import CheckedPlacing, CheckedReceiver, sha256_of
from gemmserve.wire import CHECKED_HEADER, EXCHANGE_HEADER

if TYPE_CHECKING:
    from gemmserve._calls.requests import Request
    from gemmserve._transfer.bodies import Receiver
    from gemmserve._transport.direct import Answer
    from gemmserve._transport.library import httpx

T = TypeVar("T")

NO_CONTENT = 204


def check_exchange(response: httpx.Response | Answer) -> None:
    """Raise CrossedAnswer for the answer to another request, ProtocolError for no answer of a gemmserve server.

    Whatever a server of ours made repeats what the request named itself.
    An error may come without, from something on the way that has read no request, or not understood it.
    """
    sent, said = response.request.headers.get(EXCHANGE_HEADER), response.headers.get(EXCHANGE_HEADER)
    if said == sent:
        return
    if said is not None:
        raise _errors.CrossedAnswer(
            "the answer to another request came (it says so): a connection is used by two sides at once, or something "
            "on the way mixes answers up"
        )
    if not response.is_success:
        return
    if _errors.REQUEST_ID_HEADER in response.headers:
        raise _errors.CrossedAnswer(
            f"the answer does not say which request it belongs to: another one's, a server's that is older than this "
            f"client, or something on the way drops the header {EXCHANGE_HEADER}"
        )
    raise _errors.ProtocolError(
        f"status {response.status_code}, but no answer of a gemmserve server: another one's, or a proxy's"
    )


def check_confirmed(response: httpx.Response | Answer) -> None:
    """Raise ProtocolError for the success of a request whose body had a digest which nobody compared: its field got
    lost on the way, so what was taken in may be another body.
    """
    sent = response.request.headers.get("content-digest")
    if sent is not None and response.is_success and response.headers.get(CHECKED_HEADER) != sent:
        raise _errors.ProtocolError(
            f"the answer does not confirm that the request's body was compared with its Content-Digest "
            f"({CHECKED_HEADER}): an older server's, or something on the way changes or drops header fields"
        )


def _raise(error: Exception) -> Any:
    raise error


def length_of(response: httpx.Response | Answer) -> int | None:
    """Return the bytes that an answer says its body has."""
    text = response.headers.get("content-length", "")
    return int(text) if text.isdecimal() else None


def receiver_of(
    request: Request[T], response: httpx.Response | Answer, *, compare: bool, required: bool
) -> Receiver[T]:
    """Return what takes this answer's body; for an error's answer, one that raises it at the end.

    `compare`: with the answer's digest, if it has one. `required`: raises ProtocolError where it has none.
    """
    if not response.is_success:
        return Whole(lambda data: _raise(_errors.from_answer(response.status_code, response.headers, data)))
    coding = response.headers.get("content-encoding", "identity")
    if coding == ZSTD and request.headers.get("Accept-Encoding") == ZSTD:
        headers = {name: value for name, value in response.headers.items() if name != "content-length"}
        return DecodingReceiver(request.receiver(headers))
    if coding != "identity":
        raise _errors.ProtocolError("something on the way compressed the answer although identity was asked for")
    receiver: Any = request.receiver(response.headers)
    if isinstance(receiver, Span):  # which is part of a whole that has one digest
        found: Receiver[Any] = receiver
        return found
    return _checked(request, response, receiver, required=required) if compare else receiver


def _checked(
    request: Request[T], response: httpx.Response | Answer, receiver: Receiver[T], *, required: bool
) -> Receiver[T]:
    """Compares the answer's digest, if it has one. Raises ProtocolError where it has to have one and has not."""
    if request.digest == "none":
        return receiver
    expected = sha256_of(response.headers.get(f"{request.digest}-digest"))
    if expected is None:
        if required and response.status_code != NO_CONTENT:
            raise _errors.ProtocolError(
                f'the answer has no {request.digest.capitalize()}-Digest, and digests="always" wants one: an older '
                "server's, or something on the way drops it"
            )
        return receiver
    if isinstance(receiver, Placing):
        return CheckedPlacing(receiver, expected)
    return CheckedReceiver(receiver, expected)
