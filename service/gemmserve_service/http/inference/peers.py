"""Peers of connections: whether the one who sent a request is a process of this machine and of the server's user.

Shared memory by name is no proof of anything: whoever can send a request can send a name. A process of the server's own
user could open every such memory itself, so it gains nothing by having the server do it; for anybody else, other users
of this machine and the network above all, it would be a way into memory that is not theirs.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
from typing import TYPE_CHECKING, Final

from gemmserve_service.errors import DescriptorRefused

if TYPE_CHECKING:
    from starlette.requests import Request

_FORWARDED: Final = ("forwarded", "via", "x-forwarded-for", "x-real-ip")
# sock_diag(7), linux/netlink.h, linux/sock_diag.h, linux/inet_diag.h
_SOCK_DIAG: Final = 4
_BY_FAMILY: Final = 20
_REQUEST: Final = 1
_HEAD: Final = struct.Struct("=IHHII")  # length, type, flags, sequence number, port
_WANTED: Final = struct.Struct("=BBBBI")  # family, protocol, extensions, padding, states
_NO_COOKIE: Final = struct.pack("=III", 0, 0xFFFFFFFF, 0xFFFFFFFF)  # no interface, and whatever socket it is
_STATE: Final = _HEAD.size + 1
_UID: Final = _HEAD.size + 64
_ESTABLISHED: Final = 1  # a socket in TIME_WAIT is nobody's: its user is said to be 0


def check_same_user(request: Request) -> None:
    """Raises DescriptorRefused unless the request came by TCP from a process of this network namespace that runs as the
    server's user.
    """
    if any(name in request.headers for name in _FORWARDED):
        raise DescriptorRefused("shared memory is for clients of this machine, and this request came by a proxy")
    client, server = request.scope.get("client"), request.scope.get("server")
    uid = None if not client or not server else connected_uid(client, server)
    if uid is None:
        raise DescriptorRefused("shared memory by name is for clients of this machine that come by TCP")
    if uid != os.geteuid():
        raise DescriptorRefused("shared memory by name is for processes of the server's own user")


def connected_uid(local: tuple[str, int | None], remote: tuple[str, int | None]) -> int | None:
    """The user of the socket with these two addresses, a connection's other end; None: it is not on this machine, or
    not connected any more, or the system does not tell. Takes some ten microseconds.
    """
    try:
        addresses = [ipaddress.ip_address(host) for host, _ in (local, remote)]
    except ValueError:  # of a Unix socket
        return None
    plain = [getattr(address, "ipv4_mapped", None) or address for address in addresses]
    families = {socket.AF_INET if address.version == 4 else socket.AF_INET6 for address in plain}
    if len(families) > 1 or not hasattr(socket, "AF_NETLINK"):
        return None
    ends = struct.pack("!HH", local[1] or 0, remote[1] or 0) + b"".join(each.packed.ljust(16, b"\0") for each in plain)
    wanted = _WANTED.pack(families.pop(), socket.IPPROTO_TCP, 0, 0, 1 << _ESTABLISHED) + ends + _NO_COOKIE
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as diagnosis:
            diagnosis.send(_HEAD.pack(_HEAD.size + len(wanted), _BY_FAMILY, _REQUEST, 0, 0) + wanted)
            answer = diagnosis.recv(4096, socket.MSG_DONTWAIT)
    except OSError:
        return None
    # Another answer is an error, or a listener's: it is looked for where no connection is found.
    if _HEAD.unpack_from(answer)[1] != _BY_FAMILY or answer[_STATE] != _ESTABLISHED:
        return None
    uid: int
    (uid,) = struct.unpack_from("=I", answer, _UID)
    return uid
