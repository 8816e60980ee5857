"""The endpoint that people write first: uploaded files, numpy.load, numpy.save. `python fastapi_app.py PORT`."""

import io
import json
import sys
from typing import Annotated

import numpy as np
import uvicorn
from fastapi import FastAPI, File, Form, Response, UploadFile

app = FastAPI()


@app.get("/")
async def ready():
    return "ok"


@app.post("/v1/gemm")
async def gemm(
    a: Annotated[UploadFile, File()],
    b: Annotated[UploadFile, File()],
    c: Annotated[UploadFile | None, File()] = None,
    params: Annotated[str, Form()] = "{}",
):
    d = np.load(io.BytesIO(await a.read())) @ np.load(io.BytesIO(await b.read()))
    beta = json.loads(params).get("beta", 0)
    if beta:
        d += beta * np.load(io.BytesIO(await c.read()))
    file = io.BytesIO()
    np.save(file, d)
    return Response(file.getvalue(), media_type="application/x-npy")


if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning", access_log=False)
