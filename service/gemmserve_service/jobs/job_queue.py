"""The durable queue: every job's row, written before its submission is answered, and the Idempotency-Keys."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from pydantic import TypeAdapter
from pydantic_core import to_json

from gemmserve_service.jobs.forms.form import Ended
from gemmserve_service.jobs.idempotency import RememberedKey
from gemmserve_service.runtime import clock
from gemmserve_service.runtime.background import report
from gemmserve_service.runtime.ids import first_id
from gemmserve_service.schemas import GemmJob, GemmReduceJob, JobInfo, JobRequest, JobState, ProgramJob, StepInfo
from gemmserve_service.store.database.database import change_rows, insert_rows, load_sql

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Callable, Iterable, Sequence

    from gemmserve_service.jobs.forms.form import Fresh
    from gemmserve_service.schemas import Problem
    from gemmserve_service.store.array_store import ArrayStore
    from gemmserve_service.store.database.database import Connection, Database

_SQL: Final = load_sql("jobs")
_START_WITHIN_S: Final = 0.05  # nobody waits for it, and of a short job the end comes first and says the same
_TEXT: Final = 4096  # characters that count as a row
_FEW_STARTS: Final = 8
"""Starts that go with the next commit, whatever that is for; of more, most jobs end before long, and that says the
same."""
_AFTER_EVERY_ID: Final = "job_~"  # sorts after every id: the alphabet ends at z
_REQUEST: Final[TypeAdapter[GemmJob | GemmReduceJob | ProgramJob]] = TypeAdapter(JobRequest)
_STEPS: Final = TypeAdapter(list[StepInfo])


@dataclass(frozen=True, slots=True)
class Unfinished:
    """A job that an earlier process left."""

    info: JobInfo
    request: GemmJob | GemmReduceJob | ProgramJob
    deadline_at: float | None
    crashes: int = 0
    """Workers that were lost while they had it."""


class NewJob(NamedTuple):
    """A job as it is put on record."""

    info: JobInfo | Fresh
    request: str
    """Its request as JSON."""
    deadline_at: float | None = None
    trace: str = ""
    """Traceparent of the request that submitted it, where that is traced."""


class _Insert:
    """Rows of new jobs on their way to the record, by job, and of their key."""

    def __init__(self, rows: dict[str, dict[str, Any]], key: dict[str, Any] | None) -> None:
        self.ends: dict[str, dict[str, Any]] = {}
        """Fields of ends that have come before this is begun, by job: they need no write of their own."""
        self.with_ends = False
        """Whether those are in the rows that are written."""
        self.rows = rows
        self._key = key

    def __call__(self, db: Connection) -> None:
        self.with_ends = not db.apart  # else an end may fail, and its job is on record all the same
        ends = self.ends if self.with_ends else {}
        if len(ends) < len(self.rows):
            insert_rows(db, _SQL["insert"], [row for job, row in self.rows.items() if job not in ends])
        if ends:
            insert_rows(db, _SQL["insert_ended"], [self.rows[job] | end for job, end in ends.items()])
        if self._key is not None:
            insert_rows(db, _SQL["remember_key"], [self._key])


@dataclass(eq=False, slots=True)
class _End:
    """End of a job on its way to the record."""

    fields: dict[str, Any]
    rows: Sequence[dict[str, Any]]
    """Rows of the result arrays."""
    told: Callable[[BaseException | None], object]
    weight: int
    """Rows that it writes: see `Database.write_soon`."""
    insert: _Insert | None
    """The write of the job's row, where that may have the end too."""

    @property
    def apart(self) -> bool:
        """Whether the job's row is to be changed."""
        return self.insert is None or not self.insert.with_ends


class NotOnRecord(RuntimeError):  # noqa: N818 (says what is the case)
    """The end of a job cannot be recorded: the job was not, so nobody was told that it was accepted."""


class JobQueue(Protocol):
    """The port: what any queue must keep. A method that returns a future may be left unawaited."""

    def check_open(self) -> None:
        """Raise DatabaseError where nothing can be put on record."""

    def insert(
        self, jobs: Sequence[NewJob], key: RememberedKey | None, *, within_s: float = 0.0
    ) -> asyncio.Future[Any]:
        """Durable once the future is done: all of them and the key, or nothing; what is recorded after it is after it.

        `within_s`: for how long it may wait for what follows. Raises DatabaseError.
        """

    def started(self, job_id: str, attempt: int, started_at: datetime) -> None:
        """Record that it runs before long, unless its end is recorded first; without effect on a finished job."""

    def requeued(self, info: JobInfo, crashes: int) -> asyncio.Future[Any]:
        """Records that it waits again, and how many workers it has lost; without effect on a finished job."""

    def finish(
        self, info: JobInfo | Ended, arrays: Sequence[dict[str, Any]], *, within_s: float = 0.0
    ) -> asyncio.Future[None]:
        """Records the final state and the rows of the result arrays, all or nothing. The future raises NotOnRecord.

        `within_s`: for how long it may wait for what follows. Raises DatabaseError.
        """

    def end(
        self,
        info: JobInfo | Ended,
        arrays: Sequence[dict[str, Any]],
        told: Callable[[BaseException | None], object],
        *,
        within_s: float = 0.0,
    ) -> None:
        """`finish`, and `told(error)` is called in the event loop in the place of a future."""

    def begin(self) -> None:
        """Begin what still waits for company."""

    def stop(self) -> None:
        """Record what nobody waits for: the server stops."""

    async def succeeded(self, job_ids: Iterable[str]) -> list[tuple[JobInfo, GemmJob | GemmReduceJob | ProgramJob]]:
        """Return those of the jobs that have succeeded, with their requests."""

    async def set_error(self, job_id: str, error: Problem) -> None:
        """Record an error that showed after the job's end."""

    async def get(self, job_id: str) -> JobInfo | None:
        """The job of that id."""

    async def page(self, *, state: JobState | None, limit: int, before: str | None, owner: str = "") -> list[JobInfo]:
        """Jobs with ids below `before`, newest first; of one owner, or of all (""). Programs without their steps."""

    async def recover(self) -> tuple[list[Unfinished], list[RememberedKey]]:
        """Queue running jobs again, at the start; return all that are unfinished, oldest first, and the keys."""

    async def shift(self, seconds: float) -> None:
        """The clock was set: moves deadlines, ends and keys along."""

    async def purge(self, *, jobs_before: float, keys_before: float) -> None:
        """Forgets what is older."""


class SqliteQueue:
    """The queue in the service's database."""

    def __init__(self, database: Database, store: ArrayStore) -> None:
        self._database = database
        self._store = store
        self._starts: dict[str, dict[str, Any]] = {}
        """Fields of jobs that have started, which is not recorded yet."""
        self._starts_due: asyncio.TimerHandle | None = None
        """Timer after which those are that have waited for long enough; of most the end is recorded in its stead."""
        self._recording = False
        """Whether a write is under way that will record them."""
        self._inserts: dict[str, _Insert] = {}
        """Writes of rows that wait for company, by job."""
        self._waiting: list[_Insert] = []
        """Writes of rows that are not begun yet: whatever has started by then is inserted as it is."""
        self._ends: list[_End] = []
        self._ends_told: Callable[[Any, BaseException | None], None] | None = None
        """Callback of the write of those ends, which further ones may join while it waits."""
        database.before_begin(self._insert_started)
        database.before_begin(self._record_few_starts)
        database.before_begin(self._inserts.clear)

    def check_open(self) -> None:
        self._database.check_open()

    def insert(
        self, jobs: Sequence[NewJob], key: RememberedKey | None, *, within_s: float = 0.0
    ) -> asyncio.Future[Any]:
        rows: dict[str, dict[str, Any]] = {}
        characters = 0
        for job in jobs:
            info = job.info
            rows[info.id] = {
                "id": info.id,
                "op": info.op,
                "request": job.request,
                "created_at": info.created_at.timestamp(),
                "deadline_at": job.deadline_at,
                "owner": info.owner,
                "trace": job.trace or None,
                "state": "queued",
                "attempt": 0,
                "started_at": None,
            }
            characters += len(job.request)
        insert = _Insert(rows, None if key is None else key._asdict())
        weight = len(rows) + (key is not None) + characters // _TEXT
        future = self._database.write_soon(insert, within_s=within_s, rows=weight)
        self._waiting.append(insert)
        if within_s > 0:
            self._inserts.update(dict.fromkeys(rows, insert))
        return future

    def started(self, job_id: str, attempt: int, started_at: datetime) -> None:
        due = time.monotonic() + _START_WITHIN_S
        self._starts[job_id] = {"id": job_id, "attempt": attempt, "started_at": started_at, "tried": False, "due": due}
        self._wind()

    def _wind(self, within_s: float = _START_WITHIN_S) -> None:
        if self._starts_due is None and not self._recording:
            self._starts_due = asyncio.get_running_loop().call_later(within_s, self._record_due_starts)

    def _insert_started(self) -> None:
        """Have jobs whose rows are about to be written, and which have started, inserted as running."""
        waiting, self._waiting = self._waiting, []
        for insert in waiting if self._starts else ():
            for job, row in insert.rows.items():
                start = self._starts.get(job)
                # Of others what put the job into the queue again is to be written first.
                if start is not None and start["attempt"] == 1:
                    row["state"], row["attempt"] = "running", start["attempt"]
                    row["started_at"] = start["started_at"].timestamp()
                    del self._starts[job]

    def _record_few_starts(self) -> None:
        if 0 < len(self._starts) <= _FEW_STARTS:
            self._record_starts()

    def _record_due_starts(self) -> None:
        self._starts_due = None
        first = next(iter(self._starts.values()), None)
        left_s = 0.0 if first is None else first["due"] - time.monotonic()
        if left_s > 0:  # the timer was wound for one that has ended
            self._wind(left_s)
        else:
            self._record_starts()

    def _record_starts(self) -> None:
        """Record the starts of jobs that have not ended."""
        if self._starts and not self._recording and self._database.is_open:
            self._recording = True

            def write(db: sqlite3.Connection) -> list[dict[str, Any]]:
                settled = []
                for fields in self._starts.copy().values():
                    # A job that came after this was begun may be put on record behind it: the next time, then.
                    moment = {**fields, "started_at": fields["started_at"].timestamp()}
                    if db.execute(_SQL["start"], moment).rowcount or fields["tried"]:
                        settled.append(fields)
                    fields["tried"] = True
                return settled

            self._database.write_soon(write, rows=len(self._starts)).add_done_callback(self._starts_recorded)

    def _starts_recorded(self, done: asyncio.Future[list[dict[str, Any]]]) -> None:
        self._recording = False
        report(done)
        recorded = list(self._starts.values()) if done.exception() is not None else done.result()
        for fields in recorded:
            if self._starts.get(fields["id"]) is fields:
                del self._starts[fields["id"]]
        if self._starts and self._database.is_open:
            self._wind()

    def begin(self) -> None:
        self._database.begin_soon()

    def stop(self) -> None:
        self._record_starts()

    def requeued(self, info: JobInfo, crashes: int) -> asyncio.Future[Any]:
        self._starts.pop(info.id, None)
        fields = {"id": info.id, "attempt": info.attempt, "crashes": crashes}
        return self._database.write_soon(lambda db: db.execute(_SQL["requeue"], fields), rows=1)

    def finish(
        self, info: JobInfo | Ended, arrays: Sequence[dict[str, Any]], *, within_s: float = 0.0
    ) -> asyncio.Future[None]:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def told(error: BaseException | None) -> None:
            if done.done():
                return
            if error is None:
                done.set_result(None)
            else:
                done.set_exception(error)

        self.end(info, arrays, told, within_s=within_s)
        return done

    def end(
        self,
        info: JobInfo | Ended,
        arrays: Sequence[dict[str, Any]],
        told: Callable[[BaseException | None], object],
        *,
        within_s: float = 0.0,
    ) -> None:
        self._starts.pop(info.id, None)  # the end says the same
        result: str | None
        timings: str | None
        if isinstance(info, Ended):
            result, timings = info.result_text, info.timings_text
            error = elements = steps = None
        else:
            result = None if info.result is None else to_json(info.result).decode()
            timings = None if info.timings is None else to_json(info.timings).decode()
            steps = None if info.steps is None else _STEPS.dump_json(info.steps, exclude_none=True).decode()
            error = None if info.error is None else info.error.model_dump_json()
            elements = None if info.elements is None else info.elements.model_dump_json()
        fields = {
            "id": info.id,
            "state": str(info.state),
            "attempt": info.attempt,
            "started_at": _timestamp(info.started_at),
            "finished_at": _timestamp(info.finished_at),
            "result": result,
            "error": error,
            "timings": timings,
            "algorithm": info.algorithm,
            "residual": info.residual,
            "mismatch": info.mismatch,
            "elements": elements,
            "trace": info.trace or None,
            "steps": steps,
        }

        insert = self._inserts.pop(info.id, None)
        end = _End(fields, arrays, told, 1 + len(arrays) + len(steps or "") // _TEXT, insert)
        if self._ends_told is not None and self._database.may_grow(self._ends_told, within_s=within_s, rows=end.weight):
            self._ends.append(end)
        else:
            self._ends = [end]
            self._ends_told = self._record_ends(self._ends, within_s=within_s)
        if insert is not None:
            insert.ends[info.id] = fields

    def _record_ends(
        self, ends: Sequence[_End], *, within_s: float = 0.0
    ) -> Callable[[set[str], BaseException | None], None]:
        """Write those ends together; return what is called with the ids of jobs that are not on record. Raises
        DatabaseError.
        """

        def write(db: sqlite3.Connection) -> set[str]:
            missing: set[str] = set()
            apart = [end.fields for end in ends if end.apart]
            if apart and change_rows(db, _SQL["finish"], apart) < len(apart):
                missing = {fields["id"] for fields in apart if db.execute(_SQL["get"], fields).fetchone() is None}
            self._store.insert_rows(db, [row for end in ends if end.fields["id"] not in missing for row in end.rows])
            return missing

        told = partial(self._ends_recorded, ends)
        self._database.write_then(write, told, within_s=within_s, rows=sum([end.weight for end in ends]))
        return told

    def _ends_recorded(self, ends: Sequence[_End], missing: set[str], error: BaseException | None) -> None:
        """Called when ends are written, or cannot be: then one may be what is wrong, and each goes alone."""
        if error is not None and len(ends) > 1 and self._database.is_open:
            for end in ends:
                self._record_ends([end])
            return
        for end in ends:
            if error is None and end.fields["id"] in missing:
                end.told(NotOnRecord(f"job {end.fields['id']} was never put on record"))
            else:
                end.told(error)

    async def succeeded(self, job_ids: Iterable[str]) -> list[tuple[JobInfo, GemmJob | GemmReduceJob | ProgramJob]]:
        ids = {"ids": json.dumps(list(job_ids))}
        rows = await self._database.read(lambda db: db.execute(_SQL["succeeded"], ids).fetchall())
        return [(_info(row), request_of(row["request"])) for row in rows]

    async def set_error(self, job_id: str, error: Problem) -> None:
        fields = {"id": job_id, "error": error.model_dump_json()}
        await self._database.write(lambda db: db.execute(_SQL["set_error"], fields))

    async def get(self, job_id: str) -> JobInfo | None:
        self._record_starts()
        row = await self._database.read(lambda db: db.execute(_SQL["get"], {"id": job_id}).fetchone())
        return None if row is None else _info(row)

    async def page(self, *, state: JobState | None, limit: int, before: str | None, owner: str = "") -> list[JobInfo]:
        self._record_starts()
        fields = {"before": before or _AFTER_EVERY_ID, "limit": limit, "state": state, "owner": owner}
        statement = _page_of(state, owner)
        rows = await self._database.read(lambda db: db.execute(statement, fields).fetchall())
        return [_info(row) for row in rows]

    async def recover(self) -> tuple[list[Unfinished], list[RememberedKey]]:
        await self._database.write(lambda db: db.execute(_SQL["recover"]))

        def read(db: sqlite3.Connection) -> tuple[Sequence[sqlite3.Row], Sequence[sqlite3.Row]]:
            return db.execute(_SQL["unfinished"]).fetchall(), db.execute(_SQL["keys"]).fetchall()

        jobs, keys = await self._database.read(read)
        unfinished = [
            Unfinished(_info(row), request_of(row["request"]), row["deadline_at"], row["crashes"]) for row in jobs
        ]
        last = {(row["owner"], row["key"]): RememberedKey(**dict(row)) for row in keys}  # of each key its last row
        return unfinished, list(last.values())

    async def shift(self, seconds: float) -> None:
        def write(db: sqlite3.Connection) -> None:
            db.execute(_SQL["shift"], {"seconds": seconds})
            db.execute(_SQL["shift_keys"], {"seconds": seconds})

        await self._database.write(write)

    async def purge(self, *, jobs_before: float, keys_before: float) -> None:
        def write(db: sqlite3.Connection) -> None:
            # Those that were made before, and those whose ids are of the time before the clock was set back.
            for after, until in (("", first_id("job", jobs_before)), (first_id("job", clock.time()), _AFTER_EVERY_ID)):
                db.execute(_SQL["purge"], {"before": jobs_before, "after": after, "until": until})
            db.execute(_SQL["purge_keys"], {"before": keys_before})

        await self._database.write(write)


def request_of(stored: str | dict[str, Any]) -> GemmJob | GemmReduceJob | ProgramJob:
    """The request that a row holds, as JSON or parsed."""
    return _REQUEST.validate_json(stored) if isinstance(stored, str) else _REQUEST.validate_python(stored)


def _page_of(state: JobState | None, owner: str) -> str:
    """The statement for a page, which says what the index that serves it has: that of states where few jobs are in
    this one, else that of owners; without an owner most jobs are of the page anyway.
    """
    conditions = ["id < :before"]
    if state is not None:
        conditions.append("state = :state")
    if owner:
        conditions.append("owner = :owner")
    if state not in {None, JobState.SUCCEEDED}:
        conditions.append("state <> 'succeeded'")
    elif owner:
        conditions.append("owner <> ''")
    return _SQL["page"].replace(conditions[0], " AND ".join(conditions))


def brief(info: JobInfo) -> JobInfo:
    """The job as it stands in a listing: of a program without its steps, which may be a thousand."""
    return info.model_copy(update={"request": None, "steps": None}) if info.op == "program" else info


def _timestamp(moment: datetime | None) -> float | None:
    return None if moment is None else moment.timestamp()


def _moment(timestamp: float | None) -> datetime | None:
    return None if timestamp is None else datetime.fromtimestamp(timestamp, UTC)


def _info(row: sqlite3.Row) -> JobInfo:
    return JobInfo(
        id=row["id"],
        state=JobState(row["state"]),
        op=row["op"],
        attempt=row["attempt"],
        created_at=datetime.fromtimestamp(row["created_at"], UTC),
        started_at=_moment(row["started_at"]),
        finished_at=_moment(row["finished_at"]),
        result=None if row["result"] is None else json.loads(row["result"]),
        error=None if row["error"] is None else json.loads(row["error"]),
        timings=None if row["timings"] is None else json.loads(row["timings"]),
        algorithm=row["algorithm"],
        residual=row["residual"],
        mismatch=row["mismatch"],
        elements=None if row["elements"] is None else json.loads(row["elements"]),
        steps=None if row["steps"] is None else json.loads(row["steps"]),
        request=None if row["request"] is None else json.loads(row["request"]),
        owner=row["owner"],
        trace=row["trace"] or "",
    )
