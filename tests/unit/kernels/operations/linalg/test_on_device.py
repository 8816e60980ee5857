"""Linear algebra on the stand-in for CuPy: its calls are CuPy's, nothing mixes with NumPy's arrays."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[4] / "support" / "linalg_device_script.py"


def test_every_operation_on_the_stand_in():
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found.pop("singular") == ["singular-matrix", [2]]
    assert found.pop("singular triangle") == ["singular-matrix", [2]]
    assert found.pop("not positive") == ["not-positive-definite", [3]]
    assert len(found) == 4 * 16
    assert [name for name, (right, undoubted) in found.items() if not (right and undoubted)] == []
