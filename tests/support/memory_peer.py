"""A client of the socket for shared memory, by hand: what it passes, and what it asks for."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import io
import json
import os
import socket
from pathlib import Path

import httpx
import numpy as np
import pytest

from gemmserve.wire import DATA_HEADER, NPY_HEADER, RESULT_HEADER, SESSION_HEADER, format_npy_header

NEEDS_MEMFD = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="shared memory is passed on Linux")

SEAL, SHRINK, GROW, WRITE, FUTURE_WRITE = 1, 2, 4, 8, 16
N = 64
A = np.random.default_rng(5).standard_normal((N, N)).astype(np.float32)
B = np.eye(N, dtype=np.float32) * 2
MEMORY = {"kind": "memory", "number": 1, "offset": 0}


def memory(array=None, *, nbytes=0, seals=0, offset=0):
    """A memfd that holds the array's bytes from `offset` on, or `nbytes` zeros."""
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    data = bytes(nbytes) if array is None else bytes(offset) + array.tobytes()
    os.pwrite(fd, data, 0)
    if seals:
        fcntl.fcntl(fd, 1033, seals)
    return fd


def without_pages(fd, nbytes):
    """Make memory one hole of `nbytes`, with as many pages behind its end (FALLOC_FL_KEEP_SIZE)."""
    os.ftruncate(fd, 0)
    os.ftruncate(fd, nbytes)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
    assert libc.fallocate(fd, 1, nbytes, nbytes) == 0
    assert os.fstat(fd).st_blocks * 512 >= nbytes


def open_memory():
    """How many descriptors of memory from `memory` this process has open, clients and server together."""
    count = 0
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            count += "memfd:test" in str(path.readlink())
    return count


def head(array):
    return format_npy_header(array.dtype, array.shape)


class Peer:
    """A client by hand."""

    def __init__(self, app, key=None):
        self.app = app
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(60)
        self.socket.connect(f"{app.path}.fds")
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self.http = httpx.Client(
            transport=httpx.HTTPTransport(uds=str(app.path)), base_url="http://localhost", timeout=60, headers=headers
        )
        self.send({"kind": "hello", "version": 1, "api_key": key})
        self.welcome = json.loads(self.socket.recv(1 << 16))
        self.secret = self.welcome.get("session", "")
        self.number = 0

    def send(self, frame, *fds):
        data = frame if isinstance(frame, bytes) else json.dumps(frame).encode()
        socket.send_fds(self.socket, [data], fds)

    def share(self, fd, offset=0, *, close=True):
        self.number += 1
        self.send({"kind": "memory", "number": self.number, "offset": offset}, fd)
        if close:
            os.close(fd)
        return self.number

    def gemm(self, **fields):
        """Posts what `form` makes of them."""
        content, headers = self.form(**fields)
        return self.http.post("/v1/gemm", content=content, headers=headers)

    def gemm_by_hand(self, **fields):
        """The same on a socket of its own, which is returned: nobody waits for the answer."""
        content, headers = self.form(**fields)
        lines = [f"{name}: {value}\r\n" for name, value in {**headers, "Content-Length": len(content)}.items()]
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(60)
        connection.connect(str(self.app.path))
        connection.sendall(f"POST /v1/gemm HTTP/1.1\r\nHost: localhost\r\n{''.join(lines)}\r\n".encode() + content)
        return connection

    def form(self, *, shared, plain=(), params=b"{}", result=None, secret=None, **headers):
        """Body and headers. `shared`: name -> (array, number); `plain`: name -> array."""
        body = b'--X\r\nContent-Disposition: form-data; name="params"\r\n\r\n' + params
        for name, (array, number) in shared.items():
            body += b'\r\n--X\r\nContent-Disposition: form-data; name="%s"\r\n' % name.encode()
            body += f"Content-Type: {NPY_HEADER}\r\n{DATA_HEADER}: {number}\r\n\r\n".encode() + head(array)
        for name, array in dict(plain).items():
            body += b'\r\n--X\r\nContent-Disposition: form-data; name="%s"\r\n\r\n' % name.encode()
            body += head(array) + array.tobytes()
        headers["Content-Type"] = "multipart/form-data; boundary=X"
        headers[SESSION_HEADER] = self.secret if secret is None else secret
        if result is not None:
            headers[RESULT_HEADER] = str(result)
        return body + b"\r\n--X--\r\n", headers

    def ended(self):
        try:
            return self.socket.recv(100) == b""
        except ConnectionResetError:
            return True

    def close(self):
        self.socket.close()
        self.http.close()


def array_of(answer):
    assert answer.status_code == 200, answer.text
    return np.load(io.BytesIO(answer.content))


def refused(answer, detail):
    assert (answer.status_code, answer.json()["type"]) == (422, "/problems/descriptor-refused"), answer.text
    assert detail in answer.json()["detail"], answer.json()
    return True
