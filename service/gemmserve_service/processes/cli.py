"""The server's commands, which the client's command line finds by entry point: `serve`, `worker`, `doctor`, `probe`."""

from __future__ import annotations

import json
import os
import re
import socket
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, get_args

from pydantic import ValidationError

from gemmserve_service.settings import Settings, parse_size

if TYPE_CHECKING:
    import argparse

    from pydantic.fields import FieldInfo

    from gemmserve_service.tenancy.cli import Console, Context


_USAGE: Final = 2


class Serve:
    """`gemmserve serve`: the supervisor, in the foreground. Every setting is a flag and a GEMMSERVE_ variable."""

    name = "serve"
    help = "run the server in the foreground until SIGTERM"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        for name, field in Settings.model_fields.items():
            flag = "--" + name.replace("_", "-")
            description = (field.description or "").replace("%", "%%")
            if field.annotation is bool:
                parser.add_argument(flag, action="store_true", default=None, help=description)
            else:
                text = f"{description} (default {_default(field)})" if not field.is_required() else description
                metavar = "SIZE" if name.endswith("_bytes") else _metavar(field)
                parser.add_argument(flag, metavar=metavar, help=text)

    def run(self, args: argparse.Namespace, context: Context) -> int:
        given = {name: getattr(args, name) for name in Settings.model_fields}
        given = {name: _none(value) for name, value in given.items() if value is not None}
        settings = _settings(given, context.console)
        if settings is None:
            return _USAGE
        from gemmserve_service.processes.supervisor import run
        from gemmserve_service.runtime.start_error import StartError, UsageError

        try:
            return run(settings)
        except StartError as error:
            context.console.error(str(error))
            return _USAGE if isinstance(error, UsageError) else 1


class Doctor:
    """`gemmserve doctor`: what is here, and what to do about what is not."""

    name = "doctor"
    help = "show devices, drivers, compilers and versions, and verify a product on each device"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--json", action="store_true", help="print the findings as JSON")
        parser.add_argument("--data-dir", metavar="DIR", help="the data directory to look at (default: the server's)")

    def run(self, args: argparse.Namespace, context: Context) -> int:
        from gemmserve_service.processes.doctor.doctor import examine

        settings = _settings({"data_dir": args.data_dir} if args.data_dir else {}, context.console)
        if settings is None:
            return _USAGE
        findings = examine(settings)
        if args.json:
            context.console.json([finding.as_dict() for finding in findings])
        else:
            for finding in findings:
                context.console.print(str(finding))
        return 1 if any(finding.level == "error" for finding in findings) else 0


class Probe:
    """`gemmserve probe`: what this host can do, measured, for `gemmserve plan`."""

    name = "probe"
    help = "measure this host's devices, links, memory and disk for `gemmserve plan`; half a minute"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--output", type=Path, metavar="FILE", help="write the JSON there, and print what is in it")
        parser.add_argument("--quick", action="store_true", help="fewer and smaller measurements, in seconds")
        parser.add_argument("--device", metavar="TEXT", help="auto, cpu, cuda:0, cuda:0,cuda:1, rocm:0 (default auto)")
        parser.add_argument("--data-dir", metavar="DIR", help="whose disk is measured (default: the server's)")

    def run(self, args: argparse.Namespace, context: Context) -> int:
        from gemmserve_kernels import DeviceError
        from gemmserve_service.processes.probe.amounts import FULL, QUICK
        from gemmserve_service.processes.probe.probe import probe, summary

        given = {"data_dir": args.data_dir, "device": args.device}
        settings = _settings({name: value for name, value in given.items() if value}, context.console)
        if settings is None:
            return _USAGE
        try:
            found = probe(settings.device, settings.data_dir, QUICK if args.quick else FULL)
        except DeviceError as error:
            context.console.error(str(error))
            return 1
        if args.output is None:
            context.console.json(found)
            return 0
        args.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        for line in summary(found):
            context.console.print(line)
        return 0


class Worker:
    """`gemmserve worker`: a worker on this node for a front elsewhere."""

    name = "worker"
    help = "join a server elsewhere with this node's devices, until SIGTERM"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--join", metavar="URL", required=True, help="the server's port for workers: https://host:port, or http://"
        )
        parser.add_argument(
            "--token-file",
            dest="join_token_file",
            type=Path,
            metavar="FILE",
            help="file with a key of the scope worker; GEMMSERVE_JOIN_TOKEN holds the key itself",
        )
        parser.add_argument(
            "--device", default="auto", metavar="TEXT", help="as of `serve`; auto: every accelerator, else the CPU"
        )
        parser.add_argument(
            "--name", dest="worker_name", metavar="NAME", help="name of this node (default: its host name)"
        )
        parser.add_argument(
            "--memory",
            dest="worker_memory",
            metavar="SIZE",
            help="host memory of each device for results and operands, which are kept; default: a quarter of the "
            "machine's for all",
        )
        parser.add_argument(
            "--ca-file", type=Path, metavar="FILE", help="PEM file of certificates to verify the server's by"
        )
        parser.add_argument(
            "--join-insecure",
            action="store_true",
            default=False,
            help="join http:// beyond loopback: whoever is on the way reads the token and arrays",
        )
        parser.add_argument(
            "--result-inline",
            default="1M",
            metavar="SIZE",
            help="bytes of a task's results up to which they go with the answer, 1M at most (default 1M)",
        )
        for name in ("drain_s", "log_level"):
            field = Settings.model_fields[name]
            parser.add_argument(
                "--" + name.replace("_", "-"),
                metavar=_metavar(field),
                help=f"{field.description} (default {_default(field)})",
            )
        parser.add_argument("--log-json", action="store_true", default=None, help="log JSON lines instead of text")

    def run(self, args: argparse.Namespace, context: Context) -> int:
        given = {name: getattr(args, name) for name in ("device", "drain_s", "log_level", "log_json")}
        settings = _settings({name: value for name, value in given.items() if value is not None}, context.console)
        if settings is None:
            return _USAGE
        from gemmserve_service.processes.node import devices_of, run_node
        from gemmserve_service.runtime.handoff import AgentHandoff
        from gemmserve_service.runtime.start_error import StartError
        from gemmserve_service.runtime.tuning import host_memory

        try:
            devices = devices_of(settings.device)
            given_bytes = args.worker_memory
            memory = host_memory() // 4 // len(devices) if given_bytes is None else parse_size(given_bytes)
            handoff = AgentHandoff(
                settings=settings,
                pipe_fd=-1,
                join=args.join,
                token=_token(args.join_token_file),
                name=args.worker_name or _node_name(),
                device=devices[0],
                memory_bytes=memory,
                inline_bytes=parse_size(args.result_inline),
                insecure=args.join_insecure,
                ca_file=args.ca_file,
            )
            return run_node(handoff, devices)
        except (StartError, ValueError) as error:
            context.console.error(str(error))
            return _USAGE


def _token(file: Path | None) -> str | None:
    """Return the token of a file, or of the environment. Raises UsageError for a file that cannot be read."""
    from gemmserve_service.runtime.start_error import UsageError

    if file is None:
        return os.environ.get("GEMMSERVE_JOIN_TOKEN") or None
    try:
        return file.expanduser().read_text("utf-8").strip()
    except OSError as error:
        raise UsageError(f"the token in {file} cannot be read: {error.strerror}") from error


def _node_name() -> str:
    """Return the host's name, as far as it can be a node's."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:63].lstrip("._-") or "node"


def _settings(given: dict[str, Any], console: Console) -> Settings | None:
    """The settings; None when they make no sense, which the console then has been told, one line for each reason."""
    try:
        return Settings(**given)
    except ValidationError as error:
        from gemmserve_service.field_errors import message_of

        for problem in error.errors():
            where = "--" + str(problem["loc"][0]).replace("_", "-") + ": " if problem["loc"] else ""
            console.error(where + message_of(problem))
    return None


def _none(value: object) -> object:
    return None if isinstance(value, str) and value.lower() == "none" else value


def _default(field: FieldInfo) -> object:
    value = field.get_default(call_default_factory=True, validated_data={})
    return "none" if value is None or value == [] else value


def _metavar(field: FieldInfo) -> str:
    kinds = get_args(field.annotation) if isinstance(field.annotation, types.UnionType) else (field.annotation,)
    return next((name for kind, name in ((int, "N"), (float, "X"), (str, "TEXT")) if kind in kinds), "VALUE")


SERVE: Final = Serve()
DOCTOR: Final = Doctor()
PROBE: Final = Probe()
WORKER: Final = Worker()
