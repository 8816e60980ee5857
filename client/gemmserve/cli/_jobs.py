"""jobs: list, show, wait for and cancel them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gemmserve.cli._arrays import when_text
from gemmserve.cli._context import UsageError, add_connection

if TYPE_CHECKING:
    import argparse

    from gemmserve import JobInfo
    from gemmserve.cli._context import Context


class _Jobs:
    name = "jobs"
    help = "list, show, wait for or cancel jobs"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("action", nargs="?", choices=("list", "show", "wait", "cancel"), default="list")
        parser.add_argument("ids", nargs="*", metavar="ID", help="ids of jobs, for show, wait and cancel")
        parser.add_argument("--state", help="list only jobs in this state")
        parser.add_argument("--limit", type=int, default=50, metavar="N", help="list the newest N (default 50)")
        parser.add_argument("--all", action="store_true", help="list everybody's; needs a key with the scope admin")
        parser.add_argument("--timeout", type=float, metavar="SECONDS", help="how long wait waits for each job")
        parser.add_argument("--json", action="store_true", help="print JSON")
        add_connection(parser)

    def run(self, args: argparse.Namespace, context: Context) -> int:
        if (args.action == "list") == bool(args.ids):
            raise UsageError("list takes no ids" if args.ids else f"{args.action} needs the id of a job")
        client = context.connect()
        if args.action == "list":
            infos = [job.info for job in client.jobs(state=args.state, limit=args.limit, everybody=args.all)]
        else:
            infos = []
            for job_id in args.ids:
                job = client.job(job_id)
                if args.action == "wait":
                    job.wait(args.timeout)
                elif args.action == "cancel":
                    job.cancel()
                infos.append(job.info)
        if args.json:
            fields: list[Any] = [dict(info.fields) for info in infos]
            context.console.json(fields)
        elif args.action == "show":
            _show(infos, context)
        else:
            columns = ("id", "op", "state", "done", "algorithm", "created", "seconds", "result", "error")
            context.console.table(columns, [_row(info) for info in infos])
        return int(args.action == "wait" and any(info.state != "succeeded" for info in infos))


def _row(info: JobInfo) -> tuple[object, ...]:
    results = " ".join(f"{name}={array_id}" for name, array_id in info.result.items())
    error = (info.error or {}).get("detail", "")
    created = when_text(info.created_at)
    done = done_text(info)
    return (info.id, info.op, info.state, done, info.algorithm, created, _seconds(info), results, error)


def done_text(info: JobInfo) -> str:
    """Return the share of a job that is done, for a table: nothing where that is not known, or it has not begun."""
    return f"{info.progress:.0%}" if info.progress else ""


def _seconds(info: JobInfo) -> str:
    if info.started_at is None or info.finished_at is None:
        return ""
    return f"{(info.finished_at - info.started_at).total_seconds():.3f}"


def _show(infos: list[JobInfo], context: Context) -> None:
    for info in infos:
        rows = [(name, value) for name, value in info.fields.items() if value is not None]
        context.console.table(("field", "value"), rows)


JOBS = _Jobs()
