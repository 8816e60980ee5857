"""A plain ASGI route on uvicorn: no framework, no queue, no second process. `python asgi_app.py PORT`."""

import sys

import frame
import uvicorn

PIECE = 1 << 20
kept = bytearray()


async def receive_body(scope, receive):
    """In memory that is kept from request to request."""
    global kept
    length = int(dict(scope["headers"])[b"content-length"])
    body = bytearray(length) if len(kept) < length else kept
    kept, view, filled = bytearray(), memoryview(body), 0
    while True:
        message = await receive()
        piece = message.get("body", b"")
        view[filled : filled + len(piece)] = piece
        filled += len(piece)
        if not message.get("more_body"):
            return body, view[:filled]


async def app(scope, receive, send):
    global kept
    if scope["type"] != "http":
        return
    if scope["method"] == "GET":
        body, result = None, memoryview(b"ok")
    else:
        body, view = await receive_body(scope, receive)
        result = frame.answer(view)
    headers = [(b"content-length", str(len(result)).encode()), (b"content-type", b"application/octet-stream")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    for start in range(0, len(result), PIECE):
        piece = bytes(result[start : start + PIECE])
        await send({"type": "http.response.body", "body": piece, "more_body": start + PIECE < len(result)})
    if not len(result):
        await send({"type": "http.response.body", "body": b""})
    if body is not None and len(body) > len(kept):
        kept = body


if __name__ == "__main__":
    uvicorn.run(
        app, host="127.0.0.1", port=int(sys.argv[1]), loop="uvloop", http="httptools",
        log_level="warning", access_log=False, lifespan="off",
    )  # fmt: skip
