"""The frame: help, version, statuses, plugins, and one line for an error."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import EntryPoint
from types import SimpleNamespace

import pytest
from fake_service import nobody_s_address

import gemmserve
from gemmserve._install import pip_install
from gemmserve.cli import _OWN, _plugins, main

OWN = {"gemm", "reduce", "put", "get", "ls", "rm", "jobs", "status", "top", "completion"}
SERVER = {"serve", "doctor", "bench"}


class Plugin:
    """A command as the server's package would have it."""

    name = "greet"
    help = "says hello"

    def configure(self, parser) -> None:
        parser.add_argument("--whom", default="world")

    def run(self, args, context) -> int:
        context.console.print(f"hello {args.whom}")
        context.console.print(context.connect().url)
        return 7


class Late(Plugin):
    def run(self, args, context) -> int:
        import no_such_module_at_all  # noqa: F401

        return 0


PLUGIN, LATE = Plugin(), Late()


@pytest.fixture
def plugins(monkeypatch):
    def use(**targets: str) -> None:
        points = {name: EntryPoint(name, value, _plugins.GROUP) for name, value in targets.items()}
        monkeypatch.setattr(_plugins, "_plugins", lambda: points)

    module = SimpleNamespace(PLUGIN=PLUGIN, LATE=LATE)
    monkeypatch.setitem(sys.modules, "a_plugin_for_tests", module)
    return use


def test_the_commands_there_are() -> None:
    assert set(_OWN) == OWN
    assert set(_plugins.plugin_names()) >= SERVER


def test_version(capsys) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"gemmserve {gemmserve.__version__}\n"


def test_help(plugins, capsys) -> None:
    plugins(greet="a_plugin_for_tests:PLUGIN", serve="no_such_module_at_all:SERVE")
    for arguments in ([], ["--help"], ["-h"]):
        assert main(arguments) == 0
        out = capsys.readouterr().out
        assert all(name in out for name in OWN)
        assert "says hello" in out
        assert pip_install("server") in " ".join(out.split())


@pytest.mark.parametrize("name", sorted(OWN - {"completion"}))
def test_help_of_a_command_names_its_variables(name, capsys) -> None:
    assert main([name, "--help"]) == 0
    out = capsys.readouterr().out
    assert "[GEMMSERVE_SERVER]" in out
    assert "[GEMMSERVE_API_KEY]" in out


@pytest.mark.parametrize(
    "arguments", [["nonsense"], ["put"], ["gemm", "a"], ["get", "x"], ["--nonsense"], ["ls", "--lim", "3"]]
)
def test_wrong_usage_is_2(arguments, capsys) -> None:
    assert main(arguments) == 2
    assert "usage:" in capsys.readouterr().err


def test_a_plugin_gets_a_context_and_environment_flags(plugins, cli) -> None:
    plugins(greet="a_plugin_for_tests:PLUGIN")
    done = cli("greet")
    assert done.status == 7
    assert done.out.startswith("hello world\nhttp://127.0.0.1:")
    assert cli("greet", WHOM="you").out.startswith("hello you")
    assert cli("greet", "--whom", "me", WHOM="you").out.startswith("hello me")


@pytest.mark.parametrize("target", ["no_such_module_at_all:SERVE", "a_plugin_for_tests:LATE"])
def test_a_missing_extra_names_what_to_install(plugins, cli, target) -> None:
    plugins(serve=target)
    done = cli("serve")
    assert done.status == 2
    assert "serve needs no_such_module_at_all" in done.err
    assert pip_install("server") in done.err


def test_a_broken_installation_is_no_missing_extra(plugins) -> None:
    plugins(serve="gemmserve.no_such_module:SERVE")
    with pytest.raises(ModuleNotFoundError):
        main(["serve"])


def test_an_error_is_one_line(cli, service, files) -> None:
    done = cli("gemm", "a.npy", "a.npy", "-o", "d.npy")
    assert done.status == 1
    assert done.err == "gemmserve: ShapeMismatch: op(a) is 3 x 4 and op(b) is 3 x 4: 4 is not 3\n"
    done = cli("get", "arr_none", "-o", "d.npy")
    assert (done.status, done.err.count("\n")) == (1, 1)
    assert done.err.startswith("gemmserve: NotFound: ")
    done = cli("put", "missing.npy")
    assert (done.status, done.err.count("\n")) == (1, 1)
    assert "missing.npy" in done.err


def test_nobody_there(cli, files) -> None:
    with nobody_s_address() as url:
        done = cli("ls", "--server", url)
    assert done.status == 1
    assert done.err.startswith(f"gemmserve: TransportError: cannot reach {url}")


def test_ctrl_c_is_130(cli, monkeypatch) -> None:
    def interrupted(*_args, **_kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("gemmserve.Client.arrays", interrupted, raising=False)
    assert cli("ls").status == 130


def test_a_reader_that_leaves_is_no_traceback(url, service) -> None:
    import numpy as np

    service.arrays |= {f"arr_{n:026d}": np.eye(2) for n in range(3000)}
    command = f"{sys.executable} -m gemmserve.cli ls --server {url} | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("ID")
    assert done.stderr == ""


def test_the_module_runs() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gemmserve.cli", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("gemmserve ")


def test_python_m_gemmserve(tmp_path) -> None:
    done = subprocess.run([sys.executable, "-m", "gemmserve", "--version"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"gemmserve {gemmserve.__version__}\n")


def test_a_misspelt_variable_is_told_of_with_the_nearest(cli, monkeypatch) -> None:
    monkeypatch.setenv("GEMMSERVE_OTHERS_MARK", "1")
    done = cli("ls", LIMTI="3")
    assert done.status == 0
    assert done.err == "gemmserve: GEMMSERVE_LIMTI is no variable that ls reads; is GEMMSERVE_LIMIT meant?\n"
    assert cli("ls", LIMIT="3", API_KEY="gs_x").err == ""
