"""A server whose commits wait: none is begun while the file that GEMMSERVE_TEST_HOLD names is there.

This folder on PYTHONPATH makes every Python process import it at its start; only the front has a database.
"""

import importlib.abc
import importlib.util
import os
import sys
import time
from pathlib import Path

_HELD = "gemmserve_service.store.database.database"
_FILE = os.environ.get("GEMMSERVE_TEST_HOLD", "")


class _Finder(importlib.abc.MetaPathFinder):
    """Puts a wait before the module's `_commit`, once it is there, and has nothing committed past it meanwhile."""

    def find_spec(self, name, path=None, target=None):
        if name != _HELD:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            commit, at_once = module._commit, module._commit_at_once

            def wait(connection, batch):
                while Path(_FILE).exists():
                    time.sleep(0.01)
                return commit(connection, batch)

            module._commit = wait
            module._commit_at_once = lambda *given: None if Path(_FILE).exists() else at_once(*given)

        spec.loader.exec_module = exec_module
        return spec


if _FILE:
    sys.meta_path.insert(0, _Finder())
