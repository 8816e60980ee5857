"""What `pip install gemmserve` puts on a machine."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
from email.parser import Parser

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PACKAGES = {
    "gemmserve": "client/gemmserve",
    "gemmserve_kernels": "kernels/gemmserve_kernels",
    "gemmserve_service": "service/gemmserve_service",
}


def metadata(wheel):
    (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    return Parser().parsestr(wheel.read(name).decode())


def test_top_level_names_are_the_three_packages(wheel) -> None:
    names = {name.split("/")[0] for name in wheel.namelist()}
    assert {name for name in names if not name.endswith(".dist-info")} == set(PACKAGES)


def test_every_source_file_travels(wheel, root) -> None:
    """Python, kernels, measurements, SQL, files of pages and the typing marker; nothing else."""
    kinds = {".py", ".cu", ".cuh", ".json", ".sql", ".typed", ".css", ".txt", ".ico", ".js", ".md", ".svg"}
    for package, folder in PACKAGES.items():
        here = {
            f"{package}/{path.relative_to(root / folder).as_posix()}"
            for path in (root / folder).rglob("*")
            if path.is_file() and "__pycache__" not in path.parts
        }
        assert {name for name in wheel.namelist() if name.startswith(f"{package}/")} == here
        assert {name[name.rindex(".") :] for name in here} <= kinds
        assert f"{package}/py.typed" in here


def test_kernels_and_queries_are_files(wheel) -> None:
    names = wheel.namelist()
    for kind in (".cu", ".cuh", ".json", ".sql", ".css", ".ico", ".js", ".md", ".svg"):
        assert any(name.endswith(kind) for name in names), f"the wheel holds no {kind} file"


def test_the_client_needs_numpy_and_httpx_alone(wheel) -> None:
    """And h11, which httpx brings."""
    required = [line for line in metadata(wheel).get_all("Requires-Dist") if "extra ==" not in line]
    assert {re.match(r"[\w.-]+", line)[0] for line in required} == {"numpy", "httpx", "h11"}


def test_the_extras(wheel) -> None:
    assert set(metadata(wheel).get_all("Provides-Extra")) >= {
        "server",
        "cli",
        "cuda12",
        "cuda13",
        "rocm",
        "demo",
        "dev",
    }


def test_the_licence_is_there_in_full(wheel) -> None:
    assert metadata(wheel)["License-Expression"] == "Apache-2.0 AND MIT"
    (name,) = [name for name in wheel.namelist() if name.endswith("licenses/LICENSE")]
    text = wheel.read(name).decode()
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text
    (name,) = [name for name in wheel.namelist() if name.endswith("LICENSE.uplot.txt") and "/licenses/" in name]
    assert "The MIT License" in wheel.read(name).decode()


def bill(wheel):
    """The bill of materials (PEP 770)."""
    (name,) = [name for name in wheel.namelist() if ".dist-info/sboms/" in name]
    assert name.endswith("/gemmserve.cdx.json")
    return json.loads(wheel.read(name))


def test_the_bill_of_materials_names_what_the_metadata_declare(wheel) -> None:
    found = bill(wheel)
    assert (found["bomFormat"], found["specVersion"]) == ("CycloneDX", "1.6")
    itself = found["metadata"]["component"]
    assert itself["purl"] == f"pkg:pypi/gemmserve@{metadata(wheel)['Version']}"
    assert itself["licenses"] == [{"expression": metadata(wheel)["License-Expression"]}]
    declared = {}
    for text in metadata(wheel).get_all("Requires-Dist"):
        requirement = Requirement(text)
        optional = "extra ==" in text
        name = canonicalize_name(requirement.name)
        declared[name] = declared.get(name, "optional") if optional else "required"
    declared.pop("gemmserve", None)
    assert {component["name"]: component["scope"] for component in found["components"]} == declared
    references = [component["bom-ref"] for component in found["components"]]
    assert found["dependencies"] == [{"ref": itself["bom-ref"], "dependsOn": references}]
    assert len(set(references)) == len(references)


def test_the_bill_of_materials_names_every_file_of_others(wheel) -> None:
    vendored = {name for name in wheel.namelist() if "/static/vendor/" in name and ".dist-info/" not in name}
    named = {}
    for component in bill(wheel)["metadata"]["component"]["components"]:
        assert component["licenses"][0]["license"]["id"] in metadata(wheel)["License-Expression"]
        assert any(
            "/licenses/" in name and name.endswith(f"LICENSE.{component['name'].lower()}.txt")
            for name in wheel.namelist()
        )
        for file in component["components"]:
            path = file["name"].split("/", 1)[1]  # without the folder client, kernels or service
            named[path] = file["hashes"]
            if path.endswith(".js"):
                assert component["version"].encode() in wheel.read(path)
    assert set(named) == vendored
    for path, hashes in named.items():
        assert hashes == [{"alg": "SHA-256", "content": hashlib.sha256(wheel.read(path)).hexdigest()}]


def test_a_bundled_component_is_listed_with_its_files(root) -> None:
    spec = importlib.util.spec_from_file_location("hatch_build", root / "hatch_build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    component = {"name": "uPlot", "version": "1.6", "license": "MIT", "purl": "pkg:npm/uplot@1.6", "files": ["LICENSE"]}
    found = module.bill_of_materials(root, ("gemmserve", "1", "Apache-2.0"), [component], {"": ["numpy[x]>=2,<3"]})
    (bundled,) = found["metadata"]["component"]["components"]
    assert bundled["licenses"] == [{"license": {"id": "MIT"}}]
    digest = hashlib.sha256((root / "LICENSE").read_bytes()).hexdigest()
    assert bundled["components"] == [
        {"type": "file", "name": "LICENSE", "hashes": [{"alg": "SHA-256", "content": digest}]}
    ]
    (numpy,) = found["components"]
    assert numpy["properties"] == [{"name": "gemmserve:requirement", "value": ">=2,<3"}]
    with pytest.raises(FileNotFoundError):
        module.bill_of_materials(root, ("gemmserve", "1", "MIT"), [component | {"files": ["nothing"]}], {})
    with pytest.raises(ValueError, match="not read"):
        module.bill_of_materials(root, ("gemmserve", "1", "MIT"), [], {"": ["?"]})


def test_entry_points(wheel) -> None:
    (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/entry_points.txt")]
    text = wheel.read(name).decode()
    assert "gemmserve = gemmserve.cli:main" in text
    assert "[gemmserve.commands]" in text
