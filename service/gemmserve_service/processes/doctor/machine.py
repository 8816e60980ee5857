"""Findings of the doctor's checks, and the machine that they look at."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

Level = Literal["ok", "note", "error"]


@dataclass(frozen=True)
class Finding:
    """One line: what was looked at, how it is, and what to do about it.

    An "error" is what keeps a server from running here, or from using a device that is here.
    """

    level: Level
    subject: str
    text: str
    advice: str = ""

    def __str__(self) -> str:
        mark = {"ok": "ok   ", "note": "note ", "error": "ERROR"}[self.level]
        advice = f"\n        {self.advice}" if self.advice else ""
        return f"{mark} {self.subject:<12} {self.text}{advice}"

    def as_dict(self) -> dict[str, str]:
        """Return the fields for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Machine:
    """The parts of a machine that checks look at; another `root` and `environment` make another machine of it."""

    root: Path = Path("/")
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)

    def path(self, name: str) -> Path:
        """An absolute path below the root."""
        return self.root / name.lstrip("/")

    def exists(self, name: str) -> bool:
        """Whether there is such a file, device or folder."""
        return self.path(name).exists()

    def read(self, name: str) -> str | None:
        """A file's text; None where it cannot be read."""
        try:
            return self.path(name).read_text(errors="replace")
        except OSError:
            return None

    def usable(self, name: str) -> bool:
        """Whether this user may read and write it."""
        return os.access(self.path(name), os.R_OK | os.W_OK)

    def group_of(self, name: str) -> int:
        """The number of the group that a file or device belongs to."""
        return self.path(name).stat().st_gid

    def which(self, program: str) -> str | None:
        """Return where on the path a program lies."""
        return shutil.which(program, path=self.environment.get("PATH"))

    def run(self, *command: str) -> tuple[int, str]:
        """Status and output of a program that `which` finds; what cannot be started has status 127."""
        try:
            done = subprocess.run(  # noqa: S603 (fixed commands)
                [self.which(command[0]) or command[0], *command[1:]],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=30,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return 127, str(error)
        return done.returncode, done.stdout.strip()

    def version(self, package: str) -> str | None:
        """The version of an installed Python package."""
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return None

    @property
    def container(self) -> bool:
        """Whether this is the inside of a container."""
        return (
            self.exists("/.dockerenv")
            or self.exists("/run/.containerenv")
            or "KUBERNETES_SERVICE_HOST" in self.environment
        )
