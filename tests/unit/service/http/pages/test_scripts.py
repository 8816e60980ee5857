"""Scripts of the pages that need no page, in Node: .npy files, events, figures, colours, small charts."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
from importlib.resources import files

import numpy as np
import pytest

pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    """node("code", *arguments) -> what the module writes as JSON; the scripts lie beside it."""
    folder = tmp_path_factory.mktemp("scripts")
    shutil.copytree(files("gemmserve_service.http.pages") / "static", folder, dirs_exist_ok=True)
    (folder / "package.json").write_text('{"type": "module"}')

    def run(code, *arguments):
        (folder / "test.js").write_text(code)
        found = subprocess.run(
            ["node", "test.js", *map(str, arguments)], cwd=folder, capture_output=True, text=True, check=False
        )
        assert found.returncode == 0, found.stderr
        return json.loads(found.stdout)

    return run


NONE = "\N{EN DASH}"

READ = """
import { readFileSync } from "node:fs";
import { firstMatrix, parse } from "./npy.js";
const out = process.argv.slice(2).map((path) => {
  const bytes = readFileSync(path);
  try {
    const array = parse(bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.length));
    const { rows, columns, index } = firstMatrix(array);
    const of = (part) => Array.from({ length: rows }, (_, i) =>
      Array.from({ length: columns }, (_, j) => String(part(index(i, j)))));
    return { dtype: array.dtype, shape: array.shape, real: of(array.real), imag: of(array.imag) };
  } catch (error) {
    return { error: error.message };
  }
});
console.log(JSON.stringify(out));
"""


def npy(array, version=None):
    file = io.BytesIO()
    np.lib.format.write_array(file, array, version=version)
    return file.getvalue()


def read(node, tmp_path, contents):
    paths = []
    for number, content in enumerate(contents):
        paths.append(tmp_path / f"{number}.npy")
        paths[-1].write_bytes(content)
    return node(READ, *paths)


def test_npy_files_are_read_as_numpy_does(node, tmp_path):
    rng = np.random.default_rng(0)
    cases = []
    for kind in ("f2", "f4", "f8", "c8", "c16", "i8"):
        for endian in "<>":
            for order in "CF":
                for shape in ((3, 4), (5,), (), (2, 3, 4), (0, 3), (2, 1, 3, 2)):
                    values = rng.standard_normal(shape) * 100
                    if kind[0] == "c":
                        values = values + 1j * rng.standard_normal(shape)
                    cases.append(np.asarray(values).astype(f"{endian}{kind}", order=order))
    tiny = np.array([6e-8, -6.1e-5, 65504, np.inf, -np.inf, np.nan, -0.0, 0.333], "<f2")
    cases += [tiny, tiny.astype(">f2"), np.array([[np.nan + 1j, complex(0, -np.inf)]], ">c8")]
    for array, found in zip(cases, read(node, tmp_path, [npy(case) for case in cases]), strict=True):
        assert found["dtype"] == array.dtype.newbyteorder("=").name
        assert tuple(found["shape"]) == array.shape
        matrix = array
        while matrix.ndim > 2:
            matrix = matrix[0]
        matrix = matrix.reshape(1, -1) if matrix.ndim < 2 else matrix
        for part in ("real", "imag"):
            seen = np.array([[float(text) for text in row] for row in found[part]], float).reshape(-1)
            np.testing.assert_array_equal(seen, getattr(matrix, part).astype(float).reshape(-1) if matrix.size else [])


def test_every_version_is_read(node, tmp_path):
    array = np.arange(6.0).reshape(2, 3)
    found = read(node, tmp_path, [npy(array, version) for version in ((1, 0), (2, 0), (3, 0))])
    assert [each["real"][1] for each in found] == [["3", "4", "5"]] * 3


def test_what_is_no_npy_is_refused_in_words(node, tmp_path):
    whole = npy(np.ones((2, 3)))
    contents = [
        b"", b"PK\x03\x04 something else", whole[:40], whole[:-1], whole + b"x", npy(np.array(["a"])),
        npy(np.zeros(2, [("a", "<f4")])), npy(np.array([True])), whole.replace(b"(2, 3)", b"(2, 4)"),
        b"\x93NUMPY\x09\x00" + whole[8:], b"\x93NUMPY\x02\x00\xff\xff\xff\xff", whole.replace(b"(2, 3)", b"(9e9,)"),
    ]  # fmt: skip
    for content, found in zip(contents, read(node, tmp_path, contents), strict=True):
        assert "error" in found, content[:80]
        assert "undefined" not in found["error"]


def test_what_is_written_numpy_reads(node, tmp_path):
    code = """
    import { writeFileSync } from "node:fs";
    import { format } from "./npy.js";
    const data = Float32Array.from({ length: 12 }, (_, k) => k);
    writeFileSync(`${process.argv[2]}/c.npy`, format("complex64", [2, 3], data));
    writeFileSync(`${process.argv[2]}/d.npy`, format("float64", [4], Float64Array.of(1, -2, NaN, 1e300)));
    console.log("{}");
    """
    node(code, tmp_path)
    np.testing.assert_array_equal(
        np.load(tmp_path / "c.npy"), np.arange(12, dtype=np.float32).view(np.complex64).reshape(2, 3)
    )
    np.testing.assert_array_equal(np.load(tmp_path / "d.npy"), [1, -2, np.nan, 1e300])


def test_events_are_found_whatever_pieces_they_come_in(node):
    text = (
        ': hello\n\nevent: overview\ndata: {"a":\ndata: 1}\n\n'
        'event: point\r\ndata: [2]\r\n\r\ndata:3\rid: 7\r\rdata: "é"\n\ndata: 9'
    )  # fmt: skip
    code = """
    import { EventParser } from "./live.js";
    const text = process.argv[2];
    const out = [];
    for (let size = 1; size <= text.length; size += 1) {
      const parser = new EventParser();
      const found = [];
      for (let at = 0; at < text.length; at += size) found.push(...parser.feed(text.slice(at, at + size)));
      out.push(found);
    }
    console.log(JSON.stringify(out));
    """
    found = node(code, text)
    expected = [
        {"name": "overview", "data": {"a": 1}}, {"name": "point", "data": [2]}, {"name": "message", "data": 3},
        {"name": "message", "data": "é"},
    ]  # fmt: skip
    assert found == [expected] * len(text)


def test_figures(node):
    code = """
    import * as f from "./format.js";
    console.log(JSON.stringify([
      f.bytes(0), f.bytes(1023), f.bytes(1023.9), f.bytes(48754820096), f.bytes(null),
      f.si(1.4e13, "FLOP/s"), f.si(0.5), f.si(999.7), f.percent(0.874), f.percent(null), f.count(1234567),
      f.seconds(0), f.seconds(5.2e-7), f.seconds(0.0523), f.seconds(1.234), f.seconds(184), f.seconds(7500),
      f.seconds(180), f.seconds(360000), f.seconds(-2), f.ago(100, 100.5), f.ago(100, 400), f.ago(200, 100),
      f.seconds(0.0009999), f.seconds(0.9996), f.seconds(59.97),
      f.short(1e-5), f.shape([]),
      f.shape([3, 4]), f.short(-Infinity)]));
    """
    assert node(code) == [
        "0 B", "1023 B", "1 KiB", "45.4 GiB", NONE, "14 TFLOP/s", "0.5", "1 k", "87 %", NONE, "1,234,567",
        "0 s", "520 ns", "52.3 ms", "1.23 s", "3 min 4 s", "2 h 5 min", "3 min",
        "4 d 4 h", "-2 s", "now", "5 min ago", "now", "1 ms", "1 s", "1 min",
        "1.0e-5", "scalar", "3 \u00d7 4", "-Infinity",
    ]  # fmt: skip


def test_no_peak_is_lost_in_a_small_chart(node):
    code = """
    import { largest, path, thinned } from "./sparkline.js";
    const list = Array.from({ length: 720 }, (_, k) => (k === 431 ? 9 : k < 7 ? null : 1));
    const thin = thinned(list, 120);
    console.log(JSON.stringify([thin.length, largest([thin]), thin[0], thin[1], thinned([1, null], 120),
      path([null, 1, null, 2, 2], 2, 40, 10), path([], 1), largest([[null]])]));
    """
    length, peak, first, second, same, path, nothing, none = node(code)
    assert (length, peak, first, second, same) == (120, 9, None, 1, [1, None])
    assert path == "M10.0 5.0h5.0M30.0 1.0L40.0 1.0", "a lone point is a stroke, a gap is a gap"
    assert (nothing, none) == ("", 0)


def test_pictures(node):
    """Samples as the server's own (http/answers/samples.py), colours as Matplotlib's."""
    matplotlib = pytest.importorskip("matplotlib")
    code = """
    import { PARTS, colour, sampled } from "./picture.js";
    const real = (k) => (k === 7 ? NaN : k);
    const array = { shape: [3, 5], fortran: false, size: 15, complex: true, real, imag: () => 1 };
    const few = sampled(array, PARTS.real, 2);
    console.log(JSON.stringify([
      { ...few, values: [...few.values].map(String) }, sampled(array, PARTS.phase).low,
      sampled(array, PARTS.magnitude).strange,
      ["viridis", "twilight"].map((map) => Array.from({ length: 101 }, (_, k) => colour(map, k / 100)))]));
    """
    few, low, strange, maps = node(code)
    assert (few["rows"], few["columns"], few["whole"]) == (2, 2, False)
    assert few["values"] == ["0", "2", "5", "NaN"]
    assert (few["low"], few["high"], few["strange"]) == (0, 5, 1)
    assert low == -np.pi
    assert strange == 1
    for name, colours in zip(("viridis", "twilight"), maps, strict=True):
        truth = 255 * matplotlib.colormaps[name](np.linspace(0, 1, 101))[:, :3]
        assert np.abs(np.array(colours) - truth).max() < 16, "straight between 17 of them"
