"""The slugs are public: problem types of the service are made of them."""

from __future__ import annotations

import pytest

from gemmserve_kernels.problem import errors


@pytest.mark.parametrize(
    ("kind", "slug", "base"),
    [
        (errors.ShapeMismatch, "shape-mismatch", ValueError),
        (errors.DtypeUnsupported, "dtype-unsupported", ValueError),
        (errors.ComputeUnsupported, "compute-unsupported", ValueError),
        (errors.ParameterInvalid, "parameter-invalid", ValueError),
        (errors.ConfigInfeasible, "config-infeasible", ValueError),
        (errors.DeviceError, "device-error", RuntimeError),
        (errors.OutOfDeviceMemory, "out-of-device-memory", errors.DeviceError),
    ],
)
def test_slugs_and_bases(kind, slug, base):
    error = kind("why")
    assert (error.slug, str(error)) == (slug, "why")
    assert isinstance(error, base)


def test_details_travel_with_the_error():
    assert errors.ComputeUnsupported("no", ("auto", "fp32")).available == ["auto", "fp32"]
    assert errors.ParameterInvalid("no", "alpha").parameter == "alpha"
