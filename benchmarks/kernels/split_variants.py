"""What tune_split.py measures: variants of the pre-pass's geometry by the length of vectors. Pure."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import numpy as np

SHAPES = {
    64: (65536, 65536),
    256: (32768, 32768),
    512: (512, 512),
    1024: (1024, 1024),
    2048: (2048, 2048),
    4096: (3456, 4096),
    8192: (8192, 8192),
}
"""(m, n) by k."""
DEFAULT = "default"
COMMON = {"st": {"stream": True}}
BY_K = {
    64: {
        "together": {"alone": 0, "threads": 64, "blocks": 8, "stages": 2},
        "s128t128b6": {"strip": 128, "threads": 128, "blocks": 6},
        "b2": {"blocks": 2},
        "st3": {"stages": 3},
    },
    256: {
        "together": {"alone": 0, "threads": 128, "blocks": 6, "stages": 2},
        "s64t128b6": {"strip": 64, "threads": 128, "blocks": 6},
        "s64st3": {"strip": 64, "stages": 3},
        "s256st1": {"strip": 256, "stages": 1},
        "b2": {"blocks": 2},
    },
    512: {
        "together": {"alone": 0, "threads": 256, "blocks": 3, "strip": 32, "stages": 2},
        "b2": {"blocks": 2},
        "s32t128b6": {"strip": 32, "threads": 128, "blocks": 6},
    },
    1024: {
        "together": {"alone": 0, "threads": 256, "blocks": 2, "strip": 64, "cluster": 2, "stages": 2},
        "b2": {"blocks": 2},
        "s32t128b6": {"strip": 32, "threads": 128, "blocks": 6},
    },
    2048: {"b3": {"blocks": 3}, "s64": {"strip": 64}, "st1": {"stages": 1}},
    4096: {"b3": {"blocks": 3}, "st1": {"stages": 1}, "s64": {"strip": 64}},
    8192: {"t512": {"threads": 512, "held": 1, "patches": 1}, "h4": {"held": 4, "ranks": 1}, "st1": {"stages": 1}},
}
"""What each variant changes: fields of the geometry."""
FIELDS_ALONG = ("threads", "blocks", "held", "ranks", "stages", "stream", "alone")
"""Fields of a geometry that change the kernel for vectors along memory."""
TINY = {100: (40, 24)}
TINY_VARIANTS = {"s64": {"strip": 64}, "t128": {"threads": 128, "blocks": 4}}
LAYOUTS = ("NN", "NT", "TN", "TT")
"""trans_a, trans_b. Vectors of A lie along memory and those of B across it with NN, both along it with NT."""
PROBED = (1024, 4096)
PROBES = {
    "no stores": ('asm volatile("st.global.v4.u32', 'if (words.at[0] == 0x12345678u) asm volatile("st.global.v4.u32'),
    "no loads": (
        'asm volatile(GEMM_COPY("[%0], [%1], %2")',
        'if (from == nullptr) asm volatile(GEMM_COPY("[%0], [%1], %2")',
    ),
}
"""What takes the place of what in the kernel's text; neither condition ever holds."""


@dataclass(frozen=True)
class Job:
    """The pre-pass of op(A) (m x k) and op(B) (k x n) in one variant."""

    k: int
    m: int
    n: int
    dtype: str
    layout: str
    variant: str
    changes: tuple[tuple[str, object], ...] = ()
    probe: str = ""

    @property
    def moved(self):
        """Bytes read and written: two planes of a part are as long as the part."""
        return 2 * (self.m + self.n) * self.k * np.dtype(self.dtype).itemsize

    @property
    def shapes(self):
        """Shapes of the arrays A and B."""
        logical = (self.m, self.k), (self.k, self.n)
        return [shape if trans == "N" else shape[::-1] for shape, trans in zip(logical, self.layout, strict=True)]


def jobs(only=(), *, tiny=False):
    """What to measure, for each k and layout first what `geometry_of` chooses."""
    for k, (m, n) in (TINY if tiny else SHAPES).items():
        if only and k not in only:
            continue
        for dtype, layout in itertools.product(("complex64", "float32"), LAYOUTS):
            if dtype == "float32" and not tiny and (layout == "TT" or (layout == "NT" and k not in PROBED)):
                continue
            default = Job(k, m, n, dtype, layout, DEFAULT)
            yield default
            if dtype == "complex64":
                probes = PROBES if k in PROBED and layout != "TT" else ()
                yield from (replace(default, variant=f"probe: {probe}", probe=probe) for probe in probes)
                changed = TINY_VARIANTS if tiny else worthwhile(layout, COMMON | BY_K[k])
                for variant, changes in changed.items():
                    yield replace(default, variant=variant, changes=tuple(changes.items()))


def worthwhile(layout, variants):
    """Those of the variants that are not sure to take another's time with that layout.

    With TT both operands do what one of them does with NN and the other with TN: the default is enough.
    """
    if layout != "NT":
        return {} if layout == "TT" else variants
    along = {}
    for name, changes in variants.items():
        along.setdefault(tuple((field, changes[field]) for field in FIELDS_ALONG if field in changes), name)
    return {name: variants[name] for fields, name in along.items() if fields}
