"""The house against its plan: rooms, their order, their size, no circles, nothing named as the standard library's."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from functools import cache
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "gemmserve": ROOT / "client" / "gemmserve",
    "gemmserve_kernels": ROOT / "kernels" / "gemmserve_kernels",
    "gemmserve_service": ROOT / "service" / "gemmserve_service",
}
FOLDERS = sorted(path.parent for root in PACKAGES.values() for path in root.rglob("__init__.py"))

MAX_MODULES = 12
MAX_CIRCLE = 3
MAX_FLOORS = {"gemmserve": 10, "gemmserve_kernels": 17, "gemmserve_service": 10}
HALL = {"products", "programs", "errors", "field_errors", "remedies", "schemas", "settings"}


def figure() -> dict[str, list[str]]:
    """The rooms of each package, from above, as docs/architecture.md draws them."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    block = re.search(r"```text\n(gemmserve_service\n.*?)```", text, re.DOTALL)
    assert block
    found: dict[str, list[str]] = {}
    package = ""
    for line in block[1].splitlines():
        if room := re.match(r"  (\w+) ", line):
            found[package].append(room[1])
        elif line.strip():
            package = line.strip()
            found[package] = []
    return found


def layers() -> dict[str, list[str]]:
    """The rooms of each package as import-linter orders them."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contracts = settings["tool"]["importlinter"]["contracts"]
    return {each["containers"][0]: each["layers"] for each in contracts if each["type"] == "layers"}


@pytest.mark.parametrize("package", ["gemmserve_service", "gemmserve_kernels"])
def test_the_figure_has_the_rooms_that_there_are(package) -> None:
    folders = {path.name for path in PACKAGES[package].iterdir() if (path / "__init__.py").exists()}
    assert set(figure()[package]) - HALL == folders


@pytest.mark.parametrize("package", ["gemmserve_service", "gemmserve_kernels"])
def test_the_figure_has_the_order_of_imports(package) -> None:
    drawn = [room for room in figure()[package] if room not in HALL]
    assert drawn == [room for room in layers()[package] if room in drawn]


def test_no_import_against_the_order_is_let_pass() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contracts = settings["tool"]["importlinter"]["contracts"]
    assert not [each["name"] for each in contracts if each.get("ignore_imports")]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_folder_is_small_and_says_what_it_is(folder) -> None:
    modules = [path.name for path in folder.glob("*.py") if path.name not in {"__init__.py", "__main__.py"}]
    assert len(modules) <= MAX_MODULES
    assert ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))


def test_no_module_is_named_as_one_of_the_standard_library() -> None:
    modules = [
        path for root in PACKAGES.values() for path in root.rglob("*.py") if path.stem not in {"__init__", "__main__"}
    ]
    assert not [str(path.relative_to(ROOT)) for path in modules if path.stem in sys.stdlib_module_names]


def imports(package: str, *, typing: bool) -> dict[str, set[str]]:
    """Modules of a package and what each imports of the others, in functions too; `typing`: for type checkers too."""
    graph = grimp.build_graph(package, exclude_type_checking_imports=not typing, cache_dir=None)
    return {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Strongly connected components, those that are imported first (R. Tarjan, 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(module: str) -> None:
        index[module] = low[module] = len(index)
        stack.append(module)
        for other in sorted(graph[module]):
            if other not in index:
                visit(other)
                low[module] = min(low[module], low[other])
            elif other in stack:
                low[module] = min(low[module], index[other])
        if low[module] == index[module]:
            at = stack.index(module)
            found.append(stack[at:])
            del stack[at:]

    for module in sorted(graph):
        if module not in index:
            visit(module)
    return found


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_no_circle_of_imports_is_long(package) -> None:
    assert [circle for circle in circles(imports(package, typing=True)) if len(circle) > MAX_CIRCLE] == []


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_the_tower_is_low(package) -> None:
    graph = imports(package, typing=False)
    part = {module: number for number, circle in enumerate(circles(graph)) for module in circle}

    @cache
    def below(number: int) -> tuple[str, ...]:
        members = [module for module, mine in part.items() if mine == number]
        others = {part[other] for module in members for other in graph[module]} - {number}
        return (*max((below(other) for other in others), key=len, default=()), members[0])

    tower = max((below(number) for number in set(part.values())), key=len)
    assert len(tower) <= MAX_FLOORS[package], " < ".join(tower)


PREFIXES = {"K": "kernels/gemmserve_kernels", "S": "service/gemmserve_service", "C": "client/gemmserve"}


def test_what_is_to_be_touched_exists() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    named = re.findall(r"`([KSC])/([^`]+)`", text)
    assert len(named) > 30
    assert not [f"{room}/{path}" for room, path in named if not (ROOT / PREFIXES[room] / path).exists()]


def test_the_ways_name_what_there_is() -> None:
    """A path in docs/architecture.md is a module or a folder of one of the packages."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    named = {path for path in re.findall(r"`([a-z_]+(?:/[a-z_]+)+)`", text) if not path.startswith("gemmserve_kernels")}
    roots = [*PACKAGES.values(), ROOT]
    missing = [
        path for path in named if not any((root / path).exists() or (root / f"{path}.py").exists() for root in roots)
    ]
    assert len(named) > 15
    assert not missing


def test_docstrings_begin_with_their_noun_or_verb() -> None:
    found = []
    for root in PACKAGES.values():
        for path in root.rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if (
                    isinstance(node, ast.Expr)
                    and isinstance(node.value, ast.Constant)
                    and isinstance(node.value.value, str)
                ):
                    first = node.value.value.split(maxsplit=1)[:1]
                    if first and first[0] in {"Of", "Nobody", "What", "Who", "Whose", "Everybody"}:
                        found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not found
