"""Samples of every operation, in Python, curl and the command line: `x-codeSamples` of the OpenAPI document.

They lie in `operations/*.md`, an operation a heading; tests run every one of them against a real server.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Sample = dict[str, str]
"""An element of x-codeSamples: `lang` (of a highlighter), `label` (of a tab) and `source`."""

PYTHON: Final = "Python"
CURL: Final = "curl"
COMMAND_LINE: Final = "Command line"

_HEADING: Final = re.compile(r"^## ([A-Z]+) (\S+)$", re.MULTILINE)
_FENCE: Final = re.compile(r"^```(python|sh)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@cache
def code_samples() -> Mapping[tuple[str, str], Sequence[Sample]]:
    """Return the samples by method, in upper case, and path of the operation. Raises ValueError for a second set."""
    found: dict[tuple[str, str], Sequence[Sample]] = {}
    for file in (files(__package__) / "operations").iterdir():
        _, *parts = _HEADING.split(file.read_text("utf-8"))
        for method, path, text in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
            if (method, path) in found:
                raise ValueError(f"{file.name}: {method} {path} has samples already")
            found[method, path] = [_sample(*fence) for fence in _FENCE.findall(text)]
    return found


def _sample(language: str, source: str) -> Sample:
    if language == "python":
        return {"lang": "Python", "label": PYTHON, "source": source}
    label = CURL if re.search(r"^curl ", source, re.MULTILINE) else COMMAND_LINE
    return {"lang": "Shell", "label": label, "source": source}
