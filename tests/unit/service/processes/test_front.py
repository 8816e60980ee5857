"""The front's process: what it loads."""

from __future__ import annotations

import subprocess
import sys

FURTHER = (
    "ray",
    "obstore",
    "gemmserve_service.executor.agent",
    "gemmserve_service.executor.composed",
    "gemmserve_service.executor.join_protocol",
    "gemmserve_service.executor.joined",
    "gemmserve_service.processes.ray.bridge",
    "gemmserve_service.store.tier.tier",
)
"""What only servers with other hosts, cells or a tier need."""


def test_a_server_of_one_host_loads_nothing_of_what_others_need():
    code = f"import sys, gemmserve_service.processes.front\nprint(*[name for name in {FURTHER} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
