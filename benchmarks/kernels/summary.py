"""What the rows say together: against the rivals, against the best of our own, against what was aimed at. Pure."""

from __future__ import annotations

import statistics

import newest_blas
from data import largest

from gemmserve_kernels.bench import elementwise

PLAIN_RIVALS = ("vendor BLAS", "cupy", "cuBLAS to float32", "np.matmul", newest_blas.NAME)
"""Plain arithmetic of the vendor, or what a user would write."""
BITS_55, BITS_47, DYNAMIC = (mode.name for mode in newest_blas.EMULATED)
NOT_AUTO = ("prepared", "cuBLAS FAST_TF32", "cuBLAS zgemm3m", BITS_55, BITS_47)
"""Not what `auto` is compared with: other work, or another class of error. So are other numbers of residues."""
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
            same = {who: seconds for who, seconds in times.items() if who not in NOT_AUTO and not by_residues(who)}
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
    return found | {"targets": targets(rows), "second_wave_below": second_wave_below(rows)}


def by_residues(who):
    """Whether that is ours with a number of residues of its own."""
    return who.startswith("ozaki ")


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
    every = [*_speed(rows), *_batched(rows), *_reduced(rows), *_errors(rows), *_second_wave(rows)]
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


# ---- the second wave: beside the vendor's newest library, see suite.second_wave

AT_ITS_ERROR = (("complex128", 8192, 1.15, 1.3), ("complex128", 4096, 1.1, 1.25), ("complex128", 2048, 1.1, 1.2),
                ("float64", 8192, 1.1, 1.25))  # fmt: skip
SECOND_REDUCED = (("complex128", "absmax"), ("float64", "max"))
SECOND_THIN = (((64, 8192, 8192), 2.5, 3.0), ((8192, 64, 8192), 2.5, 3.0), ((64, 64, 65536), 1.5, 2.5))
SECOND_BATCHED = ((64, 1.5, 2.0), (128, 2.0, 2.5), (256, 2.5, 3.0))
SECOND_SMALL = ((512, 1.3, 1.6), (768, 2.0, 2.4))
RESIDUES_LIMIT = 2e-15


def _second_wave(rows):
    def of(**wanted):
        wanted = {"compute": "auto", "op": "gemm", "init": "normal"} | wanted
        chosen = [row for row in rows if row["table"] == "second-wave"]
        return {row["who"]: row for row in chosen if all(row[name] == value for name, value in wanted.items())}

    def cube(n, dtype="complex64", **wanted):
        return of(m=n, n=n, k=n, batch=1, dtype=dtype, **wanted)

    for dtype, reduce in SECOND_REDUCED:
        found = of(op="gemm_reduce", dtype=dtype)
        name = f"{dtype} 8x1024x1024x512 {reduce}, over cuBLAS then CuPy"
        yield name, "x", 1.3, 2.0, _over_rivals(found)
    for dtype, n, target, stretch in AT_ITS_ERROR:
        found = cube(n, dtype)
        rival = found.get(BITS_55)
        best = _fastest(found, lambda row, rival=rival: rival and row["rel_fro"] <= rival["rel_fro"])
        yield f"{dtype} {n}^3, over 55 bits at its error", "x", target, stretch, _times(rival, best)
        yield f"{dtype} {n}^3, auto over 55 bits", "x", None, None, _times(rival, found.get("gemmserve"))
        yield f"{dtype} {n}^3, auto's error over that of 55 bits", "<= x", None, None, _errors_over(found)
    found = cube(8192, "complex128")
    best = _fastest(found, lambda row: row["rel_fro"] <= RESIDUES_LIMIT)
    yield "complex128 8192^3 at 2e-15, over 47 bits", "x", 1.05, 1.2, _times(found.get(BITS_47), best)
    for init in ("normal", "spikes"):
        found = cube(8192, "complex128", init=init)
        best = _fastest(found, lambda row, found=found: _in_the_rule(row, found))
        name = f"complex128 8192^3, {init}, over dynamic bits, accuracy rule kept"
        yield name, "x", 1.3, 1.5, _times(found.get(DYNAMIC), best)
    for shape in ({"m": 3456, "n": 4096, "k": 4096}, {"m": 8192, "n": 8192, "k": 8192, "batch": 1}):
        found = of(**shape, compute="auto", dtype="complex64")
        planes = of(**shape, compute="3xfp16", dtype="complex64")
        name = "complex64 " + "x".join(str(shape[side]) for side in "mnk")
        targets = (265, 320) if shape["m"] == 3456 else (None, None)
        yield f"{name} prepared, accuracy rule kept", "TF", *targets, _prepared_rate(found)
        yield f"{name} prepared, by 3xfp16", "TF", None, None, _prepared_rate(planes)
        both = (found.get("wgmma"), found.get("gemmserve"))
        yield f"{name}, auto over 3xfp16, as they come", "x", None, None, _times(*both)
    for (m, n, k), target, stretch in SECOND_THIN:
        yield f"complex64 {m}x{n}x{k}, over cuBLAS", "x", target, stretch, _over_rivals(of(m=m, n=n, k=k))
    for n, target, stretch in SECOND_BATCHED:
        found = {who: row for who, row in of(m=n, dtype="complex64").items() if row["batch"] > 1}
        yield f"complex64 batches of {n}^3, over cuBLAS", "x", target, stretch, _over_rivals(found)
    for n, target, stretch in SECOND_SMALL:
        yield f"complex64 {n}^3, over cuBLAS", "x", target, stretch, _over_rivals(cube(n))
    ratios = [ratio for _, _, ratio in _second_ratios(rows)]
    yield "any case of the second wave, over cuBLAS at worst", "x", 0.98, 1.0, min(ratios, default=None)


def second_wave_below(rows):
    """Cases of the second wave in which a rival of our class of errors is faster, the worst first."""
    below = sorted((ratio, where, who) for where, who, ratio in _second_ratios(rows) if ratio < 1)
    return [{"case": where, "best": who, "ratio": round(ratio, 3)} for ratio, where, who in below]


def _second_ratios(rows):
    """(case, rival, the fastest rival's time over ours) of every case."""
    by_case = {}
    for row in rows:
        if row["table"] == "second-wave" and row["seconds"]:
            key = (row["op"], row["case"], row["dtype"], row["compute"], row["label"])
            by_case.setdefault(" ".join(filter(None, key)), {})[row["who"]] = row
    for where, found in by_case.items():
        rivals = {who: row["seconds"] for who, row in found.items() if who in (*PLAIN_RIVALS, DYNAMIC)}
        if rivals and "gemmserve" in found:
            best = min(rivals, key=rivals.get)
            yield where, best, rivals[best] / found["gemmserve"]["seconds"]


def _over_rivals(found):
    """The fastest plain rival's time over that of `auto`."""
    ratios = [_times(found.get(who), found.get("gemmserve")) for who in PLAIN_RIVALS]
    return min(filter(None, ratios), default=None)


def _prepared_rate(found):
    """The rate of prepared operands, where the promise of elements is kept."""
    ours = found.get("prepared")
    return _rate(ours) if ours and _in_the_rule(ours, found) else None


def _fastest(found, allowed):
    """Our fastest row that is allowed, operands as they come."""
    theirs = (*PLAIN_RIVALS, *NOT_AUTO, DYNAMIC)
    ours = [row for who, row in found.items() if who not in theirs and row["seconds"] and allowed(row)]
    return min(ours, key=lambda row: row["seconds"], default=None)


def _in_the_rule(row, found):
    """Whether the worst element is within what is promised, beside the vendor's plain arithmetic; no, if not known."""
    vendor = found.get("vendor BLAS")
    if vendor is None or vendor["element"] is None or row["element"] is None:
        return False
    return row["element"] <= elementwise.limit(vendor["element"])


def _errors_over(found):
    ours, theirs = found.get("gemmserve"), found.get(BITS_55)
    return ours["rel_fro"] / theirs["rel_fro"] if ours and theirs and theirs["rel_fro"] else None


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
