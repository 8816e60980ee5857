"""What the rows say together: against the rivals, against the best of our own, against what was aimed at. Pure."""

from __future__ import annotations

import statistics

from data import largest

PLAIN_RIVALS = ("vendor BLAS", "cupy", "cuBLAS to float32", "np.matmul")
"""Plain arithmetic of the vendor, or what a user would write."""
NOT_AUTO = ("prepared", "cuBLAS FAST_TF32", "cuBLAS zgemm3m")
"""Not what `auto` is compared with: other work, or another class of error."""
NEVER_SLOWER = 0.97
REDUCED = (
    ("complex64", (16, 2048, 2048, 1024), "absmax", 4.0),
    ("complex64", (256, 512, 512, 64), "absmax", 4.5),
    ("float32", (64, 1024, 1024, 256), "max", 3.5),
    ("float16", (64, 1024, 1024, 1024), "max", 1.3),
)
"""Reductions over m of (batch, m, n, k), and how many times as fast as the rival they are to be."""


def summary(rows):
    """`rival_over_auto`: the vendor's time over ours as dispatched, geometric mean. `auto_over_best`: the best time of
    the vendor's plain arithmetic and of our algorithms by name over that of `auto`, at worst, on the device and on the
    wall; `below`: every case where it is under 0.97.
    """
    found = {}
    for time in ("seconds", "wall"):
        ratios, over = [], []
        for names, by_who in cases(rows).items():
            times = {who: row[time] for who, row in by_who.items() if row[time]}
            ours = times.get("gemmserve")
            if ours is None:
                continue
            rivals = [seconds for who, seconds in times.items() if who in PLAIN_RIVALS]
            ratios += [min(rivals) / ours] if rivals else []
            same = {who: seconds for who, seconds in times.items() if who not in NOT_AUTO}
            best = min(same, key=same.get)
            over.append((same[best] / ours, " ".join(filter(None, names)), best))
        suffix = "" if time == "seconds" else "_wall"
        worst = min(over, default=(None, "", ""))
        found |= {
            f"rival_over_auto{suffix}": statistics.geometric_mean(ratios) if ratios else None,
            f"auto_over_best{suffix}": worst[0],
            f"auto_over_best_at{suffix}": f"{worst[1]}: {worst[2]}" if over else "",
            f"below{suffix}": [
                {"case": where, "best": best, "ratio": round(ratio, 3)}
                for ratio, where, best in sorted(over)
                if ratio < NEVER_SLOWER
            ],
        }
    return found | {"targets": targets(rows)}


def cases(rows):
    """Timed products by `auto`: (table, size, dtype, label) -> who -> row."""
    found = {}
    for row in rows:
        if row["compute"] == "auto" and row["op"] == "gemm" and row.get("seconds"):
            found.setdefault((row["table"], row["case"], row["dtype"], row["label"]), {})[row["who"]] = row
    return found


# ---- what was aimed at


def targets(rows):
    """What was aimed at, on an H200, beside what was found: [{name, target, stretch, found, unit, met}]."""
    every = [*_speed(rows), *_batched(rows), *_reduced(rows), *_errors(rows)]
    return [
        {
            "name": name,
            "unit": unit,
            "target": target,
            "stretch": stretch,
            "found": found,
            "met": met(found, target, unit),
        }
        for name, unit, target, stretch, found in every
    ]


def met(found, target, unit):
    if found is None or target is None:
        return None
    return bool(found <= target) if unit.startswith("<=") else bool(found >= target)


def _pick(rows, table, who, **wanted):
    chosen = [r for r in rows if r["table"] == table and r["who"] == who]
    return next((r for r in chosen if all(r[name] == value for name, value in wanted.items())), None)


def _rate(row):
    return row["flops"] / row["seconds"] / 1e12 if row and row.get("seconds") else None


def _times(slow, fast):
    return slow["seconds"] / fast["seconds"] if slow and fast and fast.get("seconds") and slow.get("seconds") else None


def _speed(rows):
    def of(table, who, **wanted):
        return _pick(rows, table, who, **wanted)

    head, rival = of("headline", "gemmserve"), of("headline", "vendor BLAS")
    yield "headline, auto, over cuBLAS", "x", 4.2, None, _times(rival, head)
    yield "headline, auto", "TF", 225, 240, _rate(head)
    yield "headline, prepared", "TF", 248, 255, _rate(of("headline", "prepared"))
    yield "headline, 3xfp16-3m, prepared", "TF", 280, 297, _rate(of("modes", "prepared", compute="3xfp16-3m"))
    for size, times, stretch in ((8192, 4.0, 225), (2048, 3.3, 190), (1024, 2.2, 130), (512, 1.5, 60)):
        ours = of("square", "gemmserve", m=size)
        yield f"{size}^3, auto, over cuBLAS", "x", times, None, _times(of("square", "vendor BLAS", m=size), ours)
        yield f"{size}^3, auto", "TF", None, stretch, _rate(ours)
    fast = of("headline", "cuBLAS FAST_TF32")
    yield "headline, tf32, over FAST_TF32", "x", 3.2, 3.8, _times(fast, of("modes", "gemmserve", compute="tf32"))
    yield "headline, 3xtf32", "TF", 70, None, _rate(of("modes", "gemmserve", compute="3xtf32"))
    wide = of("float32", "gemmserve", m=8192)
    yield "float32 8192^3, over cuBLAS", "x", 3.8, 4.2, _times(of("float32", "vendor BLAS", m=8192), wide)
    residues = of("ozaki", "gemmserve", m=8192)
    yield "complex128 8192^3, ozaki, over cuBLAS", "x", 1.9, 2.3, _times(of("ozaki", "vendor BLAS", m=8192), residues)
    yield "complex128 8192^3, ozaki, error", "<= relF", 3e-15, None, residues and residues["rel_fro"]


def _batched(rows):
    for n in (4, 8, 16, 32):
        row = _pick(rows, "batched", "gemmserve", m=n)
        share = row["bandwidth_share"] if row else None
        yield f"batched {n}x{n}, of a copy's bandwidth", "share", 0.70, 0.85, share
    for n in (64, 128, 256):
        pair = [_pick(rows, "batched", who, m=n) for who in ("vendor BLAS", "gemmserve")]
        yield f"batched {n}x{n}, over cuBLAS", "x", 1.0, None, _times(*pair)


def _reduced(rows):
    for dtype, (batch, m, n, k), reduce, times in REDUCED:
        wanted = {"dtype": dtype, "batch": batch, "m": m, "n": n, "k": k, "label": reduce}
        ours, alone = (_pick(rows, "gemm_reduce", who, **wanted) for who in ("gemmserve", "our product"))
        rivals = [_times(_pick(rows, "gemm_reduce", who, **wanted), ours) for who in PLAIN_RIVALS]
        name = f"{dtype} {batch}x{m}x{n}x{k} {reduce}"
        yield f"{name}, over cuBLAS and CuPy", "x", times, None, min(filter(None, rivals), default=None)
        yield f"{name}, over our product alone, written", "<= x", 1.0, None, _times(ours, alone)
        workspace = ours and ours.get("workspace")
        yield f"{name}, memory beyond operands and results", "<= MiB", 320, None, workspace and workspace / 2**20
    sums = [
        row for row in rows if row["table"] == "gemm_reduce" and row["label"] == "sum" and row["who"] == "gemmserve"
    ]
    shares = [row["bandwidth_share"] for row in sums if row["bandwidth_share"]]
    yield "sum, over reading A and B at a copy's rate", "<= x", 1.3, None, 1 / min(shares) if shares else None


def _errors(rows):
    for dtype, limit, stretch in (("complex64", 5e-7, 2.5e-7), ("float32", 5e-7, 2.5e-7), ("complex128", None, None)):
        mine = [r for r in rows if r["table"] == f"errors {dtype}" and r["who"] == "auto"]
        most = largest(r["rel_fro"] for r in mine) if mine else None
        if limit is not None:
            yield f"{dtype} auto, largest error of every kind and k", "<= relF", limit, stretch, most
        yield f"{dtype} auto, parts' errors over cuBLAS's", "<= x", 1.0, None, worst_part(rows, mine)
        shares = [r["fallback"] for r in mine if r["fallback"] is not None and r["init"] == "normal"]
        yield f"{dtype} auto, share that falls back, normal data", "<= share", 0.0, None, max(shares, default=None)


def worst_part(rows, mine):
    """The largest ratio of our error to the vendor's plain arithmetic's, real and imaginary parts each."""
    ratios = []
    for row in mine:
        rival = next((r for r in rows if r["who"] == "vendor BLAS" and _same(r, row)), None)
        if rival is None:
            continue
        ratios += [row[part] / rival[part] for part in ("rel_real", "rel_imag") if rival[part]]
    return largest(ratios) if ratios else None


def _same(one, other):
    return all(one[name] == other[name] for name in ("table", "case", "dtype", "label"))
