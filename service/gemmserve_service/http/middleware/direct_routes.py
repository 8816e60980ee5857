"""Routes whose requests are many and short: found here, before FastAPI looks for a route, which costs a quarter of a
millisecond with its validation. FastAPI has the same endpoints: for the documents, and for whatever is unusual.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from gemmserve.wire import NpyError
from gemmserve_kernels.problem.errors import DeviceError, KernelError
from gemmserve_service.errors import ServiceError
from gemmserve_service.http.problems import problem_response

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from starlette.types import ASGIApp, Receive, Scope, Send

    Endpoint = Callable[[Request], Awaitable[Response | None]]

_PROBLEMS: Final = (ServiceError, KernelError, DeviceError, NpyError)


class DirectRoutes:
    """Answers POST at the paths of `endpoints` where there is no query; passes everything else on.

    So it does with what an endpoint returns None for, having read nothing.
    """

    def __init__(
        self, app: ASGIApp, endpoints: Mapping[str, Endpoint], routes: Mapping[str, str] | None = None
    ) -> None:
        """`routes`: of paths whose route has parameters, that route's path."""
        self._app = app
        routes = routes or {}
        self._endpoints = {
            path: (endpoint, SimpleNamespace(path=routes.get(path, path))) for path, endpoint in endpoints.items()
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http" or scope["method"] != "POST" or scope["query_string"]:
            await self._app(scope, receive, send)
            return
        found = self._endpoints.get(scope["path"])
        if found is None:
            await self._app(scope, receive, send)
            return
        endpoint, scope["route"] = found  # as the log and the metrics know it: by its path
        try:
            response: Any = await endpoint(Request(scope, receive, send))
        except _PROBLEMS as error:
            response = problem_response(error)
        except ClientDisconnect:
            response = Response(status_code=499)  # nobody reads it; nginx's, for the log and metrics
        await (self._app if response is None else response)(scope, receive, send)
