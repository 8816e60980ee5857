"""Content codings: arrays that come and go as zstd, bodies that claim to, and what is refused."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import itertools
import struct

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from raw_connection import until
from starlette.requests import Request

from gemmserve_service.errors import QuotaExceeded
from gemmserve_service.http.headers import content_coding
from gemmserve_service.http.requests import coded_body

zstd = pytest.importorskip("backports.zstd") if content_coding.zstd() is None else content_coding.zstd()

NPY = {"Content-Type": "application/x-npy", "Content-Encoding": "zstd"}
BARE = {"Content-Type": "application/octet-stream", "Content-Encoding": "zstd"}
SKIPPABLE = struct.pack("<II", 0x184D2A50, 5) + b"hello"
EMPTY = zstd.compress(b"")
ZEROS = np.zeros((512, 1024), np.complex64)  # 4 MiB


def bare(array):
    return {"dtype": array.dtype.name, "shape": ",".join(map(str, array.shape))}


def problem(answer):
    return answer.status_code, answer.json()["type"].rpartition("/")[2]


@pytest.fixture
def sparse(rng):
    """3 MiB that get shorter."""
    array = np.zeros(3 << 17, np.complex64)
    where = rng.integers(0, array.size, 2000)
    array[where] = rng.standard_normal(2000) + 1j * rng.standard_normal(2000)
    return array.reshape(3, -1)


@pytest.fixture
def rng():
    return np.random.default_rng(5)


@pytest.fixture
def space(core):
    """Bytes that arrays have; what was refused has none."""
    return lambda: core.store.used_bytes


@pytest.mark.parametrize("level", [1, 19])
async def test_a_compressed_npy_is_the_array(client, npy, read_npy, sparse, level):
    answer = await client.post("/v1/arrays", content=zstd.compress(npy(sparse), level), headers=NPY)
    assert answer.status_code == 201, answer.text
    assert answer.json()["nbytes"] == sparse.nbytes
    back = await client.get(answer.headers["location"] + "/data")
    assert "content-encoding" not in back.headers
    assert np.array_equal(read_npy(back.content), sparse)


@pytest.mark.parametrize("shape", [(), (0,), (5,)])
async def test_small_and_empty_ones(client, npy, read_npy, shape):
    array = np.full(shape, 2.5, ">c8")
    answer = await client.post("/v1/arrays", content=zstd.compress(npy(array)), headers=NPY)
    assert answer.status_code == 201, answer.text
    back = read_npy((await client.get(answer.headers["location"] + "/data")).content)
    assert np.array_equal(back, array)


async def test_nothing_at_all_is_an_empty_bare_array(client):
    for body in (b"", EMPTY, SKIPPABLE):
        answer = await client.post("/v1/arrays", params=bare(np.ones((0, 3), "f4")), content=body, headers=BARE)
        assert answer.status_code == 201, answer.text


async def test_frames_of_every_kind_follow_one_another(client, sparse):
    data = sparse.tobytes()
    cuts = [0, 1, 1000, 1 << 20, len(data)]
    frames = [zstd.compress(data[low:high]) for low, high in itertools.pairwise(cuts)]
    body = SKIPPABLE + EMPTY.join([b"", *frames]) + EMPTY + SKIPPABLE
    digest = base64.b64encode(hashlib.sha256(body).digest()).decode()
    headers = BARE | {"Content-Digest": f"sha-256=:{digest}:"}
    answer = await client.post("/v1/arrays", params=bare(sparse), content=body, headers=headers)
    assert answer.status_code == 201, answer.text
    got = await client.get(answer.headers["location"] + "/data", headers={"Accept": "application/octet-stream"})
    assert got.content == data


async def test_the_digest_is_that_of_the_coded_body(client, npy, sparse, space):
    digest = base64.b64encode(hashlib.sha256(npy(sparse)).digest()).decode()
    headers = NPY | {"Content-Digest": f"sha-256=:{digest}:"}
    answer = await client.post("/v1/arrays", content=zstd.compress(npy(sparse)), headers=headers)
    assert problem(answer) == (400, "digest-mismatch")
    assert space() == 0


@pytest.mark.parametrize("dropped", [1, 2, 4, 100])
async def test_a_truncated_frame_is_told_of(client, sparse, space, dropped):
    body = zstd.compress(sparse.tobytes(), options={zstd.CompressionParameter.checksum_flag: 1})
    answer = await client.post("/v1/arrays", params=bare(sparse), content=body[:-dropped], headers=BARE)
    assert problem(answer) == (400, "invalid-request")
    assert "ends within a zstd frame" in answer.json()["detail"]
    assert space() == 0


async def test_garbage_and_flipped_bits(client, sparse, space):
    good = zstd.compress(sparse.tobytes(), options={zstd.CompressionParameter.checksum_flag: 1})
    flipped = bytearray(good)
    flipped[-1] ^= 1  # the checksum
    for body in (b"\x93NUMPY" + bytes(200), bytes(range(256)) * 16, bytes(flipped), good + b"rest"):
        answer = await client.post("/v1/arrays", params=bare(sparse), content=body, headers=BARE)
        assert problem(answer) == (400, "invalid-request"), body[:20]
        assert "zstd" in answer.json()["detail"]
    assert space() == 0


async def test_a_bomb_ends_at_its_first_byte_too_many(client, monkeypatch, space):
    decoded = []
    step = coded_body.CodedBody._step
    monkeypatch.setattr(
        coded_body.CodedBody, "_step", lambda *arguments: decoded.append(step(*arguments)) or decoded[-1]
    )
    bomb = zstd.compress(bytes(256 << 20))
    array = ZEROS[:, :16]
    for shape in (array, np.ones(0, "f4"), np.ones(1, "f4")):
        decoded.clear()
        answer = await client.post("/v1/arrays", params=bare(shape), content=bomb, headers=BARE)
        assert problem(answer) == (400, "body-length")
        assert sum(decoded) <= shape.nbytes + 1
    assert space() == 0


async def test_a_bomb_in_the_npy_header(client, space):
    answer = await client.post("/v1/arrays", content=zstd.compress(bytes(64 << 20)), headers=NPY)
    assert problem(answer) == (400, "invalid-npy")
    head = b"\x93NUMPY\x02\x00" + struct.pack("<I", 60_000) + b" " * (1 << 20)
    answer = await client.post("/v1/arrays", content=zstd.compress(head), headers=NPY)
    assert problem(answer)[0] in {400, 415}
    assert space() == 0


async def test_too_little_is_told_of(client, sparse, space):
    for body in (zstd.compress(sparse.tobytes()[:-8]), zstd.compress(bytes(1 << 20)) * 2):
        answer = await client.post("/v1/arrays", params=bare(sparse), content=body, headers=BARE)
        assert problem(answer) == (400, "body-length")
    assert space() == 0


async def test_lengths_that_cannot_be_are_refused_before_anything_is_decoded(client, monkeypatch, space):
    monkeypatch.setattr(coded_body.CodedBody, "_step", None)  # would raise TypeError
    for shape, body in (("1073741824", EMPTY), ("4", bytes(200_000))):
        query = {"dtype": "float32", "shape": shape}
        answer = await client.post("/v1/arrays", params=query, content=body, headers=BARE)
        assert problem(answer) in {(400, "body-length"), (413, "too-large")}
    assert space() == 0


async def test_a_window_of_more_than_8_mib_is_refused(client, sparse, space):
    compressor = zstd.ZstdCompressor(options={zstd.CompressionParameter.window_log: 24})
    body = compressor.compress(sparse.tobytes()) + compressor.flush()  # streamed: of no known size
    answer = await client.post("/v1/arrays", params=bare(sparse), content=body, headers=BARE)
    assert problem(answer) == (400, "invalid-request")
    assert "memory" in answer.json()["detail"]
    assert space() == 0


async def test_endless_empty_frames_end(client, monkeypatch, space):
    monkeypatch.setattr(coded_body, "_MAX_FRAMES", 50)
    query = {"dtype": "float32", "shape": "0"}
    answer = await client.post("/v1/arrays", params=query, content=EMPTY * 50, headers=BARE)
    assert answer.status_code == 201, answer.text
    answer = await client.post("/v1/arrays", params=query, content=EMPTY * 51, headers=BARE)
    assert problem(answer) == (400, "invalid-request")
    assert space() == 0


def test_one_owner_has_a_part_of_the_places_and_everybody_is_one_without_keys():
    request = Request({"type": "http", "headers": []})
    with contextlib.ExitStack() as stack:
        for _ in range(coded_body._MAX_OF_ONE):
            stack.enter_context(coded_body.decoding(request, None, "alice", "zstd"))
        with pytest.raises(QuotaExceeded), coded_body.decoding(request, None, "alice", "zstd"):
            pass
        for owner in ["bob"] + [""] * 20:
            stack.enter_context(coded_body.decoding(request, None, owner, "zstd"))
    assert not coded_body._open


async def test_no_more_than_so_many_at_a_time(client, monkeypatch):
    monkeypatch.setattr(coded_body, "_MAX_BODIES", 0)
    answer = await client.post("/v1/arrays", params=bare(ZEROS), content=zstd.compress(ZEROS), headers=BARE)
    assert problem(answer) == (429, "quota-exceeded")
    assert answer.headers["retry-after"]
    monkeypatch.undo()
    answer = await client.post("/v1/arrays", params=bare(ZEROS), content=zstd.compress(ZEROS), headers=BARE)
    assert answer.status_code == 201
    assert not coded_body._open


def test_hanging_up_within_a_coded_body_frees_its_space(live, sparse):
    body = zstd.compress(sparse.tobytes())
    with live.connect() as connection:
        head = f"POST /v1/arrays?dtype=complex64&shape={sparse.size} HTTP/1.1\r\nHost: 127.0.0.1\r\n" + "".join(
            f"{name}: {value}\r\n" for name, value in (BARE | {"Content-Length": len(body)}).items()
        )
        connection.sendall(head.encode() + b"\r\n" + body[: len(body) // 2])
        until(lambda: live.core.store.used_bytes == sparse.nbytes)
    until(lambda: live.core.store.used_bytes == 0)
    until(lambda: not coded_body._open)


@given(st.data())
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_whatever_is_sent_is_an_array_or_a_problem(client, core, data):
    array = np.arange(3000, dtype="f4")
    body = bytearray(SKIPPABLE + zstd.compress(array.tobytes()[:6000]) + EMPTY + zstd.compress(array.tobytes()[6000:]))
    for _ in range(data.draw(st.integers(1, 3))):
        kind = data.draw(st.sampled_from(["flip", "cut", "insert"]))
        at = data.draw(st.integers(0, max(len(body) - 1, 0)))
        if kind == "flip" and body:
            body[at] ^= data.draw(st.integers(1, 255))
        elif kind == "cut":
            del body[at : at + data.draw(st.integers(1, 3000))]
        else:
            body[at:at] = data.draw(st.binary(min_size=1, max_size=20))
    before = core.store.used_bytes
    answer = await client.post("/v1/arrays", params=bare(array), content=bytes(body), headers=BARE)
    assert answer.status_code in {201, 400}, answer.text
    assert core.store.used_bytes == before + (array.nbytes if answer.status_code == 201 else 0)


@pytest.mark.parametrize("value", ["gzip", "zstd, gzip", "zstd, zstd", "x" * 300, "br"])
async def test_other_codings_are_415_and_the_answer_says_which_are_not(client, value):
    answer = await client.post(
        "/v1/arrays", params=bare(ZEROS), content=b"", headers=BARE | {"Content-Encoding": value}
    )
    assert problem(answer) == (415, "unsupported-media-type")
    assert answer.headers["accept-encoding"] == "zstd"


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/jobs"),
        ("POST", "/v1/gemm"),
        ("POST", "/v1/batch"),
        ("POST", "/v1/uploads"),
        ("PUT", "/v1/uploads/upl_x/parts/0"),
    ],
)
async def test_other_bodies_come_as_they_are(client, method, path):
    query = bare(ZEROS) if path == "/v1/uploads" else {}
    answer = await client.request(method, path, params=query, content=EMPTY, headers=BARE)
    assert problem(answer) == (415, "unsupported-media-type")
    assert answer.headers["accept-encoding"] == "identity"


async def test_identity_is_no_coding(client, npy):
    headers = NPY | {"Content-Encoding": "identity"}
    assert (await client.post("/v1/arrays", content=npy(ZEROS), headers=headers)).status_code == 201


async def test_a_server_without_zstd_says_so(client, put, monkeypatch):
    identifier = await put(ZEROS)
    monkeypatch.setattr("gemmserve_service.http.headers.content_coding.zstd", lambda: None)
    answer = await client.post("/v1/arrays", params=bare(ZEROS), content=EMPTY, headers=BARE)
    assert (answer.status_code, answer.headers["accept-encoding"]) == (415, "identity")
    answer = await client.get(f"/v1/arrays/{identifier}/data", headers={"Accept-Encoding": "zstd"})
    assert "content-encoding" not in answer.headers


async def raw(client, path, **headers):
    """Status, headers and the bytes as they came."""
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    async with client.stream("GET", path, headers={"Accept-Encoding": "identity"} | sent) as answer:
        return answer, b"".join([piece async for piece in answer.aiter_raw()])


async def test_answers_are_coded_where_that_is_asked_for_and_pays(client, put, read_npy, sparse, rng):
    path = f"/v1/arrays/{await put(sparse)}/data"
    plain, data = await raw(client, path)
    answer, body = await raw(client, path, Accept_Encoding="gzip, zstd")
    assert (answer.headers["content-encoding"], len(body) < sparse.nbytes // 8) == ("zstd", True)
    assert zstd.decompress(body) == data
    assert "content-length" not in answer.headers
    assert "accept-ranges" not in answer.headers
    for each in (plain, answer):
        assert each.headers["vary"] == "Accept, Accept-Encoding"
    assert answer.headers["etag"].startswith("W/")
    assert answer.headers["etag"] != "W/" + plain.headers["etag"]
    noise = rng.standard_normal((256, 1024)).astype("f4")
    answer, body = await raw(client, f"/v1/arrays/{await put(noise)}/data", Accept_Encoding="zstd")
    assert "content-encoding" not in answer.headers
    assert np.array_equal(read_npy(body), noise)
    answer, body = await raw(client, f"/v1/arrays/{await put(noise)}/data", Accept_Encoding="zstd, identity;q=0")
    assert np.array_equal(read_npy(zstd.decompress(body)), noise)


async def test_ranges_are_of_the_bytes_as_they_are(client, put, sparse):
    path = f"/v1/arrays/{await put(sparse)}/data"
    _, data = await raw(client, path)
    answer, body = await raw(client, path, Accept_Encoding="zstd", Range="bytes=100-299")
    assert (answer.status_code, body) == (206, data[100:300])
    assert "content-encoding" not in answer.headers
    coded, _ = await raw(client, path, Accept_Encoding="zstd")
    # A client that has some of the compressed bytes cannot go on with others.
    answer, body = await raw(client, path, Range="bytes=100-299", If_Range=coded.headers["etag"])
    assert (answer.status_code, body) == (200, data)


async def test_either_tag_is_known_again(client, put, sparse):
    path = f"/v1/arrays/{await put(sparse)}/data"
    for accept in ("identity", "zstd"):
        first, _ = await raw(client, path, Accept_Encoding=accept)
        again, body = await raw(client, path, Accept_Encoding=accept, If_None_Match=first.headers["etag"])
        assert (again.status_code, body, again.headers["etag"]) == (304, b"", first.headers["etag"])


async def test_no_304_stands_for_what_the_client_cannot_read(client, put, sparse):
    path = f"/v1/arrays/{await put(sparse)}/data"
    coded, _ = await raw(client, path, Accept_Encoding="zstd")
    plain, _ = await raw(client, path, Accept_Encoding="identity")
    for accept, tag in (("identity", coded), ("zstd, identity;q=0", plain)):
        again, _ = await raw(client, path, Accept_Encoding=accept, If_None_Match=tag.headers["etag"])
        assert again.status_code == 200
    either, _ = await raw(client, path, Accept_Encoding="zstd", If_None_Match=plain.headers["etag"])
    assert either.status_code == 304


@pytest.mark.parametrize(
    ("accept", "chosen"),
    [
        (None, "no"), ("", "no"), ("gzip", "no"), ("identity", "no"), ("zstd;q=0", "no"), ("zstd;q=x", "no"),
        ("zstd;q=0.5, identity", "no"), ("zstd", "may"), ("ZSTD ; q=0.5", "may"), ("*", "may"),
        ("gzip, deflate, br, zstd", "may"), ("zstd, identity;q=0", "must"), ("zstd, *;q=0", "must"),
    ],
)  # fmt: skip
def test_accept_encoding(accept, chosen):
    assert content_coding.chosen_coding(accept) == chosen
