"""`make demo`: starts the service, runs two real workloads through the SDK, checks both against an independent truth.

Ends with status 0 when every error is within its bound, 1 when one is not. Draws the beamformer's power map into
demo-output/power-map.png.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import beamforming
import picture
import qft
from local_server import LocalServer
from truth import TruthError

from gemmserve import Client


def describe(client: Client) -> None:
    """Prints what the server computes with."""
    for device in client.devices():
        print(f"device {device['id']}: {device['spec']['name']}, compute modes {', '.join(device['compute_modes'])}")


def report(client: Client, seconds: float, jobs: int) -> None:
    """Prints the time of a workload and the algorithms that its jobs ran."""
    algorithms = sorted({job.info.algorithm or "unknown" for job in client.jobs(limit=jobs)})
    print(f"  {seconds:.2f} s from the first byte up to the last check; algorithm: {', '.join(algorithms)}\n")


def main() -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--qubits", type=int, default=9, help="of the Fourier transform (default 9)")
    parser.add_argument("--output", type=Path, default=Path("demo-output"), help="folder for the picture")
    options = parser.parse_args()

    began = time.perf_counter()
    with LocalServer() as server, Client(server.url) as client:
        print(f"gemmserve at {server.url}, ready after {time.perf_counter() - began:.1f} s")
        describe(client)
        print()
        try:
            start = time.perf_counter()
            qft.main(client, options.qubits)
            report(client, time.perf_counter() - start, 20)

            start = time.perf_counter()
            power_map = beamforming.main(client)
            report(client, time.perf_counter() - start, 1)
        except TruthError as error:
            print(f"\nFAILED: {error}", file=sys.stderr)
            return 1
    path = options.output / "power-map.png"
    picture.draw(power_map, beamforming.DIRECTIONS, path)
    print(f"picture: {path}\nall errors within their bounds; {time.perf_counter() - began:.1f} s in all")
    return 0


if __name__ == "__main__":
    sys.exit(main())
