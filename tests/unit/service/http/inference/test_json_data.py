"""Numbers of tensors in JSON: cut out, read and written as the standard library would, a piece at a time."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemmserve_service.errors import InvalidParameters, QuotaExceeded, ServiceError, TooLarge
from gemmserve_service.http.inference.json_data import JsonMemory, cut_data, read_data, write_data
from gemmserve_service.runtime.yielding import Turns


async def cut(text):
    return await cut_data(bytearray(text if isinstance(text, bytes) else text.encode()), Turns())


async def read(text, shape):
    return await read_data(text.encode(), shape, "a", Turns())


async def test_arrays_are_cut_out():
    head, arrays = await cut('{"x": [{"data": [1, [2]] , "k": 1}, {"data":[]}], "data": "no", "y\\"data": [1]}')
    assert arrays == [b"[1, [2]]", b"[]"]
    assert json.loads(head) == {"x": [{"data": [0], "k": 1}, {"data": [1]}], "data": "no", 'y"data': [1]}


@pytest.mark.parametrize("size", [10, 40_000, 200_000])
async def test_long_arrays_leave_a_short_head(size):
    values = list(range(size))
    head, (array,) = await cut(json.dumps({"a": 1, "data": values, "b": 2}))
    assert json.loads(head) == {"a": 1, "data": [0], "b": 2}
    np.testing.assert_array_equal(await read(array.decode(), [size]), values)


@pytest.mark.parametrize(
    "text", [b"x" * 9000, b'"data": [' * 3000, b'{"data": ["' + b"x" * 9000, b'"' * 100_000], ids=lambda text: text[:9]
)
async def test_whatever_else_is_long_is_refused(text):
    with pytest.raises(TooLarge):
        await cut(text)


@given(
    st.recursive(
        st.none() | st.integers() | st.text(alphabet='"\\[]data:,{} ', max_size=9),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(["data", '"data"', "x", '\\"data": [']), inner, max_size=3)
        ),
        max_leaves=12,
    )
)
async def test_what_is_cut_out_can_be_put_back(document):
    """Arrays of numbers are taken out wherever they stand, and nothing else is touched."""
    text = json.dumps(document)
    head, arrays = await cut(text)
    restored = head.decode()
    for number, array in reversed([*enumerate(arrays)]):
        before, name, after = restored.rpartition(f'"data": [{number}]')
        if name:
            restored = f'{before}"data": {array.decode()}{after}'
    if all(array.count(b"[") == array.count(b"]") for array in arrays):
        assert json.loads(restored) == document


@pytest.mark.parametrize("shape", [[], [0], [3], [2, 3], [2, 0, 3], [0, 4], [1, 1, 1], [700, 3]])
async def test_flat_and_nested_arrays(shape):
    values = np.arange(np.prod(shape, dtype=int)) / 7
    for given_as in (values, values.reshape(shape or [1])):
        np.testing.assert_array_equal(await read(json.dumps(given_as.tolist()), shape), values)


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("[1,2]", [3]), ("[1,2,3,4]", [3]), ("[[1,2],[3]]", [2, 2]), ("[[1,2,3,4]]", [2, 2]), ("[1,2", [2]),
        ("[1,,2]", [3]), ("[1,]", [2]), ("[1 2]", [1]), ("[01]", [1]), ("[.5]", [1]), ("[+1]", [1]), ("[nan]", [1]),
        ("[1e]", [1]), ("[]", [1]), ("[1]", [0]), ("[[1],2]", [2]), ("[1],[2]", [2]), ("[]", [1 << 62, 1 << 62]),
        ("[[]]", [1 << 62, 0]), ("[" + "9" * 9999 + "]", [1]), ("[" + "1" * 100_000 + "]", [1]),
        ("[" + "0." + "1" * 100_000 + ",1]", [2]), ("[1[,]2]", [1, 2]), ("[[1, 2 ]\n3]", [1, 2]), ("[1 [2,3]]", [1, 2]),
        ("[[1],[2]" + " " * 40_000 + "1]", [2, 1]),
    ],
    ids=lambda value: str(value)[:12],
)  # fmt: skip
async def test_what_is_no_such_array(text, shape):
    with pytest.raises(ServiceError) as refused:
        await read(text, shape)
    assert refused.value.status in {400, 422}


async def test_the_tensor_is_named():
    with pytest.raises(InvalidParameters, match=r"^a: data is not 3 numbers"):
        await read("[1]", [3])


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int64"])
@pytest.mark.parametrize("size", [0, 1, 1024, 3000])
async def test_numbers_come_back_as_they_were(dtype, size):
    values = (np.random.default_rng(size).standard_normal(size) * 1000).astype(dtype)
    text = await write_data(values, Turns())
    assert json.loads(text) == values.tolist()
    np.testing.assert_array_equal((await read(text.decode(), [size])).astype(dtype), values)


async def test_numbers_that_are_none():
    values = np.array([np.nan, np.inf, -np.inf])
    assert await write_data(values, Turns()) == b"[NaN, Infinity, -Infinity]"
    np.testing.assert_array_equal(await read("[NaN, Infinity, -Infinity]", [3]), values)


def test_memory_is_bounded_for_all_and_for_each_of_several_owners():
    memory = JsonMemory(1000)
    gave = [memory.take_read("x", 50)]
    with pytest.raises(QuotaExceeded):
        memory.take_read("x", 1)
    gave.append(memory.take_written("y", 10))
    with pytest.raises(QuotaExceeded):
        memory.take_read("z", 3)
    for give_back in gave:
        give_back()
    memory.take_read("", 100)
