"""Figures of the README and of docs/*.md, from the JSON under docs/benchmarks; README's first picture too.

    python -m benchmarks.figures            # writes what has changed
    python -m benchmarks.figures --check    # names it, status 1
    python -m benchmarks.figures --map      # draws docs/pictures/power-map.png as well, by a server that it starts

A figure stands between two comments, `<!-- figure: NAME -->236<!-- end -->`, within a line (not at its beginning, where
Markdown would take the comment for a block) or around lines. NAME is one of FIGURES; tests/docs/test_figures.py holds
pages and JSON together.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from functools import cache
from pathlib import Path

from benchmarks import planning
from benchmarks.guide_tables import TABLES

ROOT = Path(__file__).parents[1]
REPORTS = ROOT / "docs" / "benchmarks"
PICTURES = ROOT / "docs" / "pictures"
MARKED = re.compile(r"<!-- figure: ([\w. -]+) -->(.*?)<!-- end -->", re.DOTALL)


@cache
def report(name):
    """Return the JSON of a report."""
    return json.loads((REPORTS / f"{name}.json").read_text(encoding="utf-8"))


# -- the kernels -------------------------------------------------------------------------------------------------------


def kernel(who, table, case, compute="auto", dtype="complex64", label=""):
    """Return the one row of the kernels' report that is asked for."""
    asked = {"who": who, "table": table, "case": case, "compute": compute, "dtype": dtype, "label": label}
    rows = report("second-wave-nvidia-h200" if table == "second-wave" else "kernels-nvidia-h200")["rows"]
    (found,) = [row for row in rows if all(row[name] == value for name, value in asked.items())]
    return found


def cube(n):
    """Return the name of the case of square matrices."""
    return f"{n} x {n} x {n}"


HEADLINE = "3456 x 4096 x 4096"
PREPARED = "the same, operands [prepared](docs/kernels.md#operands-that-are-used-many-times)"
# What it is, our row, the rival, its name beyond cuBLAS, and how speed is told.
COMPARED = [
    (f"complex64 `auto`, {HEADLINE}", ("gemmserve", "headline", HEADLINE), "vendor BLAS", "", "rate"),
    (PREPARED, ("prepared", "headline", HEADLINE), "vendor BLAS", "", "rate"),
    *(
        (f"complex64 `auto`, {n}³", ("gemmserve", "square", cube(n)), "vendor BLAS", "", "rate")
        for n in (8192, 2048, 1024)
    ),
    ("complex64 `auto`, 8192³, prepared", ("prepared", "square", cube(8192)), "vendor BLAS", "", "rate"),
    (
        f"complex64 `3xfp16-3m`, prepared, {HEADLINE}",
        ("prepared", "modes", HEADLINE, "3xfp16-3m"),
        "vendor BLAS",
        "",
        "rate",
    ),
    (
        f"complex64 `tf32`, {HEADLINE}",
        ("gemmserve", "modes", HEADLINE, "tf32"),
        "vendor BLAS",
        ", FAST_TF32",
        "rate",
    ),
    ("float32 `auto`, 8192³", ("gemmserve", "float32", cube(8192), "auto", "float32"), "vendor BLAS", "", "rate"),
    ("complex128 `auto`, 8192³", ("gemmserve", "double", cube(8192), "auto", "complex128"), "vendor BLAS", "", "rate"),
    (
        "complex64, 200,000 products of 4 x 4 x 4",
        ("gemmserve", "batched", "200000 x 4 x 4 x 4"),
        "vendor BLAS",
        "",
        "us",
    ),
    (
        "complex64 16 x 2048 x 2048 x 1024 (batch, m, n, k), largest magnitudes over m",
        ("gemmserve", "gemm_reduce", "16 x 2048 x 2048 x 1024", "auto", "complex64", "absmax"),
        "cupy",
        ", then CuPy",
        "ms",
    ),
    (
        "complex64 256 x 512 x 512 x 64, the same",
        ("gemmserve", "gemm_reduce", "256 x 512 x 512 x 64", "auto", "complex64", "absmax"),
        "cupy",
        ", then CuPy",
        "ms",
    ),
    (
        "float32 64 x 1024 x 1024 x 256, maxima over m",
        ("gemmserve", "gemm_reduce", "64 x 1024 x 1024 x 256", "auto", "float32", "max"),
        "cupy",
        ", then CuPy",
        "ms",
    ),
    (
        "complex64 4 x 65536 x 4096 x 64, sums of squares over m",
        ("gemmserve", "gemm_reduce", "4 x 65536 x 4096 x 64", "auto", "complex64", "sumsq"),
        "cupy",
        ", then CuPy",
        "ms",
    ),
]
SPEED = {
    "rate": lambda row: (digits(row["tflops"], 3), " TFLOP/s"),
    "us": lambda row: (digits(row["seconds"] * 1e6, 3), " us"),
    "ms": lambda row: (digits(row["seconds"] * 1e3, 3), " ms"),
}


def digits(value, count):
    """Return a number with so many digits."""
    return f"{value:#.{count}g}".rstrip(".") if value < 10**count else f"{value:.0f}"


def compared():
    """Return the README's table: our kernels beside cuBLAS."""
    lines = ["| product | ours | cuBLAS | times as fast | our error | cuBLAS's |", "|---|---|---|---|---|---|"]
    for what, asked, rival, rival_is, told in COMPARED:
        ours, theirs = kernel(*asked), kernel(rival, *asked[1:])
        (own, unit), (other, _) = SPEED[told](ours), SPEED[told](theirs)
        times = digits(theirs["seconds"] / ours["seconds"], 2)
        errors = f"{ours['rel_fro']:.1e} | {theirs['rel_fro']:.1e}"
        lines.append(f"| {what} | {own}{unit} | {other}{rival_is} | {times} | {errors} |")
    return re.sub(r"e-0(\d)", r"e-\1", "\n\n" + "\n".join(lines) + "\n\n")


DOUBLE_SHOWN = {
    "gemmserve": "`auto`",
    "newest cuBLAS": "cuBLAS 13.10, native",
    "newest cuBLAS 47 bits": "cuBLAS 13.10, 47 bits",
    "newest cuBLAS 55 bits": "cuBLAS 13.10, 55 bits",
    "newest cuBLAS dynamic": "cuBLAS 13.10, dynamic bits",
}
"""Contenders of the table by their names in the report."""
FINEST = {"complex128": "ozaki 17", "float64": "ozaki 16"}
"""Ours with as many moduli as there are."""


def double_beside_emulation():
    """Return the table of products in double precision beside a newer cuBLAS that emulates them."""
    rows = report("second-wave-nvidia-h200")["rows"]
    lines = ["| | ms | error | worst element, u |", "|---|---|---|---|"]
    for dtype, n in (("complex128", 8192), ("complex128", 4096), ("complex128", 2048), ("float64", 8192)):
        finest = FINEST[dtype]
        shown = {**DOUBLE_SHOWN, finest: f"`ozaki`, {finest.split()[1]} moduli"}
        for row in rows:
            if (row["dtype"], row["case"], row["label"]) == (dtype, cube(n), "") and row["who"] in shown:
                cells = (digits(row["seconds"] * 1e3, 3), f"{row['rel_fro']:.1e}", digits(row["element"], 2))
                lines.append(f"| {dtype} {n}³, {shown[row['who']]} | {' | '.join(cells)} |")
    return "\n\n" + "\n".join(lines) + "\n\n"


def single_by_residues():
    """Return the table of complex64 products through residues, which `auto` takes, beside `3xfp16`."""
    rows = report("second-wave-nvidia-h200")["rows"]
    lines = ["| | ms | TF | error | worst element, u |", "|---|---|---|---|---|"]
    shown = {
        ("auto", "gemmserve"): "`auto`, residues",
        ("auto", "prepared"): "`auto`, operands prepared",
        ("auto", "wgmma"): "`3xfp16`",
        ("auto", "vendor BLAS"): "cuBLAS, FP32",
    }
    for case in (HEADLINE, cube(8192)):
        for (compute, who), name in shown.items():
            row = next(
                each
                for each in rows
                if (each["dtype"], each["case"], each["compute"], each["who"]) == ("complex64", case, compute, who)
            )
            cells = digits(row["seconds"] * 1e3, 3), f"{row['tflops']:.0f}", f"{row['rel_fro']:.1e}"
            cells = *cells, digits(row["element"], 2)
            lines.append(f"| {case}, {name} | {' | '.join(cells)} |")
    return "\n\n" + "\n".join(lines) + "\n\n"


def spikes_beside_emulation():
    """Return how many times as long as `auto` a newer cuBLAS's dynamic emulation takes for data with spikes."""
    rows = [row for row in report("second-wave-nvidia-h200")["rows"] if row["init"] == "spikes"]
    own, other = (row["seconds"] for who in ("gemmserve", "newest cuBLAS dynamic") for row in rows if row["who"] == who)
    return digits(other / own, 2)


LONG_S = 25e-6
"""Seconds of a device from which on no algorithm's call takes the host longer."""
OTHER_ARITHMETIC = ("prepared", "cuBLAS FAST_TF32", "cuBLAS zgemm3m")


def auto_beside_the_best():
    """Return how far `auto` is from the fastest of all on the device, at worst, in percent, of products that are not
    short.
    """
    times = {}
    for row in report("kernels-nvidia-h200")["rows"]:
        if row["compute"] == "auto" and row["op"] == "gemm" and row["seconds"] and row["who"] not in OTHER_ARITHMETIC:
            case = row["table"], row["case"], row["dtype"], row["label"]
            times.setdefault(case, {})[row["who"]] = row["seconds"]
    long = [by_who for by_who in times.values() if min(by_who.values()) >= LONG_S]
    return f"{100 * (1 - min(min(by_who.values()) / by_who['gemmserve'] for by_who in long)):.1f} %"


CALLS = [
    ("complex64 256³, `vendor`", "vendor"),
    ("the same by CuPy's `matmul`", "CuPy matmul 256"),
    ("complex64 256³, `simt`", "simt"),
    ("64 products of 16 x 16 x 16", "small"),
    ("complex64 512³, `3xfp16`", "wgmma 3xfp16"),
    ("complex64 1024³, `auto`", "auto 1024"),
    ("complex128 512³, `ozaki`", "ozaki"),
    ("largest magnitudes of 4 products of 512 x 512 x 64, `auto`", "reduce auto"),
    ("the same by CuPy's `matmul`, `abs` and `max`", "CuPy matmul, abs, max"),
    ("their sums", "reduce sums"),
    ("largest magnitudes, complex128, `dmma`", "reduce dmma"),
]
"""What a call is, and its row."""


SINGLE = ("float32", "complex64")
SHOWN = ("dominant-term", "positive", "exp-1n", "normal", "spike by nothing")


def ways_with_a_dominant_term():
    """Return a table of ways to sum on a tensor core: worst errors of elements beside what is allowed, and costs."""
    rows = report("dominant-term-model")["rows"]
    lines = [f"| sums leave the tensor core | {' | '.join(SHOWN)} | normal, in norm | cost |", "|---" * 8 + "|"]
    for name in dict.fromkeys(row["name"] for row in rows):
        own = {row["kind"]: row for row in rows if row["name"] == name}
        cells = [f"{own[kind]['error']:.1f} ({own[kind]['rule']:.1f})" for kind in SHOWN]
        norm = f"{own['normal']['norm'] * 1e7:.2f}e-7"
        lines.append(f"| {name} | {' | '.join(cells)} | {norm} | {own['normal']['cost']} |")
    return "\n".join(["", *lines, "", ""])


def dominated_on_a_device():
    """Return a table of the worst errors of elements that one term dominates, of 32-bit data, beside cuBLAS's."""
    rows = [row for row in report("accuracy-dominant-term-nvidia-h200")["rows"] if row["dtype"] in SINGLE]
    modes = ("auto", "3xfp16", "6xbf16", "fp32")
    lines = [f"| dtype | m x n x k | cuBLAS | {' | '.join(f'`{mode}`' for mode in modes)} |", "|---" * 7 + "|"]
    for dtype, k, m, n in sorted({tuple(row[name] for name in ("dtype", "k", "m", "n")) for row in rows}):
        own = {row["mode"]: row for row in rows if (row["dtype"], row["k"], row["m"], row["n"]) == (dtype, k, m, n)}
        vendor = max(row["vendor"] for row in own.values())
        cells = [f"{own[mode]['error']:.1f}" if mode in own else "" for mode in modes]
        lines.append(f"| {dtype} | {m} x {n} x {k} | {vendor:.1f} | {' | '.join(cells)} |")
    return "\n".join(["", *lines, "", ""])


def still_served(k, tile):
    """Return the share of normal data's tiles that planes would serve."""
    (found,) = [
        row["share"]
        for row in report("dominant-term-model")["served"]
        if (row["kind"], row["k"], row["tile"]) == ("normal", k, tile) and row["large"] > 8
    ]
    return f"{found:.0%}".replace("%", " %")


def host_cost(name):
    """Return what a call costs the host, or a part of every call, in microseconds."""
    found = report("host-cost-nvidia-h200")
    (row,) = [row for row in found["rows"] + found["parts"] if row["name"] == name]
    return f"{row['seconds'] * 1e6:.1f}"


def calls():
    """Return the table of what calls cost the host."""
    lines = ["| call | us |", "|---|---|", *(f"| {what} | {host_cost(name)} |" for what, name in CALLS)]
    return "\n\n" + "\n".join(lines) + "\n\n"


# -- the service -------------------------------------------------------------------------------------------------------


def service(name):
    """Return the figure of that name in the summary of the service beside others."""
    (found,) = [each["found"] for each in report("service")["summary"] if each["name"] == name]
    return found


def beside_others():
    """Return the README's paragraph on the service beside others."""
    wire = service("96 MiB on the wire, over tritonserver's time (axpy)")
    bare = service("96 MiB on the wire, over the time of asgi (echo)")
    clients = service("96 MiB, tritonclient's time (axpy) over our client's")
    small = service("64 x 64, 16 clients, rate over tritonserver's")
    lit = service("64 x 64, 16 clients, rate over litserve's")
    processors = {2: "two"}[report("service")["environment"]["cpus"]]
    return f"""

Over HTTP, on {processors} processors and without a GPU, beside others in one run
([all of it](docs/benchmarks/service.md)): 96 MiB to the server and back take {wire:.2f} of tritonserver's time and
{bare:.2f} of a bare ASGI echo's, NumPy to NumPy {1 / clients:.2f} of tritonclient's; 64 x 64 products from 16 clients
run at {small:.2f} of tritonserver's rate and {lit:.1f} times LitServe's.

"""


SENT_COMPRESSED = 7 / 8
"""Share of its bytes above which the client sends an array as it is."""


def device(*path):
    """Return a figure of the service on a device, by its path in the JSON."""
    found = report("service-nvidia-h200")
    for name in path:
        found = found[name]
    return found


def milliseconds(seconds, places=1):
    """Return a time as text, in ms."""
    return f"{seconds * 1e3:.{places}f} ms"


# -- faults, attacks, containers ---------------------------------------------------------------------------------------


def kills(run):
    """Return how often processes were killed in a run of chaos."""
    return str(sum(report("chaos")[run]["faults"].values()))


def ready_again(who):
    """Return the median and the worst time to ready after a kill."""
    times = report("chaos")["kills"]["time_to_ready_s"][who]
    return f"{times['median']:.1f} and {times['worst']:.1f} s"


def attacked(least):
    """Return the least or the largest 99th percentile of the attacks, in ms."""
    peace = {"quiet", "quiet again", "livez_ms"}
    times = [each["p99_ms"] for name, each in report("attacks").items() if name not in peace]
    return f"{min(times) if least else max(times):.0f}"


def attacks_grew():
    """Return the largest 99th percentile of the attacks over the first one in peace."""
    return f"{float(attacked(least=False)) / report('attacks')['quiet']['p99_ms']:.1f}"


def sampled(what):
    """Return what a sampled request costs beyond the same where nothing is traced, in us."""
    rows = report("tracing")["rows"]
    seconds = rows["on, sampled"][what]["median"] - rows["off, traceparent"][what]["median"]
    return f"{float(f'{seconds * 1e6:.2g}'):.0f} us"


def image(target, name="bytes"):
    """Return the size of an image in MB: of all of it, its base, or (`own`) what is on top of that."""
    sizes = report("containers")["targets"][target]["image"]
    size = sizes["bytes"] - sizes["base_bytes"] if name == "own" else sizes[name]
    return f"{size / 1e6:,.0f}"


def started():
    """Return the table of times from `compose up` to ready."""
    lines = [
        "",
        "",
        "| | container made | its process runs | front started | ready | all |",
        "|---|---|---|---|---|---|",
    ]
    for name, what in (("cold", "cold: new volumes, empty page cache"), ("warm", "warm")):
        times = report("containers")["targets"]["cpu"][name]
        cells = [f"{times[phase]['median']:.2f}" for phase in ("create", "start", "front", "ready")]
        whole = times["total"]
        cells.append(f"{whole['median']:.2f} ({whole['min']:.2f} to {whole['max']:.2f})")
        lines.append(f"| {what} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", ""])


def compression():
    """Return the table of what zstd makes of arrays."""
    lines = [
        "",
        "",
        "| data | bytes left | coded, MiB/s | decoded, MiB/s | pays on lines below, MiB/s |",
        "|---|---|---|---|---|",
    ]
    for what, row in report("compression")["rows"].items():
        rates = [f"{float(f'{row[name] / 2**20:.2g}'):,.0f}" for name in ("coded", "decoded", "pays_below")]
        if row["left"] > SENT_COMPRESSED:
            rates[-1] += " (sent as it is)"
        lines.append(f"| {what} | {100 * row['left']:.0f} % | {' | '.join(rates)} |")
    return "\n".join([*lines, "", ""])


def launchers():
    """Idle costs by process, and seconds after losses, as two tables."""
    found = report("launchers")
    rows = ["", "| idle, two workers | processes | of a processor | memory |", "|---|---|---|---|"]
    for kind, row in found["idle"].items():
        rows.append(
            f"| {kind} | {row['processes']} | {row['cpu_share']:.1%} | {row['bytes'] / 2**20:.0f} MiB |".replace(
                "%", " %"
            )
        )
    rows += ["", "| loss | times | work goes on after: median | longest |", "|---|---|---|---|"]
    losses = {f"`kill -9` of {name}": seconds for name, seconds in found["losses_s"].items()}
    for name, seconds in (losses | {"link of the node that has the jobs, cut without a word": found["cut_s"]}).items():
        rows.append(f"| {name} | {len(seconds)} | {statistics.median(seconds):.1f} s | {max(seconds):.1f} s |")
    ordered, joined = (statistics.median(found["both_actors_s"][each]) for each in ("ordered", "joined"))
    rows += [
        "",
        f"With both actors gone, one that Ray had started again had its order after {ordered:.1f} s, and a worker had",
        f"joined after {joined:.1f} s (medians).",
    ]
    head = found["head"]
    rows += [
        "",
        f"Ray's head stopped for {head['gone_s']:.0f} s: `/readyz` was 200 in {head['readyz']['ready']} looks of",
        f"{head['readyz']['looks']}, {head['jobs_meanwhile']:,} jobs ended meanwhile, the longest after",
        f"{head['longest_job_s']:.1f} s, and the bridge was back {head['bridge_back_s']:.1f} s after it.",
        "",
    ]
    return "\n".join(rows) + "\n"


def cluster_overhead():
    """Return what a joined worker costs a small job, as a table."""
    lines = [
        "",
        "| result | on the server's own worker, p50 | on a joined one | more | bare bytes | agent | front, more |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in report("cluster")["overhead"]:
        size = row["result_bytes"]
        size = f"{size >> 10} KiB"
        local, joined = (f"{1e3 * row[who]['p50']:.2f} ms" for who in ("local", "joined"))
        more, least, most = (1e3 * row[f"more_{which}_s"] for which in ("p50", "least", "most"))
        cpu = row["cpu_s"]
        agent, front = cpu["joined"]["agent"], cpu["joined"]["front"] - cpu["local"]["front"]
        lines.append(
            f"| {size} | {local} | {joined} | {more:.2f} ms ({least:.2f} to {most:.2f}) | "
            f"{1e3 * row['bare']['p50']:.2f} ms | {1e3 * agent:.2f} ms | {1e3 * front:.2f} ms |"
        )
    return "\n".join([*lines, "", ""])


def cluster_operands():
    """Return how operands come to a joined worker, beside bare sockets, as a table."""
    lines = [
        "",
        "| link | operands to a joined worker | bare `recv_into` | of bare | CPU-s a GiB | bare |",
        "|---|---|---|---|---|---|",
    ]
    for row in report("cluster")["operands"]:
        rates = [f"{row[who]['bytes_per_s'] / 2**20:.0f} MiB/s" for who in ("ours", "bare")]
        spent = [f"{row[who]['cpu_s_per_gib']:.2f}" for who in ("ours", "bare")]
        lines.append(
            f"| {row['link_bits_per_s'] / 1e9:.0f} Gb/s | {rates[0]} | {rates[1]} | {row['of_bare']:.2f} | "
            f"{spent[0]} | {spent[1]} |"
        )
    return "\n".join([*lines, "", ""])


def cluster_jobs():
    """Return jobs a second of one joined worker and of two, in words."""
    found = report("cluster")["jobs"]
    side = found["shape"][0]
    return (
        f"products of {side} x {side}: {found['local']:.0f} a second on the server's own worker, {found['one']:.0f} "
        f"on one joined, {found['two']:.0f} on two"
    )


def cluster_cuts():
    """Return what a run of chaos with joined workers did and found, in words."""
    found = report("chaos")["joined_networks"]
    faults, cuts, jobs = found["faults"], found["cut_s"], found["jobs"]
    killed = sum(count for kind, count in faults.items() if kind != "link")
    return (
        f"{jobs['accepted']} jobs in {found['seconds']:.0f} s, {killed} kills of workers, agents, front and "
        f"supervisor, {faults['link']} cuts of {min(cuts):.0f} to {max(cuts):.0f} s: {jobs['lost']} lost, "
        f"{jobs['wrong']} wrong"
    )


def peers(how):
    """Return the median seconds of a product on two devices, or one, with its panels from there."""
    runs = report("peer-panels-nvidia-h200-x2")["seconds"][how]
    return f"{statistics.median(seconds for run in runs for seconds in run):.3f} s"


def peers_chosen(how):
    """Return the median seconds of a product on two devices, or one, where `auto` chose whence panels come, or did not:
    of all but the first of each run, which waits for pages.
    """
    runs = report("peer-panels-nvidia-h200-x2")["auto"]["seconds_with_the_first"][how]
    return f"{statistics.median(seconds for run in runs for seconds in run[1:]):.3f} s"


def first_of_large(part, how):
    """Return the seconds of a server's first such product, where its result is written to pages that nobody had."""
    runs = report("peer-panels-nvidia-h200-x2")["auto"][part][how]
    return f"{min(run[0] for run in runs):.2f} s"


def drawn_at_random():
    """Return how many products drawn at random are beyond what `auto` is to hold."""
    found = report("random-accuracy-nvidia-h200")
    worst = max(case["ratio"] for case in found["near"])
    return f"{found['beyond']} of {found['cases']:,} are beyond it, by {worst:.2f} times at most"


def servers(case):
    """Return products a second of that case of the load test with a server for each of two devices."""
    (found,) = (each for each in report("load-two-servers-nvidia-h200-x2")["figures"] if each["case"] == case)
    return found["achieved"]


def servers_gain(what):
    """Return how many times the products of one server two have, a device each."""
    one, two = (servers(f"1024^3 by {count} of two servers{what}") for count in (1, 2))
    return f"{two / one:.2f}"


def servers_front():
    """Return the front's time for a product by `map` on one of the two servers."""
    (found,) = (
        each for each in report("load-two-servers-nvidia-h200-x2")["figures"]
        if each["case"] == "1024^3 by 1 of two servers, by map"
    )  # fmt: skip
    return f"{1e3 * found['cpu']['front'] / found['achieved']:.2f} ms"


def fetched(way, n=4096):
    """Return the rate at which results of n x n were fetched that way in the load test."""
    (found,) = (
        each for each in report("load-results-nvidia-h200")["figures"]
        if re.fullmatch(rf"{n}\^3, \d+ results fetched by {way}", each["case"])
    )  # fmt: skip
    return f"{found['achieved']:.0f} GB/s"


def moved(case):
    """Return the rate of a large array's way to the server or back in the load test."""
    (found,) = (each for each in report("load-results-nvidia-h200")["figures"] if each["case"] == case)
    return f"{found['achieved']:.1f} GB/s"


FIGURES = {
    "results.socket": lambda: fetched("Unix socket"),
    "results.socket-8192": lambda: fetched("Unix socket", n=8192),
    "results.tcp": lambda: fetched("TCP"),
    "large.put-socket": lambda: moved("put, recycled, Unix socket"),
    "large.get-socket": lambda: moved("get, recycled, Unix socket"),
    "large.put-tcp": lambda: moved("put, recycled, TCP"),
    "large.get-tcp": lambda: moved("get, recycled, TCP"),
    "servers.front": servers_front,
    "accuracy.random": drawn_at_random,
    "servers.jobs": lambda: servers_gain(""),
    "servers.map": lambda: servers_gain(", by map"),
    "servers.rate": lambda: f"{servers('1024^3 by 2 of two servers, by map'):,.0f}",
    "launchers": launchers,
    "peers.one": lambda: peers("one device"),
    "peers.device": lambda: peers("two, panels from the other"),
    "peers.host": lambda: peers("two, panels from the host"),
    "peers.auto": lambda: peers_chosen("two, auto"),
    "peers.never": lambda: peers_chosen("two, never"),
    "peers.one-beside-auto": lambda: peers_chosen("one device"),
    "large.first-to-arena": lambda: first_of_large("results_in_the_arena_seconds_with_the_first", "two"),
    "large.first-to-file": lambda: first_of_large("seconds_with_the_first", "two, auto"),
    "cluster.overhead": cluster_overhead,
    "cluster.operands": cluster_operands,
    "cluster.jobs": cluster_jobs,
    "cluster.chaos": cluster_cuts,
    "compression": compression,
    "kernels": compared,
    "kernels.spikes": spikes_beside_emulation,
    "kernels.double": double_beside_emulation,
    "kernels.single-residues": single_by_residues,
    "kernels.auto-beside-best": auto_beside_the_best,
    "kernels.headline": lambda: milliseconds(kernel("wgmma", "headline", HEADLINE)["seconds"], 2),
    "kernels.1024": lambda: milliseconds(kernel("gemmserve", "square", cube(1024))["seconds"], 3),
    "kernels.short": lambda: milliseconds(
        kernel("gemmserve", "gemm_reduce", "256 x 512 x 512 x 64", label="absmax")["seconds"], 2
    ),
    "dominant-term": ways_with_a_dominant_term,
    "dominant-term.device": dominated_on_a_device,
    "dominant-term.served-64": lambda: still_served(64, 64),
    "dominant-term.served-256": lambda: still_served(64, 256),
    "calls": calls,
    "calls.launch": lambda: f"{host_cost('a launch by the driver')} us",
    "calls.array": lambda: f"{host_cost('a fresh array of 512 KiB')} us",
    "service": beside_others,
    "device.link": lambda: f"{device('link', 'host_to_device') / 1e9:.0f} GB/s",
    "device.first-copy": lambda: f"{device('first_copy', 'bytes_per_s') / 1e9:.0f} GB/s",
    "device.first-copy-share": lambda: f"{device('first_copy', 'of_pinned'):.0%}".replace("%", " %"),
    "device.second": lambda: milliseconds(device("prepared", "jobs", 1, "kernel_s")),
    "device.third": lambda: milliseconds(device("prepared", "jobs", 2, "kernel_s")),
    "device.stream-jobs": lambda: str(device("stream", "jobs")),
    "device.stream": lambda: milliseconds(device("stream", "seconds_per_job")),
    "device.stream-share": lambda: f"{device('stream', 'of_bound'):.0%}".replace("%", " %"),
    "device.small": lambda: milliseconds(device("small", 0, "job_p50_s")),
    "device.small-queue": lambda: milliseconds(device("small", 0, "phases_p50_s", "queue_s")),
    "device.verify-1024": lambda: milliseconds(device("verification", 0, "verify_s")),
    "device.verify-4096": lambda: milliseconds(device("verification", 1, "verify_s")),
    "device.alone-1024": lambda: milliseconds(device("verification", 0, "alone_s")),
    "device.alone-4096": lambda: milliseconds(device("verification", 1, "alone_s")),
    "device.product-1024": lambda: milliseconds(device("verification", 0, "product_s")),
    "device.product-4096": lambda: milliseconds(device("verification", 1, "product_s")),
    "chaos.kills": lambda: kills("kills"),
    "chaos.seconds": lambda: f"{report('chaos')['kills']['seconds']:.0f} s",
    "chaos.device-kills": lambda: kills("device_kills"),
    "chaos.device-seconds": lambda: f"{report('chaos')['device_kills']['seconds']:.0f} s",
    "chaos.jobs": lambda: str(report("chaos")["kills"]["jobs"]["accepted"]),
    "chaos.worker": lambda: ready_again("worker"),
    "chaos.front": lambda: ready_again("front"),
    "chaos.supervisor": lambda: ready_again("supervisor"),
    "chaos.all": lambda: ready_again("all"),
    "chaos.alone": lambda: f"{report('chaos')['neighbours']['quiet']['p99_ms']:.0f} ms",
    "chaos.tiny": lambda: f"{report('chaos')['neighbours']['beside']['tiny jobs without end']['p99_ms']:.0f} ms",
    "chaos.large": lambda: f"{report('chaos')['neighbours']['beside']['large jobs']['p99_ms']:.0f} ms",
    "attacks.before": lambda: f"{report('attacks')['quiet']['p99_ms']:.0f}",
    "attacks.after": lambda: f"{report('attacks')['quiet again']['p99_ms']:.0f} ms",
    "attacks.least": lambda: attacked(least=True),
    "attacks.most": lambda: f"{attacked(least=False)} ms",
    "attacks.times": attacks_grew,
    "attacks.livez": lambda: f"{max(report('attacks')['livez_ms'].values()):.0f} ms",
    "tracing.loop": lambda: sampled("loop_s"),
    "tracing.front": lambda: sampled("front_s"),
    "containers.cpu": lambda: image("cpu"),
    "containers.cuda": lambda: image("cuda"),
    "containers.cpu-own": lambda: image("cpu", "own"),
    "containers.cuda-own": lambda: image("cuda", "own"),
    "containers.cpu-base": lambda: image("cpu", "base_bytes"),
    "containers.cuda-base": lambda: image("cuda", "base_bytes"),
    "containers.times": started,
    **planning.FIGURES,
    **TABLES,
}


def pages():
    """Return every page that may have figures: the README, and the documentation that no script writes."""
    return [ROOT / "README.md", *sorted(path for path in (ROOT / "docs").rglob("*.md") if REPORTS not in path.parents)]


def filled(text):
    """Return a page's text with its figures as the JSON has them.

    Raises ValueError where one begins a line and does not fill lines.
    """

    def fill(found):
        if "\n" not in found[2] and (found.start() == 0 or text[found.start() - 1] == "\n"):
            raise ValueError(f"the figure {found[1]} begins a line")
        return f"<!-- figure: {found[1]} -->{FIGURES[found[1]]()}<!-- end -->"

    return MARKED.sub(fill, text)


# -- pictures ----------------------------------------------------------------------------------------------------------

COLOURS = {"gemmserve": "#3b0f70", "prepared": "#8c2981", "vendor BLAS": "#8a8a8a"}
LABELS = {"gemmserve": "gemmserve auto", "prepared": "operands prepared", "vendor BLAS": "cuBLAS"}
WIDTH, HEIGHT, LEFT, TOP = 330, 210, 60, 50


def speed_and_error():
    """Return an SVG: TFLOP/s and errors of square complex64 products by size, beside cuBLAS."""
    rows = report("kernels-nvidia-h200")
    square = [row for row in rows["rows"] if row["table"] == "square" and row["who"] in COLOURS]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * (WIDTH + LEFT) + 50} {HEIGHT + TOP + 60}">',
        '<g font-family="system-ui, sans-serif" font-size="12" fill="#222">',
        '<rect width="100%" height="100%" rx="6" fill="#fff"/>',
        *panel(square, "tflops", LEFT, "TFLOP/s of n³ complex64 products", rows["environment"]["device"]),
        *panel(square, "rel_fro", 2 * LEFT + WIDTH + 20, "their relative error (Frobenius)", "log scale"),
    ]
    for number, who in enumerate(COLOURS):
        x, y = LEFT + number * 170, TOP + HEIGHT + 46
        parts.append(
            f'<line x1="{x}" x2="{x + 22}" y1="{y - 4}" y2="{y - 4}" stroke="{COLOURS[who]}" stroke-width="3"/>'
        )
        parts.append(f'<text x="{x + 28}" y="{y}">{LABELS[who]}</text>')
    return "\n".join([*parts, "</g></svg>", ""])


def panel(rows, quantity, left, title, note):
    """Yield the elements of one panel; speeds from 0, errors by their logarithm."""
    from math import log2, log10

    sizes = sorted({row["m"] for row in rows})
    if quantity == "tflops":
        low, high, ticks, scale = 0.0, 270.0, [0, 50, 100, 150, 200, 250], float
    else:
        low, high, ticks, scale = -7.3, -5.3, [1e-7, 1e-6], log10

    def across(n):
        return left + WIDTH * (0.04 + 0.92 * log2(n / sizes[0]) / log2(sizes[-1] / sizes[0]))

    def up(value):
        return TOP + HEIGHT * (1 - (scale(value) - low) / (high - low))

    yield f'<text x="{left}" y="{TOP - 24}" font-weight="600">{title}</text>'
    yield f'<text x="{left}" y="{TOP - 9}" fill="#666">{note}</text>'
    for tick in ticks:
        yield f'<line x1="{left}" x2="{left + WIDTH}" y1="{up(tick):.1f}" y2="{up(tick):.1f}" stroke="#ddd"/>'
        text = f"{tick:g}".replace("e-0", "e-")
        yield f'<text x="{left - 8}" y="{up(tick) + 4:.1f}" text-anchor="end" fill="#666">{text}</text>'
    for n in (size for size in sizes if size.bit_count() == 1):
        yield f'<text x="{across(n):.1f}" y="{TOP + HEIGHT + 18}" text-anchor="middle" fill="#666">{n}</text>'
    for who, colour in COLOURS.items():
        own = sorted((row["m"], row[quantity]) for row in rows if row["who"] == who and row[quantity])
        points = " ".join(f"{across(n):.1f},{up(value):.1f}" for n, value in own)
        yield f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2.5"/>'
        for n, value in own:
            yield f'<circle cx="{across(n):.1f}" cy="{up(value):.1f}" r="3" fill="{colour}"/>'


DRAWN = {"speed-and-error.svg": speed_and_error}


def draw_power_map():
    """Draw the beamforming example's power map, computed by a server of its own."""
    sys.path.append(str(ROOT / "examples"))
    import beamforming
    import picture
    from local_server import LocalServer

    from gemmserve import Client

    with LocalServer() as server, Client(server.url) as client:
        picture.draw(beamforming.main(client), beamforming.DIRECTIONS, PICTURES / "power-map.png")


def stale():
    """Return what is not as the JSON has it: paths and the texts that belong there."""
    wanted = {path: filled(path.read_text(encoding="utf-8")) for path in pages()}
    wanted |= {PICTURES / name: drawn() for name, drawn in DRAWN.items()}
    return {
        path: text for path, text in wanted.items() if not path.exists() or path.read_text(encoding="utf-8") != text
    }


def main(arguments):
    """Command line; return the exit status."""
    found = stale()
    for path, text in found.items():
        print(path.relative_to(ROOT))
        if "--check" not in arguments:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    if "--map" in arguments:
        draw_power_map()
    return 1 if found and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
