"""The bridge: the one process of a server that is a driver of Ray's. It keeps detached actors, a worker each.

Twice a second, and more often while Ray starts one, it looks at its actors and does what `decisions` say. Nothing of a
job passes through it: it may end, and Ray's head may be gone, while workers serve. A driver ends by itself a minute
after the head is gone; this one ends as soon as the head has not answered for `_ROUND_S`, and the next one, which the
supervisor starts, waits for the head. Actors are detached and have names: the next one finds them.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import signal
import sys
import threading
import time
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Final, cast

from gemmserve_service.processes.ray.actor import Order, Report, WorkerActor
from gemmserve_service.processes.ray.decisions import OWNED_S, SILENT_S, Phase, Seen, Sizing, decide
from gemmserve_service.processes.ray.demand import Listener
from gemmserve_service.processes.ray.join_token import read_token
from gemmserve_service.runtime import logs
from gemmserve_service.runtime.handoff import RayHandoff

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from gemmserve_service.processes.ray.decisions import Steps
    from gemmserve_service.settings import Settings

_PERIOD_S: Final = 0.5
_STARTING_PERIOD_S: Final = 0.1
_STARTING_S: Final = 5.0
"""Seconds during which an actor that was asked for or lost may come any moment; Ray takes one to start its process."""
_ROUND_S: Final = 5.0
"""Seconds that the head may take for a round of questions; a healthy one takes milliseconds."""
_CONNECT_S: Final = 60.0
"""Likewise for a driver's beginning; Ray gives up by itself after about forty."""
_STOP_S: Final = 30.0
"""Past the drain, for a worker that was told to end."""
_DRIVER: Final = {"RAY_AUTH_MODE": "token", "RAY_timeout_ms_task_wait_for_death_info": "0"}
"""Environment of a driver that speaks with Ray's token, and that is told at once when nobody answered: by itself Ray
keeps that back for a second, in case that it learns why.
"""
_NAME: Final = re.compile(r"worker-(\d+)")
_DEVICES: Final = {"cuda": "cuda:0", "rocm": "rocm:0", "cpu": "cpu"}
"""Device that a worker is told to use: of an actor's GPUs, which are one, the first."""

log = logging.getLogger(__name__)


class Bridge:
    """Actors of one namespace; `ray` is the module, connected."""

    def __init__(self, ray: Any, settings: Settings, join_url: str, token: str | None) -> None:
        self._ray = ray
        self._settings = settings
        self._join_url, self._token = join_url, token
        self._sizing = Sizing(
            settings.ray_min_workers, settings.ray_max_workers, settings.ray_jobs_per_worker, settings.ray_idle_s
        )
        self._class = ray.remote(WorkerActor)
        self._handles: dict[int, Any] = {}
        self._asked: dict[int, Any] = {}
        """Answers that are under way."""
        self._reports: dict[int, tuple[float, Report]] = {}
        self._stopping: dict[int, float] = {}
        self._said: dict[int, str] = {}
        self._warned = False
        self._starting_until = 0.0
        self.fingerprint = fingerprint(settings, join_url, token)

    def round(self, listener: Listener) -> None:
        """Looks once and does what is to be done. Raises Ray's errors where its head does not answer."""
        self._find()
        self._hear()
        seen = self._seen()
        if self._is_anothers(seen):  # of those that have said nothing nobody knows whose they are
            self._take(decide(0, [each for each in seen if each.phase not in {Phase.UNHEARD, Phase.FOREIGN}]))
            return
        present = sum(actor.phase in {Phase.UNHEARD, Phase.EMPTY, Phase.SERVING} for actor in seen)
        target = self._sizing.target(time.monotonic(), listener.last(), present)
        self._take(decide(target, seen))

    def pause_s(self) -> float:
        """Return the seconds from the beginning of one round to that of the next."""
        return _STARTING_PERIOD_S if time.monotonic() < self._starting_until else _PERIOD_S

    def remove_all(self) -> None:
        """Takes every actor of ours away: the server ends, and nobody is left to serve."""
        self._find()
        seen = self._seen()
        others = {Phase.TAKEN, Phase.UNHEARD} if self._is_anothers(seen) else {Phase.TAKEN}
        for actor in seen:
            if actor.phase not in others:
                self._remove(actor.number, "the server ends")

    # -- what there is ------------------------------------------------------------------------------------------------

    def _find(self) -> None:
        names = map(_NAME.fullmatch, self._ray.util.list_named_actors())
        there = {int(name[1]) for name in names if name is not None}
        for number in self._handles.keys() - there:
            self._forget(number)
        for number in there - self._handles.keys():
            with contextlib.suppress(ValueError):  # it ended meanwhile
                self._handles[number] = self._ray.get_actor(_name(number))

    def _hear(self) -> None:
        if self._ask():
            self._find()  # whoever has such a name now; Ray, or another bridge, may have made it anew
            self._ask()

    def _ask(self) -> bool:
        """Asks all that owe no answer, and waits a little for answers; returns whether one was lost."""
        for number, handle in self._handles.items():
            if number not in self._asked:
                self._asked[number] = handle.look.remote(self.fingerprint)
        waiting = list(self._asked.values())
        if not waiting:
            return False
        answered, _ = self._ray.wait(waiting, num_returns=len(waiting), timeout=self.pause_s() / 2)
        lost = False
        for number, question in list(self._asked.items()):
            if question in answered:
                del self._asked[number]
                try:
                    report = cast("Report", self._ray.get(question))
                except self._ray.exceptions.RayError as error:  # it died, or its node did: Ray makes it anew
                    self._say(number, f"lost ({type(error).__name__}); Ray starts it again")
                    if self._reports.pop(number, None) is not None:  # else it is still being made, or has no room
                        self._expect()
                    del self._handles[number]
                    lost = True
                else:
                    self._reports[number] = time.monotonic(), report
                    if report["phase"] == Phase.EMPTY:  # Ray has made it anew: it is not the one that was told to stop
                        self._stopping.pop(number, None)
                    self._say(number, _described(report))
        return lost

    def _seen(self) -> list[Seen]:
        found = []
        for number in self._handles:
            heard, report = self._reports.get(number, (0.0, None))
            if report is None:
                found.append(Seen(number, Phase.UNHEARD))
                continue
            phase = Phase(report["phase"])
            if report["fingerprint"] != self.fingerprint:
                owned = report["unowned_s"] < OWNED_S and time.monotonic() - heard < SILENT_S
                phase = Phase.TAKEN if owned else Phase.FOREIGN
            elif number in self._stopping and time.monotonic() > self._stopping[number]:
                phase = Phase.STOPPED
            found.append(Seen(number, phase, time.monotonic() - heard))
        return found

    def _is_anothers(self, seen: Iterable[Seen]) -> bool:
        """Return whether another server has the namespace: of those that said anything, the lowest number is its."""
        heard = sorted((actor for actor in seen if actor.phase is not Phase.UNHEARD), key=lambda actor: actor.number)
        if not heard or heard[0].phase is not Phase.TAKEN:
            self._warned = False
            return False
        if not self._warned:
            self._warned = True
            log.error(
                "another server keeps its workers in Ray's namespace %s: no workers here until it is gone, or until "
                "ray_namespace is another one",
                self._settings.ray_namespace,
            )
        return True

    # -- what is done -------------------------------------------------------------------------------------------------

    def _take(self, steps: Steps) -> None:
        for number in steps.remove:
            self._remove(number, "not needed, or of other settings")
        for number in steps.stop:
            self._stopping[number] = time.monotonic() + self._settings.drain_s + _STOP_S
            self._handles[number].stop.remote()
        for number in steps.restart:
            self._say(number, "silent; killing it, Ray starts it again")
            self._asked.pop(number, None)
            self._reports.pop(number, None)
            self._ray.kill(self._handles[number], no_restart=False)
            self._expect()
        for number in steps.order:
            self._handles[number].take.remote(self._order(number))
        for number in steps.make:
            self._make(number)

    def _make(self, number: int) -> None:
        gpus = 0 if self._settings.ray_device == "cpu" else 1
        options = self._class.options(
            name=_name(number),
            lifetime="detached",
            max_restarts=-1,
            num_cpus=self._settings.ray_cpus,
            num_gpus=gpus,
        )
        with contextlib.suppress(ValueError):  # there is one of that name after all: it is found in the next round
            self._handles[number] = options.remote(self.fingerprint)
            self._say(number, "asked for")
            self._expect()

    def _expect(self) -> None:
        """Has rounds follow each other more closely: an actor is on its way."""
        self._starting_until = time.monotonic() + _STARTING_S

    def _remove(self, number: int, why: str) -> None:
        self._say(number, f"removed ({why})")
        self._ray.kill(self._handles[number], no_restart=True)
        self._forget(number)

    def _forget(self, number: int) -> None:
        for each in (self._handles, self._asked, self._reports, self._stopping, self._said):
            cast("dict[int, object]", each).pop(number, None)

    def _order(self, number: int) -> Order:
        settings = self._settings
        device = _DEVICES[settings.ray_device]
        arguments = ["-m", "gemmserve.cli", "worker", "--join", self._join_url]
        arguments += ["--device", device, "--name", f"ray-{number}"]
        if settings.join_insecure:
            arguments.append("--join-insecure")
        threads = max(1, int(settings.ray_cpus)) if settings.ray_device == "cpu" else None
        return Order(
            arguments=arguments,
            join_url=self._join_url,
            token=self._token,
            threads=threads,
            orphan_s=settings.ray_orphan_s,
        )

    def _say(self, number: int, text: str) -> None:
        if self._said.get(number) != text:
            self._said[number] = text
            log.info("ray worker %d: %s", number, text)


def fingerprint(settings: Settings, join_url: str, token: str | None) -> str:
    """Return what an actor's settings are known by: one of others, or of another version, is replaced. Of the token
    there is a digest in it, which tells nobody the token, whose bits are random.
    """
    of_orders = (settings.ray_orphan_s, settings.join_insecure)
    facts = (version("gemmserve"), join_url, settings.ray_device, settings.ray_cpus, *of_orders, token)
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:32]


def driver_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a driver of Ray's, in which what its operator has said comes first."""
    return {**_DRIVER, **environment}


class _Watch:
    """Ends the process when a piece of work takes too long: calls of Ray's wait for its head without end."""

    def __init__(self) -> None:
        self._due = float("inf")
        threading.Thread(target=self._run, name="gemmserve-watch", daemon=True).start()

    def within(self, seconds: float) -> None:
        """From now on so long."""
        self._due = time.monotonic() + seconds

    def _run(self) -> None:
        while True:
            time.sleep(0.5)
            if time.monotonic() > self._due:
                log.warning("Ray's head does not answer; workers serve on, and a new bridge waits for it")
                os._exit(os.EX_TEMPFAIL)


def _name(number: int) -> str:
    return f"worker-{number}"


def _described(report: Report) -> str:
    where = f"on {report['node']}"
    if report["worker"] is not None:
        return f"{report['phase']} {where}, process {report['worker']}, start {report['starts']}"
    ended = "" if report["status"] is None else f", its process ended with {report['status']}"
    return f"{report['phase']} {where}{ended}"


def _rounds(pause_s: Callable[[], float]) -> Iterable[None]:
    """Yield until SIGTERM or SIGINT, `pause_s()` from the beginning of one round to that of the next."""
    told = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: told.set())  # after Ray has set its own
    while not told.is_set():
        began = time.monotonic()
        yield
        told.wait(max(0.0, began + pause_s() - time.monotonic()))


def main() -> int:
    """Keeps workers until SIGTERM; returns the exit status."""
    handoff = RayHandoff.receive()
    settings = handoff.settings
    logs.configure(settings)
    os.environ.update(driver_environment(os.environ))
    try:
        token = read_token(settings.ray_token_file)
    except (OSError, ValueError) as error:
        log.error("the workers' token cannot be read: %s", error)  # noqa: TRY400 (not a fault of the program)
        return os.EX_UNAVAILABLE
    records = logging.getLogRecordFactory()
    import ray

    watch = _Watch()
    watch.within(_CONNECT_S)
    try:
        ray.init(
            address=settings.ray_address, namespace=settings.ray_namespace, log_to_driver=False, configure_logging=False
        )
    except (ConnectionError, RuntimeError, ray.exceptions.RayError) as error:
        log.warning("Ray at %s cannot be reached: %s", settings.ray_address, error)
        return os.EX_TEMPFAIL
    logging.setLogRecordFactory(records)  # Ray's gives every line a field of its own
    bridge = Bridge(ray, settings, handoff.join_url, token)
    listener = Listener(handoff.demand_fd)
    log.info("bridge to Ray at %s, namespace %s", settings.ray_address, settings.ray_namespace)
    for _ in _rounds(bridge.pause_s):
        watch.within(_ROUND_S)
        bridge.round(listener)
    watch.within(_ROUND_S)
    bridge.remove_all()
    return 0


if __name__ == "__main__":
    sys.exit(main())
