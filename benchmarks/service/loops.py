"""Closed and open loops over connections: one thread, so that what it measures gets the processors.

A closed loop keeps a fixed number of exchanges going. An open loop begins them at a fixed rate whatever the answers do,
and counts latency from when an exchange was to begin: an exchange that had to wait for a free connection has waited
(no coordinated omission).
"""

from __future__ import annotations

import collections
import itertools
import select
import time
from dataclasses import dataclass, field

from benchmarks.service import histogram
from benchmarks.service.connection import Connection
from benchmarks.service.http1 import AnswerError

DRAIN_S = 30.0
MOST_TIMINGS = 2000
_IN, _INOUT = select.EPOLLIN, select.EPOLLIN | select.EPOLLOUT


@dataclass
class Outcome:
    """Outcome of a loop. `lag`: how late exchanges began although a connection was free: the generator's own share."""

    latencies: object = field(default_factory=histogram.empty)
    lag: object = field(default_factory=histogram.empty)
    errors: collections.Counter = field(default_factory=collections.Counter)
    timings: list = field(default_factory=list)
    seconds: float = 0.0
    cpu_seconds: float = 0.0

    def document(self):
        """As JSON takes it."""
        return {
            "histogram": histogram.encoded(self.latencies),
            "count": self.latencies.get_total_count(),
            "per_s": self.latencies.get_total_count() / self.seconds if self.seconds else 0.0,
            "median_ms": histogram.summary(self.latencies).get("p50_ms"),
            "lag_p99_ms": histogram.summary(self.lag).get("p99_ms"),
            "errors": dict(self.errors),
            "timings": self.timings,
            "seconds": self.seconds,
            "client_cpu": self.cpu_seconds / self.seconds if self.seconds else None,
        }


def once(address, exchange):
    """The body of the answer to one exchange on a connection of its own. Raises AnswerError, OSError."""
    loop = Loop(address, exchange, 1)
    try:
        loop.alone(loop.connections[0], exchange)
        loop.connections[0].check()
        return loop.connections[0].body()
    finally:
        loop.close()


class Loop:
    """Connections to one address, all with the same exchange."""

    def __init__(self, address, exchange, clients):
        self.exchange = exchange
        self.connections = [Connection(address) for _ in range(clients)]
        self._epoll = select.epoll()
        for connection in self.connections:
            self._epoll.register(connection.fileno(), _IN)
        self._by_fd = {connection.fileno(): connection for connection in self.connections}
        self._masks = dict.fromkeys(self._by_fd, _IN)

    def close(self):
        """Ends the connections."""
        self._epoll.close()
        for connection in self.connections:
            connection.socket.close()

    def warm_up(self, times=1):
        """That many exchanges on each connection, the answers compared to the last byte. Raises AnswerError."""
        for connection in self.connections:
            for _ in range(times):
                self.alone(connection, self.exchange)
                connection.check(full=True)
                self._tidy_up(connection)

    def _tidy_up(self, connection):
        after = connection.exchange.after
        further = after(connection.body()) if after else None
        if further is not None:
            self.alone(connection, further)
            connection.check()

    def alone(self, connection, exchange, limit_s=300.0):
        """One exchange, begun and ended. Raises AnswerError, OSError."""
        connection.begin(exchange)
        end = time.monotonic() + limit_s
        while not connection.advance():
            ready = ([connection], [connection] if connection.sending else [], [])
            if not any(select.select(*ready, max(0.0, end - time.monotonic()))):
                raise AnswerError(f"no answer within {limit_s:.0f} s")
        if connection.head.closes:
            self._anew(connection)

    def _anew(self, connection):
        """A new socket in the place of the old one."""
        del self._masks[connection.fileno()], self._by_fd[connection.fileno()]
        self._epoll.unregister(connection.fileno())
        connection.reconnect()
        self._epoll.register(connection.fileno(), _IN)
        self._masks[connection.fileno()] = _IN
        self._by_fd[connection.fileno()] = connection

    def closed(self, seconds, most=None):
        """Every connection busy all the time: until then, or until so many exchanges have begun; each begins one."""
        left = itertools.count() if most is None else iter(range(most))
        outcome = Outcome()
        began, end = self._begin_clock(seconds)

        def further(connection, first=False):
            if (first or time.perf_counter_ns() < end) and next(left, None) is not None:
                now = time.perf_counter_ns()
                self._start(connection, now, outcome)
                return True
            return False

        busy = sum(further(connection, first=True) for connection in self.connections)
        deadline = end + int(DRAIN_S * 1e9)
        while busy:
            for connection in self._finished(outcome, self._pause(deadline)):
                busy -= not further(connection)
        return self._end(outcome, began)

    def open(self, rate, seconds):
        """`rate` exchanges a second for so long; those that are late are waited for."""
        outcome = Outcome()
        began, end = self._begin_clock(seconds)
        step = 1e9 / rate
        due = (began + int(i * step) for i in itertools.count())
        upcoming = next(due)
        waiting, free, busy = collections.deque(), collections.deque(self.connections), 0
        deadline = end + int(DRAIN_S * 1e9)
        while upcoming < end or waiting or busy:
            now = time.perf_counter_ns()
            while upcoming <= now and upcoming < end:
                waiting.append(upcoming)
                upcoming = next(due)
            while waiting and free:
                intended, connection = waiting.popleft(), free.popleft()  # the one that has been free for longest
                now = time.perf_counter_ns()
                busy += 1
                idle = connection.freed <= intended
                self._start(connection, intended, outcome, lag=now - intended if idle else None)
            until = upcoming if upcoming < end else self._pause(deadline)
            done = self._finished(outcome, until)
            busy -= len(done)
            free += done
        return self._end(outcome, began)

    def _begin_clock(self, seconds):
        self._cpu = time.process_time()
        began = time.perf_counter_ns()
        return began, began + int(seconds * 1e9)

    def _end(self, outcome, began):
        outcome.seconds = (time.perf_counter_ns() - began) / 1e9
        outcome.cpu_seconds = time.process_time() - self._cpu
        return outcome

    def _pause(self, deadline):
        """The deadline. Raises AnswerError past it."""
        if time.perf_counter_ns() > deadline:
            raise AnswerError(f"answers are missing {DRAIN_S:.0f} s after the end")
        return deadline

    def _start(self, connection, intended, outcome, lag=None):
        connection.intended = intended
        connection.begin(self.exchange)
        if lag is not None:
            outcome.lag.record_value(max(histogram.LOWEST_NS, lag))
        connection.send()  # the answer takes a moment: no attempt to receive it
        self._watch(connection)

    def _watch(self, connection):
        mask = _INOUT if connection.exchange is not None and connection.sending else _IN
        fd = connection.fileno()
        if self._masks[fd] != mask:
            self._masks[fd] = mask
            self._epoll.modify(fd, mask)

    def _finished(self, outcome, until_ns):
        """Connections that are free again, after waiting until that time at most for one to have something to do."""
        left = until_ns - time.perf_counter_ns()
        if left > 0:  # epoll itself counts in milliseconds
            select.select([self._epoll], [], [], left / 1e9)
        done = []
        for fd, _ in self._epoll.poll(0):
            connection = self._by_fd[fd]
            if connection.exchange is None:  # the server has closed what was idle
                self._anew(connection)
            elif not connection.advance():
                self._watch(connection)
            elif self._complete(connection, outcome):
                done.append(connection)
        return done

    def _complete(self, connection, outcome):
        """Counts an exchange; False while tidying up is under way."""
        if connection.timed:
            elapsed = time.perf_counter_ns() - connection.intended
            if connection.head.status == connection.exchange.status:
                connection.check()
                outcome.latencies.record_value(elapsed)
                if connection.head.server_timing and len(outcome.timings) < MOST_TIMINGS:
                    outcome.timings.append([elapsed / 1e6, connection.head.server_timing])
            else:
                outcome.errors[str(connection.head.status)] += 1
        else:
            connection.check()
        after = connection.exchange.after
        further = after(connection.body()) if after and connection.head.status == connection.exchange.status else None
        if connection.head.closes:
            self._anew(connection)
        if further is None:
            connection.exchange, connection.freed = None, time.perf_counter_ns()
            self._watch(connection)
            return True
        connection.begin(further, timed=False)
        connection.send()
        self._watch(connection)
        return False
