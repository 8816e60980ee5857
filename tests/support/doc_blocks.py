"""Fenced blocks of the documentation: found by sybil, run from top to bottom of a page.

Languages and markers are described in CONTRIBUTING.md ("Documentation"). The blocks that are not run are listed, with
their reasons, in tests/docs/not_run.txt; `python tests/support/doc_blocks.py --write` writes that list anew.
"""

from __future__ import annotations

import ast
import contextlib
import doctest
import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import sybil
import yaml
from doc_python import SECONDS, PythonBlocks
from sybil import Document, Region
from sybil.evaluators.doctest import OutputChecker
from sybil.example import SybilFailure
from sybil.parsers.abstract.lexers import BlockLexer
from sybil.parsers.markdown.lexers import RawFencedCodeBlockLexer

sys.path.append(str(Path(__file__).parents[2] / "examples"))
from local_server import READY

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

ROOT = Path(__file__).parents[2]
NOT_RUN = ROOT / "tests" / "docs" / "not_run.txt"

ADDRESS = re.compile(r"\b(?:127\.0\.0\.1|localhost|[\w.-]+\.example):8000\b")
"""The server's address as pages write it: this machine's, or that of a name that nobody has (RFC 2606)."""

PARSED = {"json": json.loads, "yaml": lambda text: list(yaml.safe_load_all(text)), "toml": tomllib.loads}
SCRIPTS = {
    "javascript": ("node", "--input-type=module", "-"),
    "octave": ("octave-cli", "--quiet"),
    "matlab": ("octave-cli", "--quiet"),
    "r": ("Rscript", "-"),
}
"""Languages whose blocks are scripts on the standard input of an interpreter."""

_MARK = re.compile(r"<!--\s*(not run|needs|serves|output)(?::\s*([^>]*?))?\s*-->\s*\Z")

_KEEP_VARIABLES = """
__before=" $(compgen -v | tr '\\n' ' ') __before __name PIPESTATUS FUNCNAME _ "
[ ! -e "$__state" ] || . "$__state"
trap 'for __name in $(compgen -v); do
  [[ "$__before" == *" $__name "* || $__name == BASH* ]] || declare -p "$__name"; done > "$__state"' EXIT
"""
"""Variables of a page's shell blocks, from one to the next. Those that the environment had are as they were."""


COMMANDS = ("curl", "jq", "openssl", "zstd")
"""Commands of the system's that blocks call."""


class BlockSkipped(Exception):  # noqa: N818 (no error)
    """Nothing of this block is run here; the text says why."""


def pages() -> list[Path]:
    """Every page that has blocks: the documentation, but for reports that scripts write, and what leads to it."""
    found = [path for path in (ROOT / "docs").rglob("*.md") if "benchmarks" not in path.parts]
    return sorted([*found, ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "benchmarks" / "README.md"])


def parse(path: Path, evaluator: Any = None) -> Document:
    """The page with a region for every fence, and every hidden `setup` comment."""
    return Document.parse(str(path), lambda document: _regions(document, evaluator))


def not_run(document: Document) -> Iterator[tuple[str, str]]:
    """(Reason, first line) of each block that is marked as not run."""
    for example in document:
        if "not run" in example.parsed["marks"]:
            yield example.parsed["marks"]["not run"], example.parsed["source"].strip().partition("\n")[0]


def listing() -> str:
    """The text of tests/docs/not_run.txt."""
    lines = [
        f"{path.relative_to(ROOT)}: {reason}: {first}\n" for path in pages() for reason, first in not_run(parse(path))
    ]
    return "".join(lines)


def _regions(document: Document, evaluator: Any) -> Iterable[Region]:
    hidden = BlockLexer(re.compile(r"^<!-- setup: (?P<language>\w+)\n", re.MULTILINE), r"\n-->")
    for region in hidden(document):
        region.parsed = {**region.lexemes, "marks": _marks(document.text[: region.start])}
        region.evaluator = evaluator
        yield region
    fences = RawFencedCodeBlockLexer(re.compile(r"(?P<language>[^\n]*)$\n", re.MULTILINE))
    for region in fences(document):
        if any(other.start <= region.start < other.end for other in hidden(document)):
            continue
        language = region.lexemes["language"].strip()
        if language.startswith("{"):  # a directive of MyST's, for the build of the site
            continue
        marks = _marks(document.text[: region.start])
        region.parsed = {"language": language, "source": region.lexemes["source"], "marks": marks}
        region.evaluator = evaluator
        yield region


def _marks(above: str) -> dict[str, str]:
    """The comments directly above a block."""
    marks: dict[str, str] = {}
    while found := _MARK.search(above := above.rstrip()):
        marks[found[1]] = " ".join((found[2] or "").split())
        above = above[: found.start()]
    return marks


def _there(name: str) -> bool:
    """Whether there is such a command or module."""
    with contextlib.suppress(ModuleNotFoundError):  # of the package that a module would be in
        return shutil.which(name) is not None or importlib.util.find_spec(name) is not None
    return False


def same(want: str, got: str) -> bool:
    """Whether a block's output is what the page shows; `...` stands for anything, ends of lines' spaces for nothing."""
    return OutputChecker().check_output(_ended(want), _ended(got), doctest.ELLIPSIS)


def difference(want: str, got: str) -> str:
    """The page's text and the output, for people."""
    return f"shown:\n{textwrap.indent(want, '    ')}\nprinted:\n{textwrap.indent(got, '    ')}"


def _ended(text: str) -> str:
    return text.rstrip() + "\n" if text.strip() else ""


def commands(session: str) -> list[tuple[str, str]]:
    """(Command, output) of each command of a console block: lines after `$ `, continued by a backslash or by `> `."""
    found: list[tuple[list[str], list[str]]] = []
    for line in session.splitlines():
        if line.startswith("$ "):
            found.append(([line[2:]], []))
        elif not found:
            raise ValueError(f"output before the first command: {line}")
        elif not found[-1][1] and (found[-1][0][-1].endswith("\\") or line.startswith("> ")):
            found[-1][0].append(line.removeprefix("> "))
        else:
            found[-1][1].append(line)
    return [("\n".join(command), "\n".join(output)) for command, output in found]


class Page:
    """A page's folder, its names and variables, its servers. A context manager, since servers end with it.

    `server` is the URL of a server that is up. `folder` is empty; the repository's examples are linked into it.
    """

    def __init__(self, path: Path, server: str, folder: Path) -> None:
        self.document = parse(path, self._evaluate)
        self.folder = folder
        self.skipped: list[str] = []
        self._output = ""
        self._own: subprocess.Popen[bytes] | None = None
        self._blocks = PythonBlocks(folder)
        self.environment = {
            **os.environ,
            "GEMMSERVE_SERVER": server,
            "GEMMSERVE_DATA_DIR": str(folder.parent / f"{folder.name}.data"),
            "GEMMSERVE_DEVICE": "cpu",
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "MPLBACKEND": "Agg",
            "NO_COLOR": "1",
            "COLUMNS": "120",
            "__state": str(folder.parent / f"{folder.name}.variables"),
        }
        (folder / "examples").symlink_to(ROOT / "examples")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()
        self._blocks.close()

    def missing(self) -> list[str]:
        """Commands that blocks call and this machine lacks."""
        shell = "\n".join(
            each.parsed["source"] for each in self.document if each.parsed["language"] in {"sh", "console"}
        )
        return [name for name in COMMANDS if re.search(rf"\b{name} -", shell) and shutil.which(name) is None]

    def run(self) -> None:
        """Run every block, in children. Raises SybilFailure for one that fails."""
        for example in self.document:
            try:
                example.evaluate()
            except BlockSkipped as skipped:
                self.skipped.append(f"line {example.line}: {skipped}")

    def _evaluate(self, example: sybil.Example) -> str | None:
        parsed = example.parsed
        language, marks, source = parsed["language"], parsed["marks"], parsed["source"]
        if "not run" in marks:
            return self._check(example)
        for name in marks.get("needs", "").split():
            if not _there(name):
                raise BlockSkipped(f"needs {name}")
        if language in PARSED:
            PARSED[language](source)
            return None
        if language in SCRIPTS:
            return self._script(SCRIPTS[language], source)
        match language:
            case "python":
                return self._python(example)
            case "sh" if "serves" in marks:
                return self._serve(source)
            case "sh":
                return self._script(("bash", "-euo", "pipefail", "-s"), _KEEP_VARIABLES + source)
            case "console":
                return self._console(source)
            case "text":
                return self._text(source, compare="output" in marks)
        return f"blocks in {language or 'no language'} are run by nobody: mark it, with the reason"

    def _check(self, example: sybil.Example) -> str | None:
        """What can be known of a block that is not run: its syntax."""
        parsed = example.parsed
        if not parsed["marks"]["not run"]:
            return "the marker has no reason"
        if parsed["language"] == "python":
            compile(parsed["source"], example.path, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        elif parsed["language"] == "sh":
            return self._script(("bash", "-n"), parsed["source"])
        return None

    def _here(self, text: str) -> str:
        """The page's text with the server's address in the place of the one that pages write."""
        return ADDRESS.sub(self.environment["GEMMSERVE_SERVER"].rpartition("/")[2], text)

    def _as_written(self, text: str) -> str:
        return text.replace(self.environment["GEMMSERVE_SERVER"].rpartition("/")[2], "127.0.0.1:8000")

    def _python(self, example: sybil.Example) -> str | None:
        source = example.parsed["source"]
        line = example.line + source.line_offset
        printed, failed = self._blocks.run(self._here(source), example.path, line, self.environment)
        self._output = self._as_written(printed)
        return failed or None

    def _script(self, interpreter: tuple[str, ...], source: str) -> str | None:
        if shutil.which(interpreter[0]) is None:
            raise BlockSkipped(f"needs {interpreter[0]}")
        done = self._run(interpreter, self._here(source), stderr=subprocess.PIPE)
        self._output = self._as_written(done.stdout)
        return f"status {done.returncode}\n{done.stdout}{done.stderr}" if done.returncode else None

    def _console(self, session: str) -> str | None:
        for command, want in commands(session):
            done = self._run(("bash", "-s"), self._here(_KEEP_VARIABLES + command), stderr=subprocess.STDOUT)
            got = self._as_written(done.stdout)
            if not same(want, got) or (done.returncode and not want):
                return f"$ {command}\n{difference(want, got)}\nstatus {done.returncode}"
        return None

    def _run(self, command: tuple[str, ...], source: str, *, stderr: int) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            input=source,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            check=False,
            cwd=self.folder,
            env=self.environment,
            timeout=SECONDS,
        )

    def _text(self, source: str, *, compare: bool) -> str | None:
        if compare:
            return None if same(source, self._output) else difference(source, self._output)
        ran = re.search(r"^(\$ |>>> |curl |gemmserve \w+\b(?!  )|docker |pip |import )", source, re.MULTILINE)
        return f"a drawing that looks like something to run: {ran[1]}" if ran else None

    def _stop(self) -> None:
        """End the page's own server."""
        process, self._own = self._own, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise

    def _serve(self, source: str) -> str | None:
        """Start the server that a block ends with; it is the page's server from then on."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._stop()
        log = self.folder.parent / f"{self.folder.name}.log"
        source = re.sub(r"(--port[ =])8000\b", rf"\g<1>{port}", self._here(source))
        with log.open("wb") as output:
            process = subprocess.Popen(
                ["bash", "-euo", "pipefail", "-c", source],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
                env=self.environment | {"GEMMSERVE_PORT": str(port)},
                start_new_session=True,
            )
        self._own = process
        deadline = time.monotonic() + SECONDS
        while not (ready := READY.search(log.read_text(errors="replace"))):
            if process.poll() is not None or time.monotonic() > deadline:
                return f"the server was not ready\n{log.read_text(errors='replace')}"
            time.sleep(0.02)
        scheme = ready[1].partition(":")[0]
        self.environment["GEMMSERVE_SERVER"] = f"{scheme}://127.0.0.1:{port}"
        return None


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        NOT_RUN.write_text(listing())
    print(listing(), end="")

__all__ = ["NOT_RUN", "ROOT", "Page", "SybilFailure", "commands", "listing", "pages", "parse", "same"]
