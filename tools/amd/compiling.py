"""HIP sources for AMD architectures to `Compiled`: registers, shared memory, spills, instructions. Without a device."""

from __future__ import annotations

import hashlib
import json
import subprocess
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from amd import toolchain
from amd.codeobject import CodeObject, Usage
from gemmserve_kernels.device.compiler import ROCM_OPTIONS

if TYPE_CHECKING:
    from types import TracebackType

_HERE: Final = Path(__file__).parent


class CompileError(RuntimeError):
    """A source did not compile; the message is the compiler's log."""


@dataclass(frozen=True)
class Compiled:
    """One kernel: what it takes, and how often it has each instruction, by mnemonic."""

    usage: Usage
    instructions: dict[str, int]


class Session:
    """A process of the compiler, and a cache of what it has compiled."""

    def __init__(self, root: Path, cache: Path | None = None) -> None:
        self._stamp = toolchain.packages(root)
        self._cache = cache or root.parent / "amd-compiled"
        self._cache.mkdir(parents=True, exist_ok=True)
        self._folder = tempfile.TemporaryDirectory(prefix="gemmserve-amd-")
        libraries = [str(toolchain.library(root, name)) for name in ("libhiprtc.so.7", "libLLVM.so.*")]
        self._process = subprocess.Popen(
            [*toolchain.command(root), str(_HERE / "worker.py"), *libraries],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.compiled = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._folder.cleanup()

    def compile(self, text: str, name: str, arch: str) -> dict[str, Compiled]:
        """The kernels of a source by name. Raises CompileError."""
        key = "\0".join([text, arch, *ROCM_OPTIONS, self._stamp, _code_digest()])
        kept = self._cache / f"{name}-{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"
        if kept.is_file():
            found = json.loads(kept.read_text(encoding="utf-8"))
        else:
            found = self._compile(text, name, arch)
            temporary = kept.with_suffix(f".{id(self)}")
            temporary.write_text(json.dumps(found), encoding="utf-8")
            temporary.rename(kept)
        return {kernel: Compiled(Usage(**each["usage"]), each["instructions"]) for kernel, each in found.items()}

    def _compile(self, text: str, name: str, arch: str) -> dict[str, Any]:
        folder = Path(self._folder.name)
        source, output = folder / "source.hip", folder / "kernel.co"
        source.write_text(text, encoding="utf-8")
        options = [f"--gpu-architecture={arch}", *ROCM_OPTIONS]
        answer = self._ask(source=str(source), name=f"{name}.cu", options=options, output=str(output))
        if answer["error"]:
            raise CompileError(f"{name} for {arch}: {answer['error']}\n{answer['log']}")
        self.compiled += 1
        code = CodeObject(output.read_bytes())
        return {
            kernel: {"usage": asdict(usage), "instructions": self._count(code.code(kernel), arch)}
            for kernel, usage in code.kernels.items()
        }

    def _count(self, code: bytes, arch: str) -> dict[str, int]:
        binary = Path(self._folder.name) / "kernel.bin"
        binary.write_bytes(code)
        counts: dict[str, int] = {}
        for line in self._ask(code=str(binary), arch=arch)["lines"]:
            mnemonic = line.split()[0] if line else ""
            counts[mnemonic] = counts.get(mnemonic, 0) + 1
        return counts

    def _ask(self, **request: Any) -> dict[str, Any]:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(json.dumps(request) + "\n")
        stdin.flush()
        line = stdout.readline()
        if not line:
            raise RuntimeError(f"the compiler's process has ended (exit status {self._process.wait(60)})")
        answer: dict[str, Any] = json.loads(line)
        return answer


def _code_digest() -> str:
    """Return the digest of what reads code objects: results of another version of it are not taken."""
    files = ("worker.py", "codeobject.py", "compiling.py")
    return hashlib.sha256(b"\0".join((_HERE / name).read_bytes() for name in files)).hexdigest()
