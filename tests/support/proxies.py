"""nginx and haproxy in front of a server, with upstream connections that are kept and shared by all clients."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from pathlib import Path

_NGINX = """
daemon off;
master_process off;
user root;
pid {folder}/pid;
error_log {folder}/log;
events {{ worker_connections 256; }}
http {{
  access_log off;
  client_body_temp_path {folder}/body;
  proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi;
  scgi_temp_path {folder}/scgi;
  client_max_body_size 0;
  map $http_upgrade $connection_upgrade {{ default upgrade; '' ''; }}  # as its documentation has it for websockets
  upstream gemmserve {{ server {host}:{port}; keepalive 1; }}
  server {{
    listen 127.0.0.1:{listen};
    location / {{
      proxy_pass http://gemmserve;
      proxy_http_version 1.1;
      proxy_request_buffering off;
      proxy_set_header Host $http_host;
      proxy_set_header Upgrade $http_upgrade;
      proxy_set_header Connection $connection_upgrade;
    }}
  }}
}}
"""

_HAPROXY = """
global
  maxconn 256
defaults
  mode http
  timeout connect 10s
  timeout client 60s
  timeout server 60s
frontend clients
  bind 127.0.0.1:{listen}
  default_backend gemmserve
backend gemmserve
  http-reuse always
  server one {host}:{port}
"""

COMMANDS = {
    "nginx": (_NGINX, ("-p", "{folder}", "-e", "{folder}/log", "-c")),
    "haproxy": (_HAPROXY, ("-db", "-q", "-f")),
}
"""By name: the configuration, and the arguments before its path."""


def found(name: str) -> str | None:
    """The program's path, also where Debian puts it for root alone."""
    return shutil.which(name) or shutil.which(name, path="/usr/sbin:/usr/local/sbin")


class Proxy:
    """One of `COMMANDS`, running: `port` is its own."""

    def __init__(self, name: str, host: str, port: int, folder: Path) -> None:
        program = found(name)
        assert program is not None
        configuration, arguments = COMMANDS[name]
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        values = {"folder": folder, "host": host, "port": port, "listen": self.port}
        path = folder / f"{name}.conf"
        path.write_text(configuration.format(**values))
        self._log = (folder / "output").open("wb")
        self._command = [program, *(argument.format(**values) for argument in arguments), str(path)]

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(self._command, stdout=self._log, stderr=self._log)
        deadline = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=60).close()
            except ConnectionRefusedError:
                assert self._process.poll() is None, "it has ended"
                assert time.monotonic() < deadline, "it does not listen"
                time.sleep(0.02)
            else:
                return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(60)
        self._log.close()
