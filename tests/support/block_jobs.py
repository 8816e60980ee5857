"""Blocks of large products that workers were sent, and their answers."""

from __future__ import annotations

SIDE = 16
"""Rows and columns of a block."""


def sent(fake, worker=None):
    """Numbers of the blocks that workers were sent, in order."""
    works = [(to.id, work) for to, works in fake.sent for work in works]
    return [work.block.index for to, work in works if work.block is not None and worker in {None, to}]


def run(fake, most=10**6):
    """Has workers answer in turns until none has anything; return how many answers that were."""
    count = 0
    while count < most and (busy := [worker.id for worker in fake.workers() if worker.tasks]):
        for name in busy:
            fake.done(name)
            count += 1
    return count
