"""What to install: a command that works where this installation came from."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from gemmserve import _install

IN_A_CLONE = "pip install '.[server]' (in a clone)"


def noted(monkeypatch, text):
    """Make pip's note of where the package came from `text`."""
    monkeypatch.setattr("importlib.metadata.distribution", lambda _: SimpleNamespace(read_text=lambda _: text))


@pytest.mark.parametrize(("editable", "flag"), [(True, "-e "), (False, "")])
def test_the_clone_that_it_was_installed_from(monkeypatch, tmp_path, editable, flag) -> None:
    clone = tmp_path / "my clone"
    clone.mkdir()
    noted(monkeypatch, json.dumps({"url": clone.as_uri(), "dir_info": {"editable": editable}}))
    assert _install.pip_install("server") == f"pip install {flag}'{clone}[server]'"


@pytest.mark.parametrize(
    "text",
    [None, "", "{", "[]", '{"url": "file:///no/such/folder", "dir_info": {}}', '{"url": "https://x.example/a.whl"}'],
)
def test_elsewhere_it_is_for_a_clone(monkeypatch, text) -> None:
    noted(monkeypatch, text)
    assert _install.pip_install("server") == IN_A_CLONE
