"""Structures read from the device code: laid out as the compiler has them."""

from __future__ import annotations

import ctypes

import pytest

from gemmserve_kernels.algorithms.mfma.plan import MfmaParams
from gemmserve_kernels.algorithms.mma.plan import MmaParams
from gemmserve_kernels.algorithms.ozaki.params import ConvertParams, MultiplyParams, RemainderParams, ScaleParams
from gemmserve_kernels.algorithms.small.gemm import SmallParams
from gemmserve_kernels.algorithms.splits.flags import FlagParams
from gemmserve_kernels.algorithms.splits.split import SplitParams
from gemmserve_kernels.algorithms.wgmma.plan import WgmmaParams
from gemmserve_kernels.device.compiler import compile_cuda, flattened
from gemmserve_kernels.device.struct_params import CombineParams, GemmReduceParams, MatrixParams
from gemmserve_kernels.device.structures import device_struct

DECLARED = {
    "common/params.cuh": (CombineParams, GemmReduceParams),
    "epilogue/flags.cuh": (FlagParams,),
    "mfma/params.cuh": (MfmaParams,),
    "mma/params.cuh": (MmaParams,),
    "ozaki/params.cuh": (ConvertParams, MultiplyParams, RemainderParams, ScaleParams),
    "small/params.cuh": (SmallParams,),
    "splits/params.cuh": (SplitParams,),
    "wgmma/params.cuh": (WgmmaParams,),
}


@pytest.mark.parametrize("path", DECLARED)
def test_fields_lie_where_the_compiler_puts_them(nvrtc, path):
    facts = []
    for cls in DECLARED[path]:
        facts.append(f"sizeof({cls.__name__}) == {ctypes.sizeof(cls)}")
        for name, *_ in cls._fields_:
            if name != "padding":
                place = f"__INTADDR__(&((({cls.__name__}*)0)->{name.removesuffix('_')}))"
                facts.append(f"{place} == {getattr(cls, name).offset}")
    assert len(facts) > 3
    compile_cuda(flattened(path) + "".join(f'\nstatic_assert({fact}, "{fact}");' for fact in facts), "sm_90a")


def test_nested_structures_are_the_classes_of_their_names():
    assert dict(GemmReduceParams._fields_)["gemm"]._fields_[0] == ("a", MatrixParams)


def test_what_is_not_declared_is_refused():
    with pytest.raises(ValueError, match="no structure Missing"):
        device_struct("common/params.cuh")(type("Missing", (ctypes.Structure,), {}))
