"""What processes that measure share: commands as JSON lines, and calls timed one by one. Standard library alone: the
driver of tritonclient runs in its own environment.
"""

import json
import sys
import time


def timed(call, check, seconds, most, after=None):
    """Nanoseconds of each call until the time is up, or after so many.

    A first call is not timed. Its result and the last one's are checked, before `after`, if given, gets rid of them.
    """
    result = call()
    durations = []
    end = time.perf_counter() + seconds
    while True:
        last = durations and (time.perf_counter() >= end or len(durations) == most)
        if last or not durations:
            check(result)
        if after:
            after(result)
        if last:
            return durations
        began = time.perf_counter_ns()
        result = call()
        durations.append(time.perf_counter_ns() - began)


def serve(run):
    """Answers commands, JSON lines on standard input, until there are none. What goes wrong is the answer's `error`.

    `run` takes a command and returns the answer; `client_cpu`, the share of a processor that it took, is added.
    """
    for line in sys.stdin:
        try:
            began, cpu = time.perf_counter(), time.process_time()
            answer = run(json.loads(line))
            answer.setdefault("client_cpu", (time.process_time() - cpu) / (time.perf_counter() - began))
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)
