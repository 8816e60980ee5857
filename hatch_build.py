"""Build hook of hatchling: a bill of materials in every wheel (PEP 770), as `.dist-info/sboms/gemmserve.cdx.json`.

It is CycloneDX 1.6 and says what the wheel itself holds that others wrote (`bundled` in pyproject.toml, each file with
its SHA-256), and which distributions it declares as dependencies: what an installation really has is for the installer
to say. There is no time and no random number in it: the same tree makes the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

NAME = "gemmserve.cdx.json"
_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)(?:\[[^]]*\])?\s*([^;]*?)\s*(?:;\s*(.*))?")


class SbomHook(BuildHookInterface):
    """Write the bill of materials before a wheel is built, and remove it after."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002 (hatchling's signature)
        """Have hatchling put the bill into the wheel. Raises FileNotFoundError for a bundled file that is missing."""
        core = self.metadata.core
        bill = bill_of_materials(
            Path(self.root),
            (core.name, core.version, core.license_expression),
            self.config.get("bundled", []),
            {"": core.dependencies, **core.optional_dependencies},
        )
        self._folder = tempfile.mkdtemp(prefix="gemmserve-sbom-")
        path = Path(self._folder) / NAME
        path.write_text(json.dumps(bill, indent=2, sort_keys=True) + "\n", "utf-8")
        build_data["sbom_files"].append(str(path))

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:  # noqa: ARG002
        """Remove the folder of `initialize`."""
        shutil.rmtree(self._folder)


def bill_of_materials(
    root: Path,
    project: tuple[str, str, str],
    bundled: Sequence[Mapping[str, Any]],
    requirements: Mapping[str, Iterable[str]],
) -> dict[str, Any]:
    """Return the CycloneDX document.

    `project`: name, version and SPDX license expression. `bundled`: for each component `name`, `version`, `license` (of
    SPDX's list), `purl` and `files` (paths below `root`). `requirements`: PEP 508 texts by extra, "" for what is always
    needed. Raises FileNotFoundError, and ValueError for a requirement that is a URL.
    """
    name, version, license_expression = project
    itself = f"pkg:pypi/{name}@{version}"
    inside = [_bundled(root, component) for component in bundled]
    outside = _declared(name, requirements)
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "lifecycles": [{"phase": "build"}],
            "component": {
                "type": "library",
                "bom-ref": itself,
                "name": name,
                "version": version,
                "purl": itself,
                "licenses": [{"expression": license_expression}],
                "components": inside,
            },
        },
        "components": outside,
        "dependencies": [{"ref": itself, "dependsOn": [component["bom-ref"] for component in outside]}],
    }


def _bundled(root: Path, component: Mapping[str, Any]) -> dict[str, Any]:
    """A component that the wheel holds, with its files."""
    files = []
    for file in sorted(component["files"]):
        digest = hashlib.sha256((root / file).read_bytes()).hexdigest()
        files.append({"type": "file", "name": file, "hashes": [{"alg": "SHA-256", "content": digest}]})
    return {
        "type": "library",
        "bom-ref": component["purl"],
        "name": component["name"],
        "version": component["version"],
        "purl": component["purl"],
        "licenses": [{"license": {"id": component["license"]}}],
        "components": files,
    }


def _declared(project: str, requirements: Mapping[str, Iterable[str]]) -> list[dict[str, Any]]:
    """What is required of others, a component for each name; `gemmserve:requirement` are versions and conditions."""
    asked: dict[str, set[str]] = {}
    required = set()
    for extra, texts in requirements.items():
        for text in texts:
            match = _REQUIREMENT.fullmatch(text)
            if match is None:
                raise ValueError(f"not read: {text}")
            name = re.sub(r"[-_.]+", "-", match[1]).lower()
            if name == project:  # an extra that includes others
                continue
            if not extra:
                required.add(name)
            conditions = " and ".join(filter(None, [match[3], f"extra == '{extra}'" if extra else ""]))
            asked.setdefault(name, set()).add("; ".join(filter(None, [match[2] or "*", conditions])))
    return [
        {
            "type": "library",
            "bom-ref": f"pkg:pypi/{name}",
            "name": name,
            "purl": f"pkg:pypi/{name}",
            "scope": "required" if name in required else "optional",
            "properties": [{"name": "gemmserve:requirement", "value": value} for value in sorted(asked[name])],
        }
        for name in sorted(asked)
    ]
