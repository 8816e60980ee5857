"""Counts and durations of a model's inferences since the server's start, as the statistics extension tells them."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from gemmserve_service.http.inference.messages import Duration, InferenceStatistics, ModelStatistics
from gemmserve_service.http.inference.paths import VERSION
from gemmserve_service.runtime import clock

if TYPE_CHECKING:
    from gemmserve_service.schemas import Timings


class Counts:
    """Counts of one model, everybody's inferences together; belongs to the event loop's thread."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._count: Counter[str] = Counter()
        self._ns: Counter[str] = Counter()
        self._last_ms = 0

    def succeeded(self, seconds: float, timings: Timings) -> None:
        """Count an inference that took `seconds` from its head to its result."""
        self._last_ms = int(clock.time() * 1e3)
        self._add("success", seconds)
        self._add("queue", timings.queue_s)
        self._add("compute_input", timings.h2d_s)
        self._add("compute_infer", timings.compile_s + timings.kernel_s + timings.verify_s)
        self._add("compute_output", timings.d2h_s)

    def failed(self, seconds: float) -> None:
        """Count one that was refused, failed, or whose client hung up."""
        self._add("fail", seconds)

    def statistics(self) -> ModelStatistics:
        """The counts as they are answered."""
        phases = {
            name: Duration(count=self._count[name], ns=self._ns[name]) for name in InferenceStatistics.model_fields
        }
        done = self._count["success"]
        return ModelStatistics(
            name=self._model,
            version=VERSION,
            last_inference=self._last_ms,
            inference_count=done,
            execution_count=done,
            inference_stats=InferenceStatistics(**phases),
            batch_stats=[],
        )

    def _add(self, phase: str, seconds: float) -> None:
        self._count[phase] += 1
        self._ns[phase] += int(seconds * 1e9)
