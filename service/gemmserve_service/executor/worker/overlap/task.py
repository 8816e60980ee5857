"""A task of a lane, stage after stage: what all kinds of them have."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gemmserve_service.executor.protocol import Done, Failed, Work
    from gemmserve_service.executor.worker.runner import Runner
    from gemmserve_service.executor.worker.unpack import Run


class NoRoomBesideError(Exception):
    """An express task found too little memory: it has to wait its turn among the others."""


class Task:
    """One task of the pipeline."""

    def __init__(self, runner: Runner, message: Run | Work) -> None:
        self.runner = runner
        self.message = message
        self.name = message.task
        self.answer: Done | Failed | None = None
        self.answered = False
        """Whether the front has been told already."""
        self.compile_s = 0.0
        """Seconds for which it has waited for the compiler before it came here."""

    @property
    def loaded(self) -> bool:
        """Whether there is nothing to bring."""
        return False

    @property
    def prompt(self) -> bool:
        """Whether little or nothing is left to wait for."""
        return True

    @property
    def light(self) -> bool:
        """Whether it holds nothing that was brought for it."""
        return False

    @property
    def over(self) -> bool:
        """Whether `finish` need not wait."""
        return True

    @property
    def tiny(self) -> bool:
        """Whether it takes no longer than to wake a thread, and waits for nothing that the front has yet to say."""
        return False

    @property
    def brief(self) -> bool:
        """Whether little or nothing is to be stored."""
        return True

    def load(self) -> None:
        """Do nothing."""

    def compute(self) -> None:
        """Do nothing."""

    def finish(self) -> None:
        """Do nothing."""

    def store(self) -> None:
        """Do nothing."""

    def release(self) -> None:
        """Do nothing: nothing is held."""
