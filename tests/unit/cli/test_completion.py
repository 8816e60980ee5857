"""Completion scripts: whole, and what a shell makes of them."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from gemmserve.cli import main

pytest.importorskip("shtab", reason="shtab is part of the cli extra")


def completed(script: str, *words: str) -> set[str]:
    """Words that bash offers for the last of `words`."""
    line = " ".join(f"'{word}'" for word in words)
    previous = words[-2]
    asked = f"""
source /dev/stdin <<'SCRIPT'
{script}
SCRIPT
COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}
_shtab_gemmserve gemmserve '{words[-1]}' '{previous}'
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    done = subprocess.run(["bash", "-c", asked], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_every_command_is_in_the_script(shell, capsys) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(word in script for word in ("gemm", "put", "serve", "keys", "bench", "completion"))


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_bash(capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "samples.npy").touch()
    main(["completion", "bash"])
    script = capsys.readouterr().out
    assert completed(script, "gemmserve", "ge") == {"gemm", "get"}
    assert completed(script, "gemmserve", "serve", "--tls") == {"--tls-certificate", "--tls-key"}
    assert completed(script, "gemmserve", "keys", "") == {"create", "list", "revoke", "set"}
    assert "samples.npy" in completed(script, "gemmserve", "put", "sam")


def test_a_shell_that_nobody_knows(capsys) -> None:
    assert main(["completion", "cmd"]) == 2
    assert "choose from" in capsys.readouterr().err
