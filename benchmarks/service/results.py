"""The figures on disk: written after every case, so that a run that is killed loses one case at most."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("client/gemmserve", "kernels/gemmserve_kernels", "service/gemmserve_service", "benchmarks/service")
AFTERWARDS = ("report.py", "summary.py", "plots.py")
"""What looks at figures and makes none."""


def digest():
    """Return the digest of every source that takes part: figures of others are not continued."""
    total = hashlib.sha256()
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*")):
            measures = path.parent != ROOT / PACKAGES[-1] or path.name not in AFTERWARDS
            if measures and path.suffix in {".py", ".sql", ".cu", ".cuh", ".json"}:
                total.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return total.hexdigest()[:16]


class Results:
    """A document that grows: environment, versions, ceilings, rows, who could not take part, and what is done."""

    def __init__(self, path, environment, sources, *, fresh=False):
        self.path = path
        self.document = {
            "environment": environment, "sources": sources, "versions": {}, "ceilings_mib_s": {}, "unavailable": {},
            "done": [], "rows": [],
        }  # fmt: skip
        self.replaced = False
        if path.is_file() and not fresh:
            kept = json.loads(path.read_text(encoding="utf-8"))
            same = kept.get("sources") == sources and kept["environment"].get("options") == environment.get("options")
            self.replaced = not same
            if same:
                self.document = kept

    def add(self, name, rows, failed):
        """The rows of a case, and who could not take part in it and why."""
        self.document["rows"] += rows
        if failed:
            self.document["unavailable"][name] = failed
        self.document["done"].append(name)
        self.save()

    def save(self):
        """Writes the document."""
        write(self.path, self.document)


def write(path, document):
    """Write JSON, under another name first: the file that is there is always whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".part")
    text = json.dumps(document, indent=1, allow_nan=False)
    temporary.write_text(text + "\n", encoding="utf-8")
    temporary.replace(path)
