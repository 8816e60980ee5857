"""Who may come in, as plain ASGI: Host and Origin while there are no keys, a valid key and its scope once there are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from starlette.datastructures import Headers

from gemmserve_service.errors import InvalidRequest, NotFound, ServiceError
from gemmserve_service.hosts import HostRule
from gemmserve_service.identity import ANYONE, NOBODY, SCRAPER, identify, needed_scope
from gemmserve_service.problems import HostNotAllowed, OriginNotAllowed, problem_response

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Send
    from starlette.types import Scope as AsgiScope

    from gemmserve_service.identity import Caller
    from gemmserve_service.keyring import KeyringWatch
    from gemmserve_service.settings import Settings

SIDE_PORT: Final = "gemmserve.side_port"
"""Key of the ASGI scope of a request that came in by the second port."""

_OPERATORS: Final = frozenset({"/metrics", "/docs", "/openapi.json"})
_HEALTH: Final = frozenset({"/healthz", "/livez", "/readyz"})


class Access:
    """Lets a request through with its `Caller` in ``request.state.caller``, or answers 401, 403 or 404."""

    def __init__(self, app: ASGIApp, settings: Settings, keyring: KeyringWatch) -> None:
        self._app = app
        self._keyring = keyring
        self._rule = HostRule(settings)
        self._side_rule = HostRule(settings.model_copy(update={"host": settings.metrics_host}))
        self._side_is_local = settings.model_copy(update={"host": settings.metrics_host}).loopback
        self._two_ports = settings.metrics_port is not None

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            else:  # there are no websockets here, and none comes in without a key
                await send({"type": "websocket.close", "code": 1008})
            return
        try:
            caller = self._caller(scope, Headers(scope=scope))
        except ServiceError as refusal:
            await problem_response(refusal)(scope, receive, send)
            return
        scope.setdefault("state", {})["caller"] = caller
        await self._app(scope, receive, send)

    def _caller(self, scope: AsgiScope, headers: Headers) -> Caller:
        path: str = scope["path"]
        hosts = headers.getlist("host")
        if len(hosts) != 1:
            raise InvalidRequest("a request has exactly one Host header")
        if SIDE_PORT in scope:
            if self._side_is_local:
                _check_site(self._side_rule, hosts[0], headers)
            if path not in _OPERATORS | _HEALTH:
                raise NotFound(f"this port has {', '.join(sorted(_OPERATORS | _HEALTH))}")
            return SCRAPER
        keyring = self._keyring.current
        if not keyring.closed:
            _check_site(self._rule, hosts[0], headers)
        elif headers.get("origin") is not None and scope["method"] == "OPTIONS":
            # CORS is off: a preflight would carry no key, and gets no leave.
            raise OriginNotAllowed("pages of other sites may not use this server")
        if self._two_ports and path in _OPERATORS:
            raise NotFound(f"there is nothing at {path}")
        needed = needed_scope(scope["method"], path)
        if needed is None:
            return NOBODY if keyring.closed else ANYONE
        caller = identify(keyring, headers.getlist("authorization"), headers.getlist("x-api-key"))
        scope.setdefault("state", {})["caller"] = caller  # also for the audit of a refusal
        caller.need(needed)
        return caller


def _check_site(rule: HostRule, host: str, headers: Headers) -> None:
    """Raises HostNotAllowed or OriginNotAllowed for a name that is not this machine's."""
    if not rule.host(host):
        raise HostNotAllowed(f"Host {host[:100]!r} is not this machine's; GEMMSERVE_ALLOWED_HOSTS admits further names")
    for origin in headers.getlist("origin"):
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
