"""The .npy header and scalars: what NumPy writes is read, what we write NumPy reads, and nothing else passes."""

from __future__ import annotations

import io
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemmserve import wire

DTYPES = st.sampled_from(sorted(wire.DTYPES)).map(np.dtype)
SHAPES = st.lists(st.integers(0, 9), max_size=5).map(tuple)


def literal(text: str, version: int = 1) -> bytes:
    body = text.encode()
    width = 2 if version == 1 else 4
    return b"\x93NUMPY" + bytes((version, 0)) + len(body).to_bytes(width, "little") + body


@given(DTYPES, SHAPES, st.booleans())
def test_numpy_reads_what_is_written(dtype, shape, fortran) -> None:
    header = wire.format_npy_header(dtype, shape, fortran_order=fortran)
    assert len(header) % 64 == 0
    array = np.lib.format.read_array(io.BytesIO(header + bytes(math.prod(shape) * dtype.itemsize)))
    assert (array.shape, array.dtype) == (shape, dtype)
    parsed = wire.parse_npy_header(header)
    assert (parsed.dtype, parsed.shape, parsed.fortran_order) == (dtype, shape, fortran)
    assert (parsed.data_offset, parsed.nbytes) == (len(header), array.nbytes)


@given(DTYPES, SHAPES, st.sampled_from([(1, 0), (2, 0), (3, 0)]), st.sampled_from("<>"), st.data())
def test_what_numpy_writes_is_read_from_any_prefix(dtype, shape, version, byte_order, data) -> None:
    array = np.zeros(shape, dtype.newbyteorder(byte_order))
    stream = io.BytesIO()
    np.lib.format.write_array(stream, array, version=version)
    whole = stream.getvalue()
    parsed = wire.parse_npy_header(whole)
    assert (parsed.dtype, parsed.shape, parsed.nbytes) == (array.dtype, shape, array.nbytes)
    assert len(whole) == parsed.data_offset + parsed.nbytes
    cut = data.draw(st.integers(0, parsed.data_offset - 1))
    assert wire.parse_npy_header(whole[:cut]) is None


@pytest.mark.parametrize(
    "head",
    [
        b"PK\x03\x04", b"\x93NUMPX", b"\x93NUMPY\x04\x00", b"\x93NUMPY\x01\x01",
        b"\x93NUMPY\x02\x00\xff\xff\xff\x7f", literal("1 +"), literal("[1]"), literal("{}"), literal("(" * 9999),
        literal("{'descr': '<f8', 'fortran_order': 0, 'shape': (1,)}"),
        literal("{'descr': '<f8', 'fortran_order': False, 'shape': 3}"),
        literal("{'descr': '<f8', 'fortran_order': False, 'shape': (-1,)}"),
        literal("{'descr': '<f8', 'fortran_order': False, 'shape': (True,)}"),
        literal("{'descr': '<f8', 'fortran_order': False, 'shape': (1.0,)}"),
        literal("{'descr': '<f8', 'fortran_order': False, 'shape': (1152921504606846976,)}"),
        literal("{'descr': '<f8', 'fortran_order': False, 'shape': (0, 1152921504606846976)}"),
        literal("{'descr': '<f8', 'fortran_order': False, 'shape': (" + "1," * 40 + ")}"),
        literal("{'descr': '<f8', 'fortran_order': False, 'shape': (1,), 'more': 1}"),
        literal("__import__('os').getpid()"),
    ],
)  # fmt: skip
def test_what_is_no_npy(head) -> None:
    with pytest.raises(wire.NpyError) as caught:
        wire.parse_npy_header(head)
    assert type(caught.value) is wire.NpyError


def test_an_archive_of_several_is_called_one() -> None:
    data = io.BytesIO()
    np.savez(data, a=np.eye(2))
    with pytest.raises(wire.NpyError, match="npz archive"):
        wire.parse_npy_header(data.getvalue())


@pytest.mark.parametrize(
    "descr", ["'|O'", "'<i8'", "'<f16'", "'|V8'", "'<U4'", "'<M8[ns]'", "[('x', '<f8')]", "None", "'f8,f8'"]
)
def test_other_dtypes(descr) -> None:
    with pytest.raises(wire.NpyDtypeError):
        wire.parse_npy_header(literal(f"{{'descr': {descr}, 'fortran_order': False, 'shape': (1,)}}"))


def test_a_shape_too_long_for_version_1_becomes_version_2() -> None:
    header = wire.format_npy_header(np.dtype("float32"), (1,) * 30000)
    assert header[6] == 2
    with pytest.raises(wire.NpyError):
        wire.parse_npy_header(header)  # more than 32 dimensions, or more than 64 KiB


@pytest.mark.parametrize(("text", "shape"), [("", ()), ("3", (3,)), ("1024,0,2", (1024, 0, 2))])
def test_shapes_in_a_query(text, shape) -> None:
    assert wire.parse_shape(text) == shape


@pytest.mark.parametrize(
    "text",
    [",", "a", "1024, 2", "+4", "\N{ARABIC-INDIC DIGIT FOUR}", "1,,2", "-1", "1.5", "9" * 30, "4611686018427387904"],
)
def test_shapes_that_are_none(text) -> None:
    with pytest.raises(wire.NpyError):
        wire.parse_shape(text)


@given(st.complex_numbers(allow_nan=False, allow_infinity=False))
def test_scalars_survive(value) -> None:
    assert wire.decode_scalar(wire.encode_scalar(value)) == value


@pytest.mark.parametrize("value", [[], [1], [1, 2, 3], "1", None, True, [True, 1], [1, "2"], float("nan"), 10**400, {}])
def test_scalars_that_are_none(value) -> None:
    with pytest.raises(ValueError, match="scalar"):
        wire.decode_scalar(value)


@pytest.mark.parametrize("value", [float("inf"), complex(0, float("nan"))])
def test_json_has_no_word_for_infinity(value) -> None:
    with pytest.raises(ValueError, match="finite"):
        wire.encode_scalar(value)


def test_results_may_be_int64_and_operands_not() -> None:
    header = wire.format_npy_header(np.dtype("int64"), (3,))
    assert wire.parse_npy_header(header, wire.RESULT_DTYPES).dtype == np.int64
    with pytest.raises(wire.NpyDtypeError):
        wire.parse_npy_header(header)
    assert wire.parse_dtype("int64", wire.RESULT_DTYPES) == np.int64


def test_dtype_names() -> None:
    assert wire.parse_dtype("complex64") == np.complex64
    with pytest.raises(wire.NpyDtypeError):
        wire.parse_dtype("int8")


@given(DTYPES, SHAPES, st.booleans())
def test_usual_headers_are_read_without_the_compiler(dtype, shape, fortran) -> None:
    texts = [wire.format_npy_header(dtype, shape, fortran_order=fortran)]
    stream = io.BytesIO()
    np.lib.format.write_array(stream, np.zeros(shape, dtype))
    texts.append(stream.getvalue())
    for text in texts:
        assert wire._PLAIN.fullmatch(text[10 : 10 + int.from_bytes(text[8:10], "little")])


@pytest.mark.parametrize(
    "shape", ["", "5", "5,", "5, 6", "5, 6,", "05,", "5,,", ",", "5,6", "5,6,", " 5,", "5 ,6", "-5,", "0,"]
)
def test_the_usual_header_is_read_as_the_compiler_reads_it(shape) -> None:
    """Each shape as NumPy would write it, and with a second space at the beginning, which only the compiler reads."""
    found = []
    for start in ("{", "{ "):
        try:
            header = wire.parse_npy_header(
                literal(f"{start}'descr': '<c8', 'fortran_order': False, 'shape': ({shape}), }}")
            )
            found.append((header.shape, header.dtype, header.fortran_order))
        except wire.NpyError:
            found.append(None)
    assert found[0] == found[1]
