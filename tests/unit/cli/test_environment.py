"""Every flag has a variable: its type, its choices, its place between the command line and the default."""

from __future__ import annotations

import argparse

import pytest

from gemmserve.cli import _environment, parser_for


@pytest.fixture
def parser() -> _environment.EnvironmentParser:
    parser = _environment.EnvironmentParser(prog="x")
    parser.add_argument("--port", type=int, default=8000, help="where")
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--order", choices=("C", "F"), default="C")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--no-color", dest="color", action="store_false")
    parser.add_argument("--wait", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--sizes", type=int, nargs="+")
    parser.add_argument("--tag", action="append")
    nested = parser.add_subparsers(dest="command").add_parser("run")
    nested.add_argument("--depth", type=int, default=1)
    return parser


def test_variables_are_defaults(parser, monkeypatch) -> None:
    for name, value in {
        "PORT": "9", "DATA_DIR": "/d", "ORDER": "F", "JSON": "1", "COLOR": "yes", "WAIT": "0", "SIZES": "1, 2,3",
        "TAG": "x,y", "DEPTH": "4",
    }.items():  # fmt: skip
        monkeypatch.setenv(f"GEMMSERVE_{name}", value)
    args = parser.parse_args(["run"])
    assert (args.port, args.data_dir, args.order, args.json, args.color, args.wait) == (
        9,
        "/d",
        "F",
        True,
        False,
        False,
    )
    assert (args.sizes, args.tag, args.depth) == ([1, 2, 3], ["x", "y"], 4)


def test_the_command_line_wins(parser, monkeypatch) -> None:
    monkeypatch.setenv("GEMMSERVE_PORT", "9")
    monkeypatch.setenv("GEMMSERVE_DEPTH", "9")
    args = parser.parse_args(["--port", "7", "--data-dir", "d", "run", "--depth", "7"])
    assert (args.port, args.depth) == (7, 7)


def test_without_variables_the_defaults_stand(parser) -> None:
    args = parser.parse_args(["--data-dir", "d"])
    assert (args.port, args.json, args.color, args.wait, args.sizes, args.tag) == (8000, False, True, True, None, None)


@pytest.mark.parametrize(("name", "value"), [("PORT", "x"), ("ORDER", "Z"), ("JSON", "perhaps"), ("SIZES", "1,x")])
def test_an_ill_formed_variable_is_named(parser, monkeypatch, capsys, name, value) -> None:
    monkeypatch.setenv(f"GEMMSERVE_{name}", value)
    with pytest.raises(SystemExit) as stop:
        parser.parse_args(["--data-dir", "d"])
    assert stop.value.code == 2
    assert f"GEMMSERVE_{name}={value!r}" in capsys.readouterr().err


def test_the_help_names_each_once(parser) -> None:
    for _ in range(2):
        text = parser.format_help()
        assert text.count("[GEMMSERVE_PORT]") == 1
        assert "GEMMSERVE_HELP" not in text


def test_every_flag_of_every_command_has_one() -> None:
    parser, _ = parser_for(None, with_plugins=False)
    (choices,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    for name, command in choices.choices.items():
        flags = [action for action in command._actions if action.option_strings and action.dest != "help"]
        assert flags or name == "completion", name
        assert all(_environment.variable_of(flag) for flag in flags)
