"""Access control as plain ASGI: Host and Origin while there are no keys, a valid key and its scope once there are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from starlette.datastructures import Headers

from gemmserve_service.errors import InvalidRequest, NotFound, OtherCell, ServiceError, TooLarge
from gemmserve_service.http.cells.redirects import check_cell
from gemmserve_service.http.headers.content_coding import check_coding
from gemmserve_service.http.middleware.hosts import HostRule
from gemmserve_service.http.problems import HostNotAllowed, OriginNotAllowed, problem_response
from gemmserve_service.http.requests.queries import check_query
from gemmserve_service.tenancy.identity import ANYONE, NOBODY, SCRAPER, STATIC, identify, needed_scope

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from starlette.types import ASGIApp, Receive, Send
    from starlette.types import Scope as AsgiScope

    from gemmserve_service.http.middleware.body_limits import BodyLimits
    from gemmserve_service.settings import Settings
    from gemmserve_service.tenancy.cells import Cells
    from gemmserve_service.tenancy.identity import Caller
    from gemmserve_service.tenancy.keyring import KeyringWatch

SIDE_PORT: Final = "gemmserve.side_port"
"""Key of the ASGI scope of a request that came in by the second port."""

_METRICS: Final = "/metrics"
_OPERATORS: Final = frozenset({"/", _METRICS, "/docs", "/openapi.json"})
_HEALTH: Final = frozenset({"/healthz", "/livez", "/readyz"})


class Gate:
    """Decides whom to let in, by a request's head, and by the keys as they are at that moment."""

    def __init__(self, settings: Settings, keyring: KeyringWatch) -> None:
        self._keyring = keyring
        self._rule = HostRule(settings)
        self._side_rule = HostRule(settings.model_copy(update={"host": settings.metrics_host}))
        self._side_is_local = settings.model_copy(update={"host": settings.metrics_host}).loopback
        self._two_ports = settings.metrics_port is not None

    def anyone(self, scope: AsgiScope, fields: Mapping[bytes, bytes]) -> bool:
        """Whether `caller` of a request to the API would be ANYONE, as it is then said to be: a quick look, for those
        without keys and of no web page. `fields`: its headers, none of them given twice.
        """
        if self._keyring.current.closed or b"origin" in fields or SIDE_PORT in scope or scope["path"] in _OPERATORS:
            return False
        if not self._rule.host(fields.get(b"host", b"").decode("latin-1")):
            return False
        _known(scope, ANYONE)
        return True

    def caller(self, scope: AsgiScope, values: Callable[[str], Sequence[str]]) -> Caller:
        """Sender of the request; also in the scope's state, for the audit of a refusal. Raises ServiceError.

        `values(name)`: those of each header of that name, in lower case.
        """
        path: str = scope["path"]
        hosts = values("host")
        if len(hosts) != 1:
            raise InvalidRequest("a request has exactly one Host header")
        if SIDE_PORT in scope:
            if self._side_is_local:
                _check_site(self._side_rule, hosts[0], values("origin"))
            if path not in _OPERATORS | _HEALTH and not path.startswith(STATIC):
                raise NotFound(f"this port has {', '.join(sorted(_OPERATORS | _HEALTH))}")
            return _known(scope, SCRAPER)
        keyring = self._keyring.current
        if not keyring.closed:
            _check_site(self._rule, hosts[0], values("origin"))
        elif scope["method"] == "OPTIONS" and values("origin"):
            # CORS is off: a preflight would carry no key, and gets no leave.
            raise OriginNotAllowed("pages of other sites may not use this server")
        if self._two_ports and path == _METRICS:
            raise NotFound("the metrics are on a port of their own: GEMMSERVE_METRICS_PORT")
        needed = needed_scope(scope["method"], path)
        if needed is None:
            return _known(scope, NOBODY if keyring.closed else ANYONE)
        caller = _known(scope, identify(keyring, values("authorization"), values("x-api-key")))
        caller.need(needed)
        return caller


class Access:
    """Lets a request through with its `Caller` in ``request.state.caller``, or answers 401, 403, 404, 422 where a
    parameter is given twice, 415 where its body has a coding that is not read there, 413 where that is too long, or
    307 where it is another cell's.
    """

    def __init__(self, app: ASGIApp, gate: Gate, limits: BodyLimits, cells: Cells) -> None:
        self._app = app
        self._gate = gate
        self._limits = limits
        self._cells = cells if cells.urls else None

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            else:  # there are no websockets here, and none comes in without a key
                await send({"type": "websocket.close", "code": 1008})
            return
        try:
            headers = Headers(scope=scope)
            self._gate.caller(scope, headers.getlist)
            check_query(scope["query_string"])
            check_coding(scope["method"], scope["path"], headers.getlist("content-encoding"))
            self._limits.check(scope)
            if self._cells is not None:
                check_cell(self._cells, scope, headers)
        except ServiceError as refusal:
            unread = isinstance(refusal, TooLarge | OtherCell)  # nobody reads such a body
            await problem_response(refusal, {"Connection": "close"} if unread else None)(scope, receive, send)
            return
        await self._app(scope, receive, send)


def _known(scope: AsgiScope, caller: Caller) -> Caller:
    scope.setdefault("state", {})["caller"] = caller
    return caller


def _check_site(rule: HostRule, host: str, origins: Sequence[str]) -> None:
    """Raises HostNotAllowed or OriginNotAllowed for a name that is not this machine's."""
    if not rule.host(host):
        raise HostNotAllowed(f"Host {host[:100]!r} is not this machine's; GEMMSERVE_ALLOWED_HOSTS admits further names")
    for origin in origins:
        if not rule.origin(origin):
            raise OriginNotAllowed(
                f"Origin {origin[:100]!r} is not this machine's; GEMMSERVE_ALLOWED_HOSTS admits further sites"
            )


class SidePort:
    """The app as the second port shows it: operators' pages and health, without keys."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        """ASGI."""
        await self._app({**scope, SIDE_PORT: True}, receive, send)
