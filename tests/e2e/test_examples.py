"""Every example against the real server, and proof that their checks can fail."""

from __future__ import annotations

import importlib
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from truth import TruthError, check, relative_error

EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = [
    "attention_max", "beamforming", "bias_gradient", "channel_equalisation", "frequency_filter", "grover", "mvdr",
    "qft", "quantum_circuit", "quantum_walk",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_example_meets_its_truth(client, name, capsys) -> None:
    importlib.import_module(name).main(client)
    assert "error" in capsys.readouterr().out


def test_every_example_is_run() -> None:
    scripts = {path.stem for path in EXAMPLES.glob("*.py") if "def main(client" in path.read_text()}
    assert scripts == set(NAMES)


def test_an_example_runs_as_a_script(server) -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLES / "bias_gradient.py", server.url], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "bound" in done.stdout


def test_a_circuit_without_its_swaps_is_not_the_transform(client, monkeypatch) -> None:
    import qft

    monkeypatch.setattr(qft, "swap", lambda n, first, second: np.eye(2**n))
    with pytest.raises(TruthError, match="circuit"):
        qft.main(client, qubits=4)


def test_a_walk_with_a_wrong_propagator_is_noticed(client, monkeypatch) -> None:
    import quantum_walk

    exact = quantum_walk.propagator
    monkeypatch.setattr(quantum_walk, "propagator", lambda sites, time: exact(sites, time * (1 + 1e-9)))
    with pytest.raises(TruthError, match="t ="):
        quantum_walk.main(client, sites=32, doublings=6)


def test_a_search_with_another_oracle_is_noticed(client, monkeypatch) -> None:
    import grover

    monkeypatch.setattr(grover, "oracle", lambda size, marked: np.diag(np.where(np.arange(size) == 3, -1.0, 1.0)))
    with pytest.raises(TruthError, match="found 3"):
        grover.main(client, qubits=5, marked=7)
    monkeypatch.undo()
    exact = grover.diffusion
    monkeypatch.setattr(grover, "diffusion", lambda size: exact(size) * 1.001)
    with pytest.raises(TruthError, match="rotation"):
        grover.main(client, qubits=5, marked=7)


def test_an_amplitude_of_another_circuit_is_noticed(client, monkeypatch) -> None:
    import quantum_circuit

    exact = quantum_circuit.on_this_machine
    monkeypatch.setattr(
        quantum_circuit, "on_this_machine", lambda tensors, *others: exact([tensors[0] * 1.0001, *tensors[1:]], *others)
    )
    with pytest.raises(TruthError, match="amplitude"):
        quantum_circuit.main(client, rows=2, columns=3, layers=5)


def test_a_wrong_direction_is_noticed(client, monkeypatch) -> None:
    import beamforming

    monkeypatch.setattr(beamforming, "peaks", lambda angles, power, count: np.array([-48.0, -12.0, 7.0, 40.0]))
    with pytest.raises(TruthError, match="direction"):
        beamforming.main(client, bins=2, count=128)


@pytest.mark.parametrize("error", [1.1, math.inf, math.nan])
def test_check_refuses(error) -> None:
    with pytest.raises(TruthError):
        check("this", error, 1.0)


def test_relative_error() -> None:
    assert relative_error(np.array([3.0, 4.0]), np.array([3.0, 5.0])) == pytest.approx(1 / math.sqrt(34))


@pytest.mark.slow
def test_the_demo(tmp_path) -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLES / "demo.py", "--output", tmp_path],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "QFT of 9 qubits" in done.stdout
    assert "-48.00, -12.00, +7.00, +33.00" in done.stdout
    assert "algorithm: " in done.stdout
    picture = (tmp_path / "power-map.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 50_000  # drawn, not blank


@pytest.mark.slow
def test_the_demo_fails_when_the_truth_is_missed(tmp_path) -> None:
    """Numbers that are off by a part in a thousand must not pass: here the gates are bent that much."""
    script = tmp_path / "bent.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(EXAMPLES)!r})\n"
        "import qft, demo\n"
        "exact = qft.hadamard\n"
        "qft.hadamard = lambda n, qubit: exact(n, qubit) * 1.001\n"
        f"sys.argv = ['demo', '--qubits', '4', '--output', {str(tmp_path)!r}]\n"
        "sys.exit(demo.main())\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "exceeds its bound" in done.stderr
