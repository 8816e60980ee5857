"""`gemm` on the GPU's path, every address and argument of it, with the CPU shim in the place of the driver."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "support" / "shim_driver.py"
CHECKS = re.findall(r"^def (check_\w+)", SCRIPT.read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    environment = {**os.environ, "GEMMSERVE_KERNEL_CACHE": str(tmp_path_factory.mktemp("kernels"))}
    run = subprocess.run(
        [sys.executable, str(SCRIPT)], env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.mark.parametrize("check", CHECKS)
def test_the_gpu_path(outcomes, check):
    assert outcomes[check] is None, outcomes[check]
