"""The suite's figures on disk: written after every case, so that a run that is killed loses one case at most."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path

import gemmserve_kernels


def digest():
    """Return the digest of every source and table of the kernels: figures of others are not continued."""
    root = Path(gemmserve_kernels.__file__).parent
    sources = sorted(
        path for kind in ("*.py", "*.cu", "*.cuh", "*.json") for path in root.rglob(kind) if "bench" not in path.parts
    )
    total = hashlib.sha256()
    for path in sources:
        total.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return total.hexdigest()[:16]


def writable(value):
    """JSON has no NaN and no infinity: "nan", "inf"."""
    if isinstance(value, dict):
        return {key: writable(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [writable(part) for part in value]
    return value if not isinstance(value, float) or math.isfinite(value) else str(value)


def readable(value):
    """What `writable` wrote."""
    if isinstance(value, dict):
        return {key: readable(part) for key, part in value.items()}
    if isinstance(value, list):
        return [readable(part) for part in value]
    return float(value) if value in ("nan", "inf", "-inf") else value


class Results:
    """A document that grows: environment, rates, rows, and the keys of the cases that are done."""

    def __init__(self, path, environment, sources, *, fresh=False):
        self.path = path
        self.document = {"environment": environment, "sources": sources, "rates": None, "done": [], "rows": []}
        if path.is_file() and not fresh:
            kept = readable(json.loads(path.read_text(encoding="utf-8")))
            if kept.get("sources") == sources and kept["environment"].get("device") == environment.get("device"):
                self.document = kept

    def done(self, key):
        """Whether that case is there."""
        return key in self.document["done"]

    def add(self, key, rows):
        """The rows of a case, which replace none."""
        self.document["rows"] += rows
        self.document["done"].append(key)
        self.save()

    def save(self):
        """Under another name first: what is there is always whole."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_suffix(".part")
        text = json.dumps(writable(self.document), indent=1, allow_nan=False)
        temporary.write_text(text + "\n", encoding="utf-8")
        temporary.replace(self.path)
