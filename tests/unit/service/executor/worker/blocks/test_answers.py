"""The answer of a large product: sums, the largest residual, the first wait."""

from __future__ import annotations

from gemmserve_service.executor.protocol import Done
from gemmserve_service.executor.worker.blocks.answers import whole_answer
from gemmserve_service.schemas import Elements, Timings


def done(number: int, **fields) -> Done:
    timings = Timings(queue_s=number, h2d_s=1.0, kernel_s=2.0, d2h_s=0.5, compile_s=0.25, verify_s=4.0)
    return Done(task=f"t/{number}", algorithm="numpy", timings=timings, **fields)


def test_of_several_blocks() -> None:
    blocks = [
        done(7, residual=0.25, elements=Elements(planned=3, wide=1)),
        done(8, residual=0.5, mismatch=0.125, elements=Elements(planned=2, plain=1)),
        done(9),
    ]
    found = whole_answer(blocks)
    assert found.timings == Timings(queue_s=7, h2d_s=3.0, kernel_s=6.0, d2h_s=1.5, compile_s=0.75, verify_s=12.0)
    assert (found.residual, found.mismatch, found.task) == (0.5, 0.125, "t/9")
    assert found.elements == Elements(planned=5, wide=1, plain=1)


def test_of_blocks_that_were_neither_checked_nor_counted() -> None:
    found = whole_answer([done(1), done(2)])
    assert (found.residual, found.mismatch, found.elements) == (None, None, None)
