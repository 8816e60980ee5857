"""Executor whose workers have joined over TCP: they come and go, and are found by the node's name and their device.

A link that ends, for whatever reason, ends its tasks in the same turn of the event loop: the scheduler queues them
again, and what the node sends afterwards is refused. The worker stays known for a while, as a worker does whose process
is started again: work waits for it. Then it is gone; at once, if the node said that it ends, and another has such a
device.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import ssl
import time
from typing import TYPE_CHECKING, Any, Final

from gemmserve_service.executor.join_protocol import BEAT_S, Joined, Pulse, Refused
from gemmserve_service.executor.joined.connection import Connection
from gemmserve_service.executor.joined.door import JoinCounts
from gemmserve_service.executor.joined.result_file import ResultFile
from gemmserve_service.executor.joined.tokens import LinkSecrets, TokenRefused, still_joined, token_key
from gemmserve_service.executor.port import NodeLink, Worker
from gemmserve_service.executor.protocol import Stop
from gemmserve_service.executor.worker.memory.mappings import Mappings
from gemmserve_service.settings import is_loopback

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Sequence

    from gemmserve_service.executor.join_protocol import Join
    from gemmserve_service.executor.joined.assignments import File
    from gemmserve_service.executor.joined.link import Link
    from gemmserve_service.executor.port import ExecutorOwner, ToOne
    from gemmserve_service.executor.protocol import Forget, Hello
    from gemmserve_service.settings import Settings
    from gemmserve_service.tenancy.keyring import Keyring, KeyringWatch

MAX_WORKERS: Final = 1024
MAX_CONNECTIONS: Final = 4096
MAX_UNKNOWN: Final = 128
"""Connections that have shown no token and no secret: the longest of them has to go for one more."""
EXPECTED_S: Final = 300.0
"""Seconds for which a worker whose link has ended is expected back."""
HELLO_S: Final = 600.0
"""Seconds for which a node may say nothing before its worker's hello: kernels may be compiled meanwhile."""
_MAX_EXPECTED: Final = 256  # workers whose links have ended, likewise
_MAX_AHEAD: Final = 8  # messages of tasks that a worker may have in line: more than any of ours asks for
_MOST: Final = 1 << 62
_BEATS: Final = 5  # in the time after which a node is given up, or more often
_TLS_CLOSE_S: Final = 5.0

log = logging.getLogger(__name__)


class JoinedExecutor:
    """Workers that joined by `listener`, which the supervisor holds, so that it outlives this process."""

    def __init__(self, listener: socket.socket, settings: Settings, keyring: KeyringWatch) -> None:
        self.counts = JoinCounts()
        self.owner: ExecutorOwner | None = None
        self.changed: Callable[[], None] = lambda: None
        """Called when a worker came to `workers` or went from there."""
        self._listener = listener
        self._settings = settings
        self._silence_s = min(settings.join_silence_s, settings.heartbeat_timeout_s)
        self._keyring = keyring
        self._open = is_loopback(settings.join_host) or settings.allow_unauthenticated
        self._secrets: LinkSecrets | None = None
        self._workers: dict[str, Worker] = {}
        """Those that have said hello, by their id, oldest first."""
        self._links: dict[str, Link] = {}
        """Live links by their worker's id."""
        self._by_secret: dict[str, Link] = {}
        self._lost_at: dict[str, float] = {}
        """When workers were lost that are expected back (time.monotonic), oldest first."""
        self._connections: dict[Connection, None] = {}
        """Oldest first."""
        self._mappings = Mappings()
        self._result_file = ResultFile()
        self._context: ssl.SSLContext | None = None
        self._certificate: tuple[float, float] = (0.0, 0.0)
        """Times of the files that the context was made from."""
        self._server: asyncio.Server | None = None
        self._ticker: asyncio.Task[None] | None = None
        self._ticked: float | None = None

    # -- Executor ---------------------------------------------------------------------------------------------------

    async def start(self, owner: ExecutorOwner) -> None:
        """Let workers join. Raises OSError, and ssl.SSLError for a certificate that cannot be used."""
        self.owner = owner
        self._secrets = LinkSecrets(self._settings.data_dir)
        loop = asyncio.get_running_loop()
        tls: dict[str, Any] = {}
        if self._settings.tls_certificate is not None:
            self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self._load_certificate()
            tls = {
                "ssl": self._context,
                "ssl_handshake_timeout": self._settings.head_timeout_s,
                "ssl_shutdown_timeout": _TLS_CLOSE_S,
            }
        self._server = await loop.create_server(lambda: Connection(self), sock=self._listener, **tls)
        self._keyring.on_change.append(self._keys_changed)
        self._ticker = loop.create_task(self._tick_on(), name="joined workers")

    async def stop(self) -> None:
        """Tell the workers to end after their task, and close."""
        self.owner = None
        ticker, self._ticker = self._ticker, None
        if ticker is not None:
            ticker.cancel()
            await asyncio.gather(ticker, return_exceptions=True)
        with contextlib.suppress(ValueError):
            self._keyring.on_change.remove(self._keys_changed)
        if self._server is not None:
            self._server.close()
        for link in list(self._links.values()):
            link.end(Stop())
        for connection in list(self._connections):
            connection.close()
        self._result_file.close()

    def workers(self) -> Sequence[Worker]:
        """Those that have joined, ready or expected back."""
        return tuple(self._workers.values())

    def send(self, worker: Worker, message: ToOne) -> None:
        """Send the message over the worker's link; one that is just being lost will not answer."""
        link = self._links.get(worker.id)
        if link is not None and link.greeted:
            link.send(message)

    def kill(self, worker: Worker, reason: str) -> None:
        """End the worker's link: the node gives up its tasks when it notices, and nothing of them is taken any more."""
        log.error("the link of worker %s is ended: %s", worker.id, reason)
        link = self._links.get(worker.id)
        if link is not None:
            link.end()

    def forget(self, message: Forget) -> None:
        """Send the message to every worker."""
        self._mappings.forget(message.extents)
        self._result_file.forget(message.extents)
        for link in list(self._links.values()):
            if link.greeted:
                link.forget(message)

    # -- for links --------------------------------------------------------------------------------------------------

    def joins(self, link: Link, join: Join) -> None:
        """Let a worker in, or refuse it."""
        try:
            key_id = token_key(self._keyring.current, join.token, open_without_keys=self._open)
        except TokenRefused as error:
            link.refuse(Refused(slug="token", detail=str(error)))
            return
        if self.owner is None or self._secrets is None:
            link.refuse(Refused(slug="full", detail="the server is shutting down"))
            return
        old = self._links.get(join.worker)
        if old is None and len(self._links) >= MAX_WORKERS:
            link.refuse(Refused(slug="full", detail=f"{MAX_WORKERS} workers have joined already"))
            return
        if old is not None:
            log.warning(
                "worker %s joins anew, from %s: its link from %s is ended", join.worker, link.address, old.address
            )
            old.end()
        link.key_id = key_id
        link.secret = self._secrets.new()
        link.worker = self._workers.get(join.worker) or Worker(join.worker)
        link.worker.link = NodeLink(join.host, link.address, join.link_bytes_s, join.cache_bytes)
        self._links[join.worker] = self._by_secret[link.secret] = link
        self.counts.joined += 1
        log.info("worker %s joins from %s (%s)", join.worker, link.address, join.host)
        link.say(
            Joined(
                worker=join.worker,
                link=link.secret,
                silence_s=self._silence_s,
                heartbeat_timeout_s=self._settings.heartbeat_timeout_s,
                block_side=self._settings.block_side,
                server=self._secrets.server,
            )
        )

    def greets(self, link: Link, hello: Hello) -> None:
        """Take in a worker's hello. Raises ValueError for one that makes no sense."""
        worker = link.worker
        assert worker is not None
        numbers = hello.memory_used, hello.ahead, hello.result_bytes, hello.planned_bytes or 0
        if not all(0 <= number < _MOST for number in numbers) or not math.isfinite(hello.verified_error):
            raise ValueError("numbers of no sense in a hello")
        worker.greeted(hello.model_copy(update={"ahead": min(hello.ahead, _MAX_AHEAD)}))
        link.greeted = True
        self._lost_at.pop(worker.id, None)
        if worker.id not in self._workers:
            self._workers[worker.id] = worker
            self.changed()
        log.info("worker %s is ready (verified product, error %.1e)", worker.id, hello.verified_error)
        if self.owner is not None:
            self.owner.worker_ready(worker)

    def disconnected(self, link: Link) -> None:
        """Note that a link has ended."""
        worker, link.worker = link.worker, None
        if worker is None:
            return
        self._by_secret.pop(link.secret, None)
        if self._links.get(worker.id) is link:
            del self._links[worker.id]
        if link.greeted:
            self._lost_at[worker.id] = time.monotonic()
            self._lose(worker)
            if link.leaves and any(other.ready and other.spec == worker.spec for other in self._workers.values()):
                self._gone(worker.id)
        if not self._links:
            self._mappings.clear()
            self._result_file.close()

    def link_of(self, secret: str) -> Link | None:
        """Return the live link of a secret: 128 random bits, of which nothing is learned by the time this takes."""
        return self._by_secret.get(secret)

    def had_link(self, secret: str) -> bool:
        """Whether it is the secret of a link that has ended."""
        return self._secrets is not None and self._secrets.made(secret)

    def memory(self, file: File) -> memoryview:
        """Return the bytes of a file of the store. Raises OSError, ValueError."""
        return self._mappings.of(file.name, file.path, file.nbytes).data

    def write(self, file: File, start: int, piece: memoryview, *, by_file: bool) -> None:
        """Write bytes to a file of the store; `by_file`: without mapping it. Raises OSError, ValueError."""
        if by_file and file.name not in self._mappings:
            self._result_file.write(file, start, piece)
        else:
            self.memory(file)[start : start + len(piece)] = piece

    def soon(self, callback: Callable[[], None]) -> None:
        """Have something go on in the next turn of the event loop."""
        asyncio.get_running_loop().call_soon(callback)

    def _lose(self, worker: Worker) -> None:
        worker.ready = False
        self.counts.lost += 1
        if self.owner is not None:
            log.warning("worker %s is gone", worker.id)
            self.owner.worker_lost(worker)

    # -- for connections --------------------------------------------------------------------------------------------

    def entered(self, connection: Connection) -> bool:
        """Take in a connection; False if there are too many."""
        if self.owner is None or len(self._connections) >= MAX_CONNECTIONS:
            return False
        unknown = (
            [each for each in self._connections if not each.known] if len(self._connections) >= MAX_UNKNOWN else []
        )
        if len(unknown) >= MAX_UNKNOWN:
            unknown[0].abort()
            del self._connections[unknown[0]]
        self._connections[connection] = None
        return True

    def left(self, connection: Connection) -> None:
        """Note that a connection has ended."""
        self._connections.pop(connection, None)

    # -- time -------------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Send signs of life, and end what is over: links of keys that are, connections that do not get on, workers
        that are expected no longer. `now` by time.monotonic.
        """
        timeout_s = self._settings.heartbeat_timeout_s
        stood_still = self._ticked is not None and now - self._ticked > self._silence_s / 2
        self._ticked = now
        for link in list(self._links.values()):
            if not still_joined(self._keyring.current, link.key_id):
                log.warning("the key by which worker %s joined is of no use any more", link.join and link.join.worker)
                link.end()
                continue
            if stood_still:  # nobody could be heard, and nothing be sent
                link.heard = link.took = now
            if link.greeted and now - link.heard > self._silence_s:
                log.error("nothing came of worker %s for %.1f s", link.join and link.join.worker, now - link.heard)
                link.end()
                continue
            stuck = link.stuck_since is not None and now - link.stuck_since > timeout_s
            if stuck or (not link.greeted and now - link.heard > max(HELLO_S, timeout_s)):
                log.error("worker %s takes nothing that it is sent, or says nothing", link.join and link.join.worker)
                link.end()
                continue
            link.say(Pulse())
        for connection in list(self._connections):
            due = connection.overdue_at
            if due is not None and now > due and not stood_still:
                connection.abort()
        for worker_id, lost_at in list(self._lost_at.items()):
            if now - lost_at < EXPECTED_S and len(self._lost_at) <= _MAX_EXPECTED:
                break
            self._gone(worker_id)

    def _load_certificate(self) -> None:
        """Use the certificate as it is now, for connections to come. Raises OSError, ssl.SSLError."""
        certificate, key = self._settings.tls_certificate, self._settings.tls_key
        if self._context is None or certificate is None or key is None:
            return
        times = certificate.stat().st_mtime, key.stat().st_mtime
        if times != self._certificate:
            self._context.load_cert_chain(certificate, key)
            self._certificate = times

    def _gone(self, worker_id: str) -> None:
        del self._lost_at[worker_id]
        worker = self._workers.pop(worker_id)
        log.info("worker %s is expected no longer", worker_id)
        self.changed()
        if self.owner is not None:
            self.owner.worker_gone(worker)

    async def _tick_on(self) -> None:
        while True:
            await asyncio.sleep(min(BEAT_S, self._silence_s / _BEATS))
            try:
                self._load_certificate()
            except (OSError, ssl.SSLError) as error:
                log.error("the certificate cannot be used; connections get the one before: %s", error)  # noqa: TRY400
            try:
                self.tick(time.monotonic())
            except Exception:
                log.exception("what is due about joined workers cannot be done now")

    def _keys_changed(self, before: Keyring, after: Keyring) -> None:
        del before
        for link in list(self._links.values()):
            if not still_joined(after, link.key_id):
                log.warning("the key by which worker %s joined has ended", link.join and link.join.worker)
                link.end()
