"""Compiles HIP sources and disassembles what comes out; runs with the libraries of `toolchain`, without a device.

worker.py HIPRTC LLVM: the two libraries. Reads a request a line, JSON, from standard input, answers each with a line:

    {"source": PATH, "name": NAME, "options": [...], "output": PATH}  ->  {"log": TEXT, "error": TEXT or null}
    {"code": PATH, "arch": "gfx942"}                                  ->  {"lines": [TEXT, ...]}

The standard library alone: it may be another machine's libraries that this Python finds itself among.
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path
from typing import Any


class Compiler:
    """HIPRTC (AMD, HIP RTC API reference)."""

    def __init__(self, path: str) -> None:
        self._rtc = ctypes.CDLL(path)
        self._rtc.hiprtcGetErrorString.restype = ctypes.c_char_p

    def compile(self, source: bytes, name: str, options: list[str]) -> tuple[bytes, str, str | None]:
        """(code object, log, error or None)."""
        rtc, program, size = self._rtc, ctypes.c_void_p(), ctypes.c_size_t()
        self._check(rtc.hiprtcCreateProgram(ctypes.byref(program), source, name.encode(), 0, None, None))
        try:
            words = [option.encode() for option in options]
            result = rtc.hiprtcCompileProgram(program, len(words), (ctypes.c_char_p * len(words))(*words))
            self._check(rtc.hiprtcGetProgramLogSize(program, ctypes.byref(size)))
            log = ctypes.create_string_buffer(size.value + 1)
            self._check(rtc.hiprtcGetProgramLog(program, log))
            text = log.value.decode(errors="replace")
            if result:
                return b"", text, rtc.hiprtcGetErrorString(result).decode()
            self._check(rtc.hiprtcGetCodeSize(program, ctypes.byref(size)))
            code = ctypes.create_string_buffer(size.value)
            self._check(rtc.hiprtcGetCode(program, code))
            return code.raw, text, None
        finally:
            rtc.hiprtcDestroyProgram(ctypes.byref(program))

    def _check(self, code: int) -> None:
        if code:
            raise RuntimeError(self._rtc.hiprtcGetErrorString(code).decode())


class Disassembler:
    """LLVM's (llvm-c/Disassembler.h)."""

    def __init__(self, path: str) -> None:
        self._llvm = llvm = ctypes.CDLL(path)
        for part in ("TargetInfo", "Target", "TargetMC", "Disassembler"):
            getattr(llvm, f"LLVMInitializeAMDGPU{part}")()
        llvm.LLVMCreateDisasmCPU.restype = ctypes.c_void_p
        llvm.LLVMCreateDisasmCPU.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int] + [
            ctypes.c_void_p
        ] * 2
        llvm.LLVMDisasmInstruction.restype = ctypes.c_size_t
        llvm.LLVMDisasmInstruction.argtypes = [
            ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_char_p, ctypes.c_size_t,
        ]  # fmt: skip
        self._contexts: dict[str, Any] = {}

    def lines(self, code: bytes, arch: str) -> list[str]:
        """The instructions; data between them as bytes."""
        if arch not in self._contexts:
            context = self._llvm.LLVMCreateDisasmCPU(b"amdgcn-amd-amdhsa", arch.encode(), None, 0, None, None)
            if not context:
                raise RuntimeError(f"LLVM has no disassembler for {arch}")
            self._contexts[arch] = context
        memory, text = ctypes.create_string_buffer(code, len(code)), ctypes.create_string_buffer(256)
        start, at, found = ctypes.addressof(memory), 0, []
        while at < len(code):
            left = len(code) - at
            size = self._llvm.LLVMDisasmInstruction(self._contexts[arch], start + at, left, at, text, len(text))
            found.append(text.value.decode().strip() if size else f".byte {code[at]:#x}")
            at += size or 1
        return found


def main() -> None:
    """Answers until standard input ends."""
    compiler, disassembler = Compiler(sys.argv[1]), Disassembler(sys.argv[2])
    for line in sys.stdin:
        request = json.loads(line)
        answer: dict[str, Any]
        if "code" in request:
            answer = {"lines": disassembler.lines(Path(request["code"]).read_bytes(), request["arch"])}
        else:
            source = Path(request["source"]).read_bytes()
            code, log, error = compiler.compile(source, request["name"], request["options"])
            Path(request["output"]).write_bytes(code)
            answer = {"log": log, "error": error}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
