"""BentoML with an endpoint that takes and gives bytes. Served by `bentoml serve bentoml_app:Gemm`."""

from typing import Annotated

import bentoml
import frame
from bentoml.validators import ContentType

Binary = Annotated[bytes, ContentType("application/octet-stream")]


@bentoml.service(workers=1, traffic={"timeout": 300, "max_concurrency": 1024}, logging={"access": {"enabled": False}})
class Gemm:
    @bentoml.api(route="/predict")
    def predict(self, body: Binary, /) -> Binary:
        return bytes(frame.answer(body))
