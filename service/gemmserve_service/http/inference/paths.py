"""Paths, models and priorities of the protocol, also for those who look at a request before its route is found."""

from __future__ import annotations

from typing import Final

MODELS: Final = ("gemm", "gemm_reduce")
VERSION: Final = "1"
"""Version of every model; a path without one means it."""
INPUTS: Final = {"gemm": ("a", "b", "c"), "gemm_reduce": ("a", "b")}
"""Inputs of each model; c may be left out."""
PRIORITIES: Final = 201
"""Priorities of the protocol: 1, the highest, to this one."""
DEFAULT_PRIORITY: Final = 101

INFER: Final = {
    f"/v2/models/{model}{version}/infer": model for model in MODELS for version in ("", f"/versions/{VERSION}")
}
"""Model by path that tensors are sent to."""


def is_inference(path: str) -> bool:
    """Whether what is there is answered in the protocol's forms, errors too."""
    return path == "/v2" or path.startswith("/v2/")
