"""gemm and reduce on files, streams and ids."""

from __future__ import annotations

import io

import numpy as np
import pytest

from gemmserve.cli._products import scalar


def saved(array: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def close(name: str, expected: np.ndarray) -> None:
    np.testing.assert_allclose(np.load(name), expected, rtol=1e-4, atol=1e-4)


def test_files(cli, files) -> None:
    done = cli("gemm", "a.npy", "b.npy", "-o", "d.npy")
    assert (done.status, done.out) == (0, "")
    assert done.err.startswith("d.npy: complex64 3x5, 120 B, ")
    close("d.npy", files.a @ files.b)


def test_all_parameters(cli, files) -> None:
    np.save("bh.npy", files.b.conj().T)
    arguments = ["--alpha", "1+2i", "--beta", "-0.5", "--trans-b", "C", "--order", "F", "--compute", "fp32"]
    assert cli("gemm", "a.npy", "bh.npy", "-c", "c.npy", "-o", "d.npy", *arguments).status == 0
    close("d.npy", (1 + 2j) * (files.a @ files.b) - 0.5 * files.c)
    assert np.load("d.npy").flags.f_contiguous


def test_what_is_given_with_c_is_added(cli, files) -> None:
    cli("gemm", "a.npy", "b.npy", "-c", "c.npy", "-o", "d.npy")
    close("d.npy", files.a @ files.b + files.c)


def test_the_parameters_reach_the_server(cli, service, files) -> None:
    cli(
        "gemm",
        "a.npy",
        "b.npy",
        "-o",
        "d.npy",
        "--config",
        '{"block_m": 64}',
        "--layout",
        "interleaved",
        "--timeout",
        "9",
    )
    body = service.requests[0].content
    assert b'{"config": {"block_m": 64}}' in body
    assert service.requests[0].url.params["timeout_s"] == "9.0"


def test_streams(cli, files) -> None:
    done = cli("gemm", "-", "b.npy", "-o", "-", stdin=saved(np.asfortranarray(files.a)), binary=True)
    assert done.status == 0
    np.testing.assert_allclose(np.load(io.BytesIO(done.data)), files.a @ files.b, rtol=1e-4)


def test_what_is_nearly_an_id_is_told_from_a_file(cli, service, files) -> None:
    for wrong, hint in (
        ("arr_01JD2W7M4H8K3N5P6Q9R0S1T2V", "no id of an array"),
        ("job_01jd2w7m4h8k3n", "jobs show job_01"),
    ):
        done = cli("gemm", wrong, "b.npy")
        assert done.status == 2
        assert hint in done.err
    assert service.requests == []
    np.save("arr_a.npy", files.a)
    assert cli("gemm", "arr_a.npy", "b.npy", "-o", "d.npy").status == 0


def test_terminals_and_streams_used_twice_are_wrong_usage(cli, service, files) -> None:
    for arguments, kwargs in (
        (("gemm", "-", "-", "-o", "d.npy"), {"stdin": b""}),
        (("gemm", "-", "b.npy", "-o", "d.npy"), {}),
        (("gemm", "a.npy", "b.npy", "-o", "-"), {"terminal": True}),
        (("gemm", "a.npy", "b.npy"), {}),
        (("gemm", "a.npy", "b.npy", "-o", "d.npy", "--alpha", "x"), {}),
        (("gemm", "a.npy", "b.npy", "-o", "d.npy", "--config", "[1]"), {}),
        (("gemm", "a.npy", "b.npy", "-o", "d.npy", "--trans-a", "H"), {}),
    ):
        done = cli(*arguments, **kwargs)
        assert done.status == 2, arguments
        assert done.err
    assert not service.requests


def test_ids_keep_the_result_on_the_server(cli, service, files) -> None:
    ra = cli("put", "a.npy").out.strip()
    result = cli("gemm", ra, "b.npy").out.strip()
    np.testing.assert_allclose(service.arrays[result], files.a @ files.b, rtol=1e-4)
    before = set(service.arrays)
    cli("gemm", ra, "b.npy", "-o", "d.npy")
    close("d.npy", files.a @ files.b)
    assert set(service.arrays) == before  # what was only computed to be written does not stay


def test_reduce(cli, files) -> None:
    c = files.a @ files.b
    cli("reduce", "a.npy", "b.npy", "-o", "y.npy")
    close("y.npy", c.sum(0))
    cli("reduce", "a.npy", "b.npy", "--reduce", "absmax", "--axis", "n", "-o", "y.npy")
    close("y.npy", np.abs(c).max(1))
    done = cli("reduce", "a.npy", "b.npy", "--reduce", "sum,argmax", "--return-c", "-o", "y.npz")
    assert "y.npz[argmax]: int64 5" in done.err
    with np.load("y.npz") as found:
        assert found.files == ["sum", "argmax", "c"]
        np.testing.assert_array_equal(found["argmax"], np.abs(c).argmax(0))


def test_remote_reduce(cli, service, files) -> None:
    ra = cli("put", "a.npy").out.strip()
    one = cli("reduce", ra, "b.npy").out.split()
    assert one[0] in service.arrays
    several = dict(line.split() for line in cli("reduce", ra, "b.npy", "--reduce", "sum, absmax").out.splitlines())
    assert list(several) == ["sum", "absmax"]
    assert set(several.values()) <= set(service.arrays)


@pytest.mark.parametrize(
    ("text", "value"), [("2", 2), ("1e-3", 1e-3), ("1+2j", 1 + 2j), ("-i", -1j), ("1 - 2i", 1 - 2j)]
)
def test_scalars(text, value) -> None:
    assert scalar(text) == value


def test_what_is_no_number_or_config_is_said(cli, service, files) -> None:
    for flag, value, said in (
        ("--alpha", "x", "a number is written as 2, 1e-3 or 1+2j, not 'x'"),
        ("--config", "{block_m: 1}", "a config is a JSON object"),
        ("--config", "[1]", "a config is a JSON object"),
    ):
        done = cli("gemm", "a.npy", "b.npy", "-o", "d.npy", flag, value)
        assert done.status == 2
        assert said in done.err
    assert service.requests == []


def test_an_output_without_a_folder_costs_nothing(cli, service, files) -> None:
    done = cli("gemm", "a.npy", "b.npy", "-o", "/nonexist/d.npy")
    assert (done.status, done.err) == (2, "gemmserve: -o /nonexist/d.npy: there is no folder /nonexist\n")
    assert service.requests == []
