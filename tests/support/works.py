"""Tasks as a worker runs them, to and from what the front sends."""

from __future__ import annotations

from gemmserve_service.executor import protocol
from gemmserve_service.executor.protocol import Form, Kind, Part, RunBatch, Work, row_without_place
from gemmserve_service.executor.worker.host.backend import CpuBackend
from gemmserve_service.executor.worker.runner import Runner
from gemmserve_service.executor.worker.unpack import Run


def form_of(params, operands, results):
    """The JSON of a form, whose arrays are like those given: anything that has dtype, shape and order."""
    kinds = [
        {name: Kind(dtype=array.dtype, shape=array.shape, order=array.order) for name, array in side.items()}
        for side in (operands, results)
    ]
    return Form(params=params, operands=kinds[0], results=kinds[1]).model_dump_json()


def packed(*runs):
    """What the front sends of tasks of one product each."""
    works = []
    for run in runs:
        rows, sides = [], []
        for refs in (run.operands, run.results):
            sides.append(places := {})
            for name, ref in refs.items():
                row = (ref.extent, ref.path, ref.capacity, 0, ref.cache_id)
                if ref.placeless:
                    row = row_without_place(ref.cache_id)
                somewhere = row[0] is not None
                if somewhere and row not in rows:
                    rows.append(row)
                places[name] = [(rows.index(row), ref.offset) if somewhere else (-1, 0)]
        form = form_of(run.params, run.operands, run.results)
        part = Part(form=form, algorithm=run.algorithm, operands=sides[0], results=sides[1])
        works.append(
            Work(
                task=run.task,
                extents=rows,
                parts=[part],
                verify=run.verify,
                defer=run.defer,
                express=run.express,
                block=run.block,
            )
        )
    return RunBatch(tasks=works)


def unpacked(batch):
    """The tasks of a message; those of many products as they were sent."""
    runner = Runner(CpuBackend())
    return [runner.unpacked(work) for work in batch.tasks]


def encode(message):
    """One frame, of a message or of a task of one product."""
    return protocol.encode(packed(message) if isinstance(message, Run) else message)
