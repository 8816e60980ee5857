"""What `wheel` runs among ROCm's libraries: imports CuPy, compiles, asks for a device. Arguments: import paths."""

from __future__ import annotations

import json
import sys

sys.path[:0] = sys.argv[1:]


def main() -> int:
    """Prints what happens; 1 where CuPy's path is not what it is expected to be."""
    import cupy

    from amd.codeobject import CodeObject
    from gemmserve_kernels import gemm
    from gemmserve_kernels.device import compiler
    from gemmserve_kernels.device.spec import DeviceSpec

    runtime = cupy.cuda.runtime
    print(f"CuPy {cupy.__version__} is imported, for ROCm: {runtime.is_hip}; HIP {runtime.runtimeGetVersion()}")
    for each in json.load(sys.stdin):
        code = compiler.compile_rocm(each["text"], each["arch"], name=each["name"])
        usage = CodeObject(code).kernels[each["entry"]]
        print(f"{each['arch']} {each['label']}: {len(code)} bytes through CuPy's HIPRTC, {usage.vgpr} registers")
    try:
        print(f"{runtime.getDeviceCount()} devices")
    except runtime.CUDARuntimeError as error:
        print(f"it stops at the device: {error}")
    ours = DeviceSpec.all()
    print(f"devices that we find: {ours}; products of NumPy arrays still work: {gemm([[2.0]], [[3.0]])}")
    return 0 if runtime.is_hip and not ours else 1


if __name__ == "__main__":
    sys.exit(main())
