"""zstd on the way (RFC 8878), for arrays that get shorter by it: what is sent, and what is received.

The module is the standard library's from Python 3.14 on, and `backports.zstd` before.
"""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, TypeVar

from gemmserve import _errors
from gemmserve._install import pip_install
from gemmserve._transfer.arrays import pieces
from gemmserve._transfer.bodies import Body, NpyBody

if TYPE_CHECKING:
    from gemmserve._transfer.arrays import AnyArray
    from gemmserve._transfer.bodies import Receiver

T = TypeVar("T")

ZSTD: Final = "zstd"

_LEVEL: Final = 1
_WORTH: Final = 7 / 8  # of the bytes, by a sample; of random mantissas zstd saves a thirteenth
_OUTPUT: Final = 1 << 20  # decoded bytes at a time: an answer of few bytes must not become many at once
_WINDOW_LOG: Final = 23  # 8 MiB, as RFC 9659 has it


def module() -> Any:
    """The module. Raises ParameterInvalid where it is not installed."""
    for name in ("compression.zstd", "backports.zstd"):
        with suppress(ImportError):
            return import_module(name)
    raise _errors.ParameterInvalid(f'compression="zstd" needs a package: {pip_install("zstd")}')


def check(compression: str | None) -> bool:
    """Whether arrays are to be compressed. Raises ParameterInvalid for what is not known, or not installed."""
    if compression is None:
        return False
    if compression != ZSTD:
        raise _errors.ParameterInvalid(
            f'compression is "zstd" or None, not {compression!r}', problem={"parameter": "compression"}
        )
    module()
    return True


def compressed(array: AnyArray) -> Body | None:
    """The array as a compressed .npy; None: it hardly gets shorter. Takes its time: some hundred MiB a second.

    It is held in memory: its length must be known before it is sent.
    """
    plain = NpyBody(array)
    if not _shorter(array):
        return None
    zstd = module()
    parameter = zstd.CompressionParameter
    compressor = zstd.ZstdCompressor(options={parameter.compression_level: _LEVEL, parameter.checksum_flag: 1})
    parts = [found for piece in plain.pieces() if (found := compressor.compress(piece))]
    parts.append(compressor.flush())
    body = Body(plain.content_type, parts)
    return body if body.nbytes <= _WORTH * plain.nbytes else None


def _shorter(array: AnyArray) -> bool:
    """Return whether compression makes the array shorter, judged by its first piece."""
    sample = next(pieces(array), b"")
    return len(module().compress(sample, _LEVEL)) <= _WORTH * len(sample)


class DecodingReceiver:
    """Gives another receiver the decoded bytes."""

    def __init__(self, inner: Receiver[T]) -> None:
        self._inner = inner
        self._decoder: Any = None

    def feed(self, piece: bytes | memoryview) -> None:
        """Raises ProtocolError for what is no zstd."""
        zstd = module()
        data = bytes(piece)
        try:
            while data or (self._decoder is not None and not self._decoder.needs_input):
                if self._decoder is None:
                    options = {zstd.DecompressionParameter.window_log_max: _WINDOW_LOG}
                    self._decoder = zstd.ZstdDecompressor(options=options)
                found = self._decoder.decompress(data, max_length=_OUTPUT)
                data = b""
                if found:
                    self._inner.feed(found)
                if self._decoder.eof:
                    data, self._decoder = self._decoder.unused_data, None
        except zstd.ZstdError as error:
            raise _errors.ProtocolError(f"the answer is no zstd: {error}") from error

    def finish(self) -> Any:
        """Raises TransportError for an answer that broke off."""
        if self._decoder is not None:
            raise _errors.TransportError("the answer ended within a zstd frame")
        return self._inner.finish()
