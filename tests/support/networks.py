"""Network namespaces joined to this one by links that are slow, or cut, when a test wants: ip and tc, as root.

with Network(bits_per_s=1e9) as node:
    node.run([...])         # a process on the other host
    node.cut(); node.mend()

This machine is `node.here`, the other host `node.there`. A link that is cut loses every frame without a word, either
way or one way, as a cable or a switch does: connections stay, and nobody is told.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from functools import cache
from typing import TYPE_CHECKING, Literal, Self

if TYPE_CHECKING:
    from collections.abc import Sequence

Way = Literal["both", "from_node", "to_node"]

_NOWHERE = "02:00:00:00:00:66"
"""Hardware address that neither end has: what is sent to it arrives at nobody."""
_BURST_BYTES = 1 << 18
_LINKS = 1 << 12


class NetworkMissingError(RuntimeError):
    """No namespace can be had here; the message says why."""


@cache
def missing() -> str | None:
    """Why there can be no such network here, or None."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for command in ("ip", "tc"):
        if shutil.which(command) is None:
            return f"network namespaces need {command}, of iproute2"
    try:
        with Network(bits_per_s=1e9):
            return None
    except NetworkMissingError as error:
        return f"no network namespace can be had: {error}"


class Network:
    """One other host, by a link of its own: a namespace, joined by veth with a token bucket (`tbf`) at both ends.

    The number of a link is that of its interface, whose name can be made once: of two processes that ask for the same
    at a time, one gets another. Raises NetworkMissingError where the machine has no such.
    """

    def __init__(self, *, bits_per_s: float | None = None) -> None:
        self._bits_per_s = bits_per_s

    def __enter__(self) -> Self:
        self._number = self._make()
        # 198.18.0.0/15 is for measurements between networks, and in nobody's (RFC 2544).
        base = 4 * self._number
        self.here, self.there = (f"198.{18 + (base >> 16)}.{base >> 8 & 255}.{(base & 255) + last}" for last in (1, 2))
        try:
            _ip("addr", "add", f"{self.here}/30", "dev", self._near)
            _ip("link", "set", self._near, "up")
            for words in (("link", "set", "lo", "up"), ("addr", "add", f"{self.there}/30", "dev", self._far)):
                _ip("-n", self.name, *words)
            _ip("-n", self.name, "link", "set", self._far, "up")
            if self._bits_per_s is not None:
                self.limit(self._bits_per_s)
            # Both know each other's address from now on: it is by these entries that the link is cut.
            self._addresses = self._address(self._near), self._address(self._far, there=True)
            self.mend()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        subprocess.run(["ip", "link", "del", self._near], capture_output=True, check=False)
        subprocess.run(["ip", "netns", "del", self.name], capture_output=True, check=False)

    def limit(self, bits_per_s: float) -> None:
        """Sets the link's rate, each way."""
        rate = ["root", "tbf", "rate", f"{bits_per_s:.0f}bit", "burst", str(_BURST_BYTES), "latency", "20ms"]
        _call("tc", "qdisc", "replace", "dev", self._near, *rate)
        _call("tc", "-n", self.name, "qdisc", "replace", "dev", self._far, *rate)

    def command(self, command: Sequence[str]) -> list[str]:
        """The command that runs it on the other host. Its process is that of `command` itself."""
        return ["ip", "netns", "exec", self.name, *command]

    def route_back(self) -> None:
        """Has the other host reach every address of this one, not only `here`."""
        _ip("-n", self.name, "route", "replace", "default", "via", self.here)

    def cut(self, way: Way = "both") -> None:
        """Loses every frame from now on, that way: the node's, those to the node, or both."""
        if way in {"both", "to_node"}:
            _ip("neigh", "replace", self.there, "lladdr", _NOWHERE, "nud", "permanent", "dev", self._near)
        if way in {"both", "from_node"}:
            _ip(
                "-n", self.name, "neigh", "replace", self.here, "lladdr", _NOWHERE, "nud", "permanent", "dev", self._far
            )

    def mend(self) -> None:
        """Loses none from now on."""
        near, far = self._addresses
        _ip("neigh", "replace", self.there, "lladdr", far, "nud", "permanent", "dev", self._near)
        _ip("-n", self.name, "neigh", "replace", self.here, "lladdr", near, "nud", "permanent", "dev", self._far)

    @property
    def name(self) -> str:
        """Name of the namespace."""
        return f"gemmserve{self._number}"

    @property
    def _near(self) -> str:
        return f"gsn{self._number}"

    @property
    def _far(self) -> str:
        return f"gsf{self._number}"

    def _make(self) -> int:
        said = ""
        for number in (os.getpid() + offset for offset in range(64)):
            self._number = number % _LINKS
            veth = ["ip", "link", "add", self._near, "type", "veth", "peer", "name", self._far]
            made = subprocess.run(veth, capture_output=True, text=True, check=False)
            if made.returncode:
                said = made.stderr.strip()
                if "exists" in said:
                    continue
                raise NetworkMissingError(said)
            try:
                # A namespace of that name whose link is gone is nobody's any more.
                subprocess.run(["ip", "netns", "del", self.name], capture_output=True, check=False)
                _ip("netns", "add", self.name)
                _ip("link", "set", self._far, "netns", self.name)
            except BaseException:
                self.__exit__()
                raise
            return self._number
        raise NetworkMissingError(said)

    def _address(self, interface: str, *, there: bool = False) -> str:
        where = ["-n", self.name] if there else []
        (found,) = json.loads(_ip(*where, "-j", "link", "show", "dev", interface))
        return str(found["address"])


def _ip(*words: str) -> str:
    return _call("ip", *words)


def _call(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NetworkMissingError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
