"""A worker that stands still in the middle of its work while the file is there that GEMMSERVE_TEST_GATE names.

It stands at the points where a worker looks whether it is to go on, and still looks: heartbeats, cancellations and the
front's end reach it. The file holds how many of these points are passed first; beside it, with ".reached" added to its
name, a file says that a worker stands there. This folder on PYTHONPATH makes every Python process import it at its
start; only workers have such points. `gates.Gate` is the test's side of it.
"""

import importlib.abc
import importlib.util
import os
import sys

from held_gate import HeldGate

_MODULE = "gemmserve_service.executor.worker.runner"
_FILE = os.environ.get("GEMMSERVE_TEST_GATE", "")


class _Finder(importlib.abc.MetaPathFinder):
    """Puts the gate behind the runner's checkpoint, once it is there."""

    def find_spec(self, name, path=None, target=None):
        if name != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            checkpoint, gate = module.Runner._checkpoint, HeldGate(_FILE)

            def held(runner):
                checkpoint(runner)
                gate.stand(lambda: checkpoint(runner))

            module.Runner._checkpoint = held

        spec.loader.exec_module = exec_module
        return spec


if _FILE:
    sys.meta_path.insert(0, _Finder())
