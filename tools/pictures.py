"""Pictures of the guides, drawn from what the guides' own blocks compute.

`python tools/pictures.py [NAME ...]` starts a server, runs the Python blocks of docs/guides/NAME.md (all that have
a picture, without one) and draws docs/pictures/NAME.svg from the names that they leave. The same blocks are run and
compared with independent results by the tests.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")  # a file, not a window

import matplotlib.pyplot as plt
import numpy as np

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "pictures"

# Of few colours, for images in files of less than 100 kB.
MAGMA, RED_BLUE = (mpl.colormaps[name].resampled(32) for name in ("magma", "RdBu"))
BLUE, RED, GREY = "#0b6fa4", "#c8402f", "#8a8f98"
STYLE = {
    "figure.facecolor": "white",  # legible on dark pages, too
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.hashsalt": "gemmserve",  # the same file from the same figures
}


def beamforming(names: dict[str, Any]) -> None:
    """Bearing against time, the conventional map beside MVDR's."""
    figure, axes = plt.subplots(1, 2, figsize=(8, 3.4), sharey=True, layout="constrained")
    angles, windows = names["angles"], names["windows"]
    for axis, spectrum, title in zip(
        axes, (names["power"], names["mvdr"]), ("conventional: sums of |beam|²", "MVDR: 1 / vᴴR⁻¹v"), strict=True
    ):
        decibel = 10 * np.log10(spectrum)
        image = axis.imshow(
            decibel,
            extent=(angles[0], angles[-1], windows, 0),
            aspect="auto",
            vmin=-20,
            vmax=20,
            cmap=MAGMA,
            interpolation="none",
        )
        axis.set(title=title, xlabel="bearing, degrees")
    axes[0].set_ylabel("window")
    figure.colorbar(image, ax=axes, label="dB over the noise of a sensor", pad=0.01)


def s_parameters(names: dict[str, Any]) -> None:
    """|S21| of the chain against spacing and frequency, and of one spacing."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.2), width_ratios=[1.35, 1], layout="constrained")
    frequency = names["ring"].frequency.f_scaled
    lengths, decibel = names["lengths"] * 1e3, 20 * np.log10(np.abs(names["s"][:, :, 1, 0]))
    image = left.imshow(
        decibel,
        extent=(frequency[0], frequency[-1], lengths[0], lengths[-1]),
        aspect="auto",
        origin="lower",
        vmin=-30,
        vmax=0,
        cmap=MAGMA,
        interpolation="none",
    )
    left.set(title="|S₂₁| of three ring slots", xlabel="frequency, GHz", ylabel="spacing, mm")
    figure.colorbar(image, ax=left, label="dB", pad=0.01)
    alone = 20 * np.log10(np.abs(names["ring"].s[:, 1, 0]))
    right.plot(frequency, alone, color=GREY, label="one ring slot")
    for index, colour in ((25, BLUE), (70, RED)):
        right.plot(frequency, decibel[index], color=colour, label=f"three, {lengths[index]:.2f} mm apart")
    right.set(xlabel="frequency, GHz", ylabel="|S₂₁|, dB", ylim=(-30, 1))
    right.legend(frameon=False, fontsize=8)


def maxwell(names: dict[str, Any]) -> None:
    """The field around the kite, and the far field of all directions."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.6), layout="constrained")
    field = names["field"].reshape(names["gx"].shape).real
    left.imshow(
        field,
        extent=(-4, 4, -4, 4),
        origin="lower",
        cmap=RED_BLUE,
        vmin=-2,
        vmax=2,
        interpolation="bicubic",
        interpolation_stage="data",
    )
    left.fill(*names["kite"].T, color="0.25")
    left.set(title="Re E, wave from the lower left", xlabel="x", ylabel="y")
    image = right.imshow(
        20 * np.log10(np.abs(names["f"])), extent=(0, 360, 360, 0), vmin=-30, vmax=10, cmap=MAGMA, interpolation="none"
    )
    right.set(title="far field of every direction", xlabel="from, degrees", ylabel="to, degrees")
    right.set_xticks(range(0, 361, 90))
    right.set_yticks(range(0, 361, 90))
    figure.colorbar(image, ax=right, label="dB", pad=0.01)


def quantum_circuits(names: dict[str, Any]) -> None:
    """Expected cut by both angles of QAOA, and along its best gamma."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.2), width_ratios=[1.2, 1], layout="constrained")
    cut = names["landscape"] / names["vertices"]
    degrees = [np.degrees(names[name]) for name in ("gamma", "beta")]
    image = left.imshow(
        cut,
        extent=(0, degrees[0][-1], 0, degrees[1][-1]),
        aspect="auto",
        origin="lower",
        vmin=0.25,
        vmax=0.75,
        cmap=MAGMA,
        interpolation="none",
    )
    left.set(title="edges cut, share", xlabel=r"$\gamma$, degrees", ylabel=r"$\beta$, degrees")
    figure.colorbar(image, ax=left, pad=0.01)
    best = np.unravel_index(np.argmax(cut), cut.shape)
    exact = names["exact"] / names["vertices"]
    right.plot(degrees[1], exact[:, best[1]], color=GREY, label="known")
    right.plot(degrees[1], cut[:, best[1]], "o", color=BLUE, markersize=3, label="computed")
    right.set(title=rf"at $\gamma$ = {degrees[0][best[1]]:.0f}°", xlabel=r"$\beta$, degrees", ylabel="edges cut, share")
    right.legend(frameon=False, fontsize=8)


def compute_modes(_: dict[str, Any]) -> None:
    """Errors by k, and speed against error, from the measurements; the page's blocks compute nothing of it."""
    accuracy, kernels = (
        json.loads((ROOT / "docs" / "benchmarks" / f"{name}-nvidia-h200.json").read_text())["rows"]
        for name in ("accuracy", "kernels")
    )
    _, (left, right) = plt.subplots(1, 2, figsize=(8, 4), layout="constrained")
    for dtype, mode, colour, dashes in (
        ("complex64", "tf32", RED, "-"),
        ("complex64", "fp32", GREY, "-"),
        ("complex64", "auto", BLUE, "-"),
        ("complex128", "fp64", GREY, "--"),
        ("complex128", "auto", BLUE, "--"),
    ):
        unit = 2.0**-24 if dtype == "complex64" else 2.0**-53
        rows = [row for row in accuracy if (row["dtype"], row["mode"], row["kind"]) == (dtype, mode, "normal")]
        points = sorted((row["k"], row["error"] * unit) for row in rows)
        left.loglog(*zip(*points, strict=True), dashes, color=colour, marker="o", markersize=3)
        name = {"fp32": "cuBLAS, plain", "fp64": "cuBLAS, plain"}.get(mode, mode)
        left.annotate(
            f"{dtype} {name}",
            points[0 if dtype == "complex128" and mode == "auto" else 2],
            (0, -13 if mode == "auto" else 5),
            textcoords="offset points",
            color=colour,
            fontsize=8,
        )
    left.set(
        title="worst element, over |A||B|", xlabel="k", ylim=(1e-18, 1e-2), xticks=[16, 64, 256, 1024, 4096, 16384]
    )
    left.set_xticklabels(["16", "64", "256", "1024", "4096", "16384"])
    left.minorticks_off()
    left.grid(alpha=0.25)
    shown = {
        ("headline", "gemmserve", "auto"): "auto",
        ("headline", "vendor BLAS", "auto"): "cuBLAS",
        ("headline", "cuBLAS FAST_TF32", "auto"): "cuBLAS FAST_TF32",
        ("modes", "gemmserve", "3xfp16-3m"): "3xfp16-3m",
        ("modes", "gemmserve", "3xtf32"): "3xtf32",
        ("modes", "gemmserve", "tf32"): "tf32",
        ("double", "gemmserve", "auto"): "complex128 auto",
        ("double", "vendor BLAS", "auto"): "complex128 cuBLAS",
    }
    for row in kernels:
        name = shown.get((row["table"], row["who"], row["compute"]))
        if name is None or (row["table"] == "double" and (row["m"], row["dtype"]) != (8192, "complex128")):
            continue
        colour = GREY if "cuBLAS" in name else BLUE if "auto" in name else RED
        right.semilogy(row["tflops"], row["rel_fro"], "o", color=colour)
        above = name not in {"cuBLAS FAST_TF32", "3xtf32", "3xfp16-3m", "complex128 auto"}
        place = (5, 5) if above else (5, -11)
        right.annotate(
            name, (row["tflops"], row["rel_fro"]), place, textcoords="offset points", color=colour, fontsize=8
        )
    right.set(title="speed and error in norm", xlabel="TFLOP/s", xlim=(0, 720), ylim=(1e-16, 1e-2))
    right.grid(alpha=0.25)


DRAWN = {
    "beamforming": beamforming,
    "s-parameters": s_parameters,
    "maxwell": maxwell,
    "quantum-circuits": quantum_circuits,
    "compute-modes": compute_modes,
}


def blocks(page: Path) -> str:
    """The Python blocks of a page as one program, on the lines where they stand in it.

    Those that need what is not installed are left out: no picture is of theirs.
    """
    program, line = [], 0
    text = page.read_text()
    fence = re.compile(r"(?:^<!-- needs: ([^>]*) -->\n)?^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
    for found in fence.finditer(text):
        if any(importlib.util.find_spec(name) is None for name in (found[1] or "").split()):
            continue
        begins = text.count("\n", 0, found.start(2))
        program.append("\n" * (begins - line) + found[2])
        line = begins + found[2].count("\n")
    return "".join(program)


def draw(name: str) -> Path:
    """Run a page's blocks against the server of GEMMSERVE_SERVER and draw its picture; return the file."""
    page = ROOT / "docs" / "guides" / f"{name}.md"
    names: dict[str, Any] = {"__name__": name}
    exec(compile(blocks(page), str(page), "exec"), names)  # noqa: S102 - the own pages of the repository
    path = PICTURES / f"{name}.svg"
    with plt.rc_context(STYLE):
        DRAWN[name](names)
        plt.savefig(path, dpi=72, metadata={"Date": None})
        plt.close("all")
    return path


def main() -> None:
    """Command line: names of pages, all without one."""
    sys.path.insert(0, str(ROOT / "examples"))
    from local_server import LocalServer

    with LocalServer() as server:
        os.environ["GEMMSERVE_SERVER"] = server.url
        for name in sys.argv[1:] or DRAWN:
            path = draw(name)
            print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
