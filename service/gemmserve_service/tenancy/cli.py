"""`gemmserve keys`: makes, lists and revokes the API keys of a data directory, beside its server or without one."""

from __future__ import annotations

import re
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pydantic import ValidationError

from gemmserve_service.settings import default_data_dir, parse_size
from gemmserve_service.tenancy.api_keys import Quota, Scope
from gemmserve_service.tenancy.keyring import KeyringError, change_owner, create_key, read_keyring, revoke_key

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence
    from typing import Protocol

    class Console(Protocol):
        """Output of the command line."""

        def print(self, text: str) -> None: ...
        def note(self, text: str) -> None: ...
        def error(self, text: str) -> None: ...
        def json(self, value: Any) -> None: ...
        def table(self, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None: ...

    class Context(Protocol):
        """Context that the command line gives to every command."""

        @property
        def console(self) -> Console: ...


_USAGE: Final = 2
_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)([smhdw])")
_QUOTAS: Final = {
    "stored_bytes": "bytes of stored arrays",
    "inflight_bytes": "bytes of bodies and one-shot products at one time",
    "queued_jobs": "jobs that wait",
    "device_seconds_per_day": "device time a day (UTC)",
}


class Keys:
    """`gemmserve keys create|list|revoke|set`."""

    name = "keys"
    help = "make, list and revoke API keys of a server on this machine"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        parser.default_command = "list"  # type: ignore[attr-defined]  # of the command line's own parsers
        choices = parser.add_subparsers(dest="keys_command", metavar="COMMAND", required=True)
        create = choices.add_parser("create", help="make a key; it is printed once, and cannot be learned again")
        create.add_argument("label", nargs="?", metavar="NAME", help="what the key is called in listings and logs")
        create.add_argument("--name", dest="key_name", metavar="NAME", help="the same")
        create.add_argument(
            "--scopes",
            "--scope",
            dest="key_scopes",
            default="read,submit",
            metavar="LIST",
            help="read (look, download), submit (upload, multiply, delete), admin; or worker alone (join as "
            "a worker, nothing else); default read,submit",
        )
        create.add_argument(
            "--expires-in", dest="key_life", metavar="TIME", help="life, as in 12h, 90d; default: until revoked"
        )
        create.add_argument(
            "--owner",
            dest="key_owner",
            metavar="ID",
            help="share the arrays, jobs and quotas of this owner (`keys list` names them) instead of being a new one",
        )
        _add_limits(create)
        show = choices.add_parser("list", help="show the keys there are, without their secrets")
        show.add_argument("--keys-file", metavar="FILE", help="those of this file too, as the server's --keys-file")
        revoke = choices.add_parser("revoke", help="end keys, for good; a running server notices within a second")
        revoke.add_argument("key_ids", nargs="+", metavar="ID", help="ids as `keys list` shows them")
        change = choices.add_parser("set", help="change an owner's weight and quotas")
        change.add_argument("owner_id", metavar="OWNER", help="id of the owner: of its first key")
        _add_limits(change)
        for child in (create, show, revoke, change):
            child.add_argument("--data-dir", metavar="DIR", help="the server's data directory (default: the server's)")
            child.add_argument("--json", action="store_true", help="print JSON")

    def run(self, args: argparse.Namespace, context: Context) -> int:
        data_dir = Path(args.data_dir).expanduser().absolute() if args.data_dir else default_data_dir()
        command = {"create": _create, "list": _list, "revoke": _revoke, "set": _set}[args.keys_command]
        try:
            return command(args, data_dir, context.console)
        except (_UsageError, ValidationError) as error:
            said = _said(error.errors()[0]) if isinstance(error, ValidationError) else str(error)
            context.console.error(said)
            return _USAGE
        except KeyringError as error:
            context.console.error(str(error))
            return 1


def _said(problem: Mapping[str, Any]) -> str:
    """Return what is wrong with a field of a key, and which."""
    from gemmserve_service.field_errors import message_of

    return f"{'.'.join(map(str, problem['loc']))}: {message_of(problem)}"


class _UsageError(ValueError):
    """An argument makes no sense."""


def _add_limits(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the owner's share and quotas (none: no limit)")
    group.add_argument("--weight", dest="key_weight", metavar="X", help="share of the devices beside others; default 1")
    for name, text in _QUOTAS.items():
        flag = name.removesuffix("_per_day").replace("_", "-")
        metavar = "SIZE" if name.endswith("bytes") else "N"
        group.add_argument(f"--quota-{flag}", dest=f"quota_{name}", metavar=metavar, help=text)


def _create(args: argparse.Namespace, data_dir: Path, console: Console) -> int:
    if args.label and args.key_name and args.label != args.key_name:
        raise _UsageError("two names for one key")
    name = args.key_name or args.label or "unnamed"
    limits = _limits(args)
    key_id, text = create_key(
        data_dir,
        name,
        scopes=_scopes(args.key_scopes),
        expires_at=None if args.key_life is None else time.time() + _seconds(args.key_life),
        owner=args.key_owner,
        weight=_weight(args),
        quota=None if not limits or args.key_owner else Quota.model_validate(limits),
    )
    if limits and args.key_owner:
        change_owner(data_dir, args.key_owner, weight=None, quota=limits)
    if args.json:
        console.json({"id": key_id, "name": name, "key": text})
    else:
        console.note(f"key {key_id} ({name}); keep it now, it is not shown again:")
        console.print(text)
    return 0


def _list(args: argparse.Namespace, data_dir: Path, console: Console) -> int:
    keyring = read_keyring(data_dir, Path(args.keys_file) if args.keys_file else None)
    if args.json:
        console.json(
            [
                {
                    "id": key_id,
                    **record.model_dump(mode="json", exclude={"sha256"}),
                    "scopes": sorted(record.scopes),
                    "state": record.state(),
                    "weight": keyring.weight(record.owner),
                    "quota": keyring.quota(record.owner).model_dump(),
                }
                for key_id, record in keyring.keys.items()
            ]
        )
        return 0
    rows = [
        (
            key_id,
            record.name,
            record.state(),
            ",".join(sorted(record.scopes)),
            record.owner,
            f"{keyring.weight(record.owner):g}",
            _moment(record.created_at),
            _moment(record.expires_at),
            _shown(keyring.quota(record.owner)),
        )
        for key_id, record in keyring.keys.items()
    ]
    console.table(("id", "name", "state", "scopes", "owner", "weight", "created", "expires", "quotas"), rows)
    return 0


def _revoke(args: argparse.Namespace, data_dir: Path, console: Console) -> int:
    records = {key_id: revoke_key(data_dir, key_id) for key_id in args.key_ids}
    if args.json:
        console.json(
            [{"id": key_id, "name": record.name, "state": record.state()} for key_id, record in records.items()]
        )
    else:
        for key_id, record in records.items():
            console.note(f"key {key_id} ({record.name}) is revoked")
    return 0


def _set(args: argparse.Namespace, data_dir: Path, console: Console) -> int:
    owner = change_owner(data_dir, args.owner_id, weight=_weight(args), quota=_limits(args))
    if args.json:
        console.json({"owner": args.owner_id, **owner.model_dump()})
    else:
        console.note(
            f"owner {args.owner_id} ({owner.name}): weight {owner.weight:g}, {_shown(owner.quota) or 'no quotas'}"
        )
    return 0


def _limits(args: argparse.Namespace) -> dict[str, Any]:
    """The quotas that were named; "none" takes a limit away."""
    limits: dict[str, Any] = {}
    for name in _QUOTAS:
        text = getattr(args, f"quota_{name}")
        if text is not None and text.lower() == "none":
            limits[name] = None
        elif text is not None:
            limits[name] = _bytes(text) if name.endswith("bytes") else text
    return limits


def _weight(args: argparse.Namespace) -> float | None:
    if args.key_weight is None:
        return None
    try:
        weight = float(args.key_weight)
    except ValueError:
        weight = 0.0
    if not 0 < weight <= 1000:
        raise _UsageError(f"weight {args.key_weight!r} is not a number above 0, at most 1000")
    return weight


def _scopes(text: str) -> list[Scope]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    known = [scope.value for scope in Scope]
    if not names or not set(names) <= set(known):
        raise _UsageError(f"scopes {text!r}: choose from {', '.join(known)}")
    if Scope.WORKER in names and len(set(names)) > 1:
        raise _UsageError("a key of the scope worker has no other: it lies on other hosts")
    return [Scope(name) for name in names]


def _seconds(text: str) -> float:
    match = _DURATION.fullmatch(text.strip())
    if match is None or float(match[1]) <= 0:
        raise _UsageError(f"{text!r} is no time: 30m, 12h, 90d, 52w")
    return float(match[1]) * _UNITS[match[2]]


def _bytes(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise _UsageError(str(error)) from None


def _moment(seconds: float | None) -> str:
    return "" if seconds is None else datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M")


def _shown(quota: Quota) -> str:
    return " ".join(
        f"{name}={value if isinstance(value, int) else format(value, 'g')}"
        for name, value in quota.model_dump(exclude_none=True).items()
    )


KEYS: Final = Keys()
