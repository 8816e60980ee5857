"""LitServe with an endpoint that takes and gives bytes, one worker. `python litserve_app.py PORT`."""

import sys
from typing import Annotated

import frame
import litserve
from fastapi import Body, Response


class Api(litserve.LitAPI):
    def setup(self, device):
        pass

    def decode_request(self, request: Annotated[bytes, Body(media_type="application/octet-stream")]):
        return request

    def predict(self, x):
        return bytes(frame.answer(x))

    def encode_response(self, output) -> Response:
        return Response(content=output, media_type="application/octet-stream")


if __name__ == "__main__":
    server = litserve.LitServer(Api(), accelerator="cpu", workers_per_device=1, timeout=300, fast_queue=True)
    port = int(sys.argv[1])
    server.run(host="127.0.0.1", port=port, generate_client_file=False, log_level="warning", num_api_servers=1)
