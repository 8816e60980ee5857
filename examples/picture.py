"""Draws a beamformer's power map."""

from __future__ import annotations

from typing import TYPE_CHECKING

import matplotlib as mpl

mpl.use("Agg")  # a file, not a window

import matplotlib.pyplot as plt
import numpy as np

if TYPE_CHECKING:
    from pathlib import Path

    from beamforming import PowerMap


def draw(power_map: PowerMap, truth: tuple[float, ...], path: Path) -> None:
    """Writes a PNG: power by frequency and direction above, its average with the true directions below."""
    decibel = 10 * np.log10(power_map.power / power_map.power.max())
    mean = 10 * np.log10(power_map.power.mean(0) / power_map.power.mean(0).max())
    peak = 20 * np.log10(power_map.peak.mean(0) / power_map.peak.mean(0).max())
    low = float(np.floor(np.percentile(decibel, 5)))

    figure, (above, below) = plt.subplots(
        2, 1, figsize=(9, 6.5), sharex=True, layout="constrained", height_ratios=[1.25, 1]
    )
    image = above.pcolormesh(
        power_map.angles, power_map.frequencies, decibel, cmap="magma", vmin=low, vmax=0, shading="nearest"
    )
    above.set_ylabel("frequency / top frequency")
    above.set_title(
        "Where the signals come from: beams formed and their power summed in one gemm_reduce", loc="left", fontsize=11
    )
    figure.colorbar(image, ax=above, label="dB", pad=0.01)

    below.plot(power_map.angles, mean, color="#3b0f70", linewidth=1.8, label="mean power (sumsq)")
    below.plot(power_map.angles, peak, color="#de4968", linewidth=1.0, label="peak magnitude (absmax)")
    for angle in truth:
        above.axvline(angle, color="white", linestyle=(0, (2, 4)), linewidth=0.9)
        below.axvline(angle, ymax=0.78, color="0.5", linestyle=(0, (2, 4)), linewidth=0.9, zorder=0)
    tops = mean[np.searchsorted(power_map.angles, power_map.found)]
    below.plot(power_map.found, tops, "o", color="#3b0f70", markersize=5, label="directions found")
    for angle, top in zip(power_map.found, tops, strict=True):
        below.annotate(
            f"{angle:+.2f}\N{DEGREE SIGN}".replace("-", "\N{MINUS SIGN}"),
            (angle, top),
            xytext=(0, 7),
            textcoords="offset points",
            ha="center",
        )
    below.set(xlabel="direction, degrees from broadside (dashed: truth)", ylabel="dB, averaged over frequency")
    below.set(xlim=(-90, 90), ylim=(min(mean.min(), peak.min()) - 0.5, 2.2))
    below.set_xticks(np.arange(-90, 91, 15))
    below.legend(loc="upper right", frameon=False, fontsize=8)
    below.spines[["top", "right"]].set_visible(False)

    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)
