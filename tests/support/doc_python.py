"""Python blocks of one page, in a process of their own: what they set and leave behind is nobody else's.

`PythonBlocks` is the tests' side; the module itself is run by the child, which reads a block a line, as JSON, runs it
in the names of those before, and answers what it printed and, if it failed, why.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import doctest
import inspect
import io
import json
import os
import select
import subprocess
import sys
import traceback
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

SECONDS = 120
"""What a block may take."""


class PythonBlocks:
    """The child, started by the first block."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._child: subprocess.Popen[bytes] | None = None

    def run(self, source: str, path: str, line: int, environment: Mapping[str, str]) -> tuple[str, str]:
        """Run a block that begins after `line` of the page; return what it printed and why it failed ("")."""
        if self._child is None:
            self._child = subprocess.Popen(
                [sys.executable, __file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                cwd=self._folder,
                env=environment,
            )
        block = {"source": source, "path": path, "line": line, "environment": dict(environment)}
        self._child.stdin.write(json.dumps(block).encode() + b"\n")
        self._child.stdin.flush()
        if not select.select([self._child.stdout], [], [], SECONDS)[0]:
            self._child.kill()
            return "", f"not done after {SECONDS} s"
        answer = self._child.stdout.readline()
        if not answer:
            return "", f"the process ended with status {self._child.wait()}"
        found = json.loads(answer)
        return found["printed"], found["failed"]

    def close(self) -> None:
        """End the child."""
        if self._child is not None:
            self._child.stdin.close()
            try:
                self._child.wait(SECONDS)
            except subprocess.TimeoutExpired:
                self._child.kill()
                raise
            finally:
                self._child.stdout.close()


def _statements(block: dict[str, Any], names: dict[str, Any]) -> str:
    """Run a block of statements and their output; return how the output differs."""
    test = doctest.DocTestParser().get_doctest(block["source"], names, "block", block["path"], block["line"])
    test.globs = names  # not the copy that it made
    said: list[str] = []
    doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=said.append, clear_globs=False)
    return "".join(said)


def _script(block: dict[str, Any], names: dict[str, Any], runner: asyncio.Runner) -> str:
    """Run a block; `await` works at its top. Lines in tracebacks are those of the page."""
    source = "\n" * block["line"] + block["source"]
    try:
        code = compile(source, block["path"], "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
        found = eval(code, names)
        if inspect.iscoroutine(found):
            runner.run(found)
    except Exception:
        return traceback.format_exc()
    return ""


def _main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what blocks' own children print is no answer
    names: dict[str, Any] = {"__name__": "__main__"}
    with asyncio.Runner() as runner:
        for line in sys.stdin:
            block = json.loads(line)
            os.environ.update(block["environment"])
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                if block["source"].lstrip().startswith(">>>"):
                    failed = _statements(block, names)
                else:
                    failed = _script(block, names, runner)
            print(json.dumps({"printed": printed.getvalue(), "failed": failed}), file=answers, flush=True)


if __name__ == "__main__":
    sys.modules["doc_python"] = sys.modules["__main__"]
    _main()
