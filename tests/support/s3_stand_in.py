"""A stand-in for S3 on this machine: as much of its protocol as object stores need, in memory, without signatures.

Smaller than moto's server, which brings Flask and cryptography along and has no way to fail in the middle.
"""

from __future__ import annotations

import hashlib
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self
from urllib.parse import parse_qs, unquote, urlsplit
from xml.etree import ElementTree as ET
from xml.sax.saxutils import escape

BUCKET = "bucket"


class S3StandIn:
    """`environment` is what a client of it needs. As a context manager: serves until the end."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.parts: dict[str, dict[int, bytes]] = {}
        self.requests: list[tuple[str, str, str]] = []
        """Method, key and Range of each request."""
        self.down = False
        """Whether it answers 403 to everything."""
        self.lock = threading.Lock()
        stand_in = self

        class Handler(_Handler):
            s3 = stand_in

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self.environment = {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "stand-in",
            "AWS_SECRET_ACCESS_KEY": "no-secret-of-anybody",
            "AWS_REGION": "us-east-1",
            "AWS_ALLOW_HTTP": "true",
        }

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    s3: S3StandIn

    def log_message(self, *_: object) -> None:
        pass

    def _parse(self) -> tuple[str, dict[str, list[str]], bytes]:
        url = urlsplit(self.path)
        _, _, key = unquote(url.path).lstrip("/").partition("/")
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if (self.headers.get("x-amz-content-sha256") or "").startswith("STREAMING"):
            raise AssertionError("a signed stream of chunks: not understood")
        self.s3.requests.append((self.command, key, self.headers.get("Range", "")))
        return key, parse_qs(url.query, keep_blank_values=True), body

    def _answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _fail(self, status: int, code: str) -> None:
        self._answer(status, f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode())

    def _handle(self) -> None:
        key, query, body = self._parse()
        with self.s3.lock:
            if self.s3.down:
                self._fail(403, "AccessDenied")
            else:
                getattr(self, f"_{self.command.lower()}")(key, query, body)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _handle  # noqa: N815 (the base class's names)

    def _get(self, key: str, query: dict[str, list[str]], body: bytes) -> None:
        if not key:
            self._list(query)
        elif (data := self.s3.objects.get(key)) is None:
            self._fail(404, "NoSuchKey")
        else:
            headers = {"ETag": _etag(data), "Last_Modified": "Mon, 02 Mar 2026 10:00:00 GMT"}
            if (wanted := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))) is None:
                self._answer(200, data, **headers)
                return
            first = int(wanted[1])
            last = min(int(wanted[2] or len(data)), len(data) - 1)
            if first > last:
                self._fail(416, "InvalidRange")
                return
            headers["Content_Range"] = f"bytes {first}-{last}/{len(data)}"
            self._answer(206, data[first : last + 1], **headers)

    _head = _get

    def _list(self, query: dict[str, list[str]]) -> None:
        prefix, after = query.get("prefix", [""])[0], query.get("continuation-token", [""])[0]
        keys = sorted(key for key in self.s3.objects if key.startswith(prefix) and key > after)
        page, more = keys[:3], len(keys) > 3  # few, so that pages are turned
        text = "".join(
            f"<Contents><Key>{escape(key)}</Key><LastModified>2026-03-02T10:00:00.000Z</LastModified>"
            f"<ETag>{escape(_etag(self.s3.objects[key]))}</ETag><Size>{len(self.s3.objects[key])}</Size></Contents>"
            for key in page
        )
        token = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if more else ""
        text = f"<ListBucketResult><IsTruncated>{str(more).lower()}</IsTruncated>{token}{text}</ListBucketResult>"
        self._answer(200, text.encode())

    def _put(self, key: str, query: dict[str, list[str]], body: bytes) -> None:
        if "uploadId" in query:
            self.s3.parts[query["uploadId"][0]][int(query["partNumber"][0])] = body
        elif self.headers.get("If-None-Match") == "*" and key in self.s3.objects:
            self._fail(412, "PreconditionFailed")
            return
        else:
            self.s3.objects[key] = body
        self._answer(200, ETag=_etag(body))

    def _post(self, key: str, query: dict[str, list[str]], body: bytes) -> None:
        if "uploads" in query:
            upload = f"upload{len(self.s3.requests)}"
            self.s3.parts[upload] = {}
            text = f"<InitiateMultipartUploadResult><UploadId>{upload}</UploadId></InitiateMultipartUploadResult>"
        elif "uploadId" in query:
            parts = self.s3.parts.pop(query["uploadId"][0])
            self.s3.objects[key] = data = b"".join(parts[number] for number in sorted(parts))
            text = f"<CompleteMultipartUploadResult><ETag>{escape(_etag(data))}</ETag></CompleteMultipartUploadResult>"
        else:
            keys = [each.text or "" for each in ET.fromstring(body).iter() if each.tag.endswith("Key")]
            for each in keys:
                self.s3.objects.pop(each, None)
            gone = "".join(f"<Deleted><Key>{escape(each)}</Key></Deleted>" for each in keys)
            text = f"<DeleteResult>{gone}</DeleteResult>"
        self._answer(200, text.encode())

    def _delete(self, key: str, query: dict[str, list[str]], body: bytes) -> None:
        if "uploadId" in query:
            self.s3.parts.pop(query["uploadId"][0], None)
        else:
            self.s3.objects.pop(key, None)
        self._answer(204)


def _etag(data: bytes) -> str:
    return f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"'
