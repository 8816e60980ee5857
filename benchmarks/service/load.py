"""The load generator's process: commands as JSON lines on standard input, one answer each on standard output.

    {"address": ["127.0.0.1", 8000], "protocol": "gemmserve", "operation": "product", "n": 64,
     "clients": 16, "seconds": 2, "most": null, "rate": null, "warm": 1}

The operation "download" takes the `path` of a resident array of `n` bytes. `api_key` goes with every request, if given.

`rate`: an open loop of so many exchanges a second over at most `clients` connections; null: a closed loop. `most`: end
after so many. An answer holds the latencies as an HDR histogram, or `error`.
"""

from __future__ import annotations

from benchmarks.service import driver, exchanges
from benchmarks.service.loops import Loop, once


def run(command):
    """One measurement. Raises AnswerError, OSError, LookupError."""
    loop = Loop(command["address"], asked(command), command.get("clients", 1))
    try:
        loop.warm_up(command.get("warm", 1))
        if command.get("rate"):
            outcome = loop.open(command["rate"], command["seconds"])
        else:
            outcome = loop.closed(command["seconds"], command.get("most"))
    finally:
        loop.close()
    return outcome.document()


def asked(command):
    """The exchange. Raises LookupError."""
    if command["operation"] == "download":
        return exchanges.download(command["path"], command["n"])
    work = exchanges.Work(command["operation"], command["n"])
    found = exchanges.exchange(command["protocol"], work, lambda exchange: once(command["address"], exchange))
    return exchanges.with_key(found, command["api_key"]) if command.get("api_key") else found


if __name__ == "__main__":
    driver.serve(run)
