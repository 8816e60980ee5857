"""Entry point of a transfer process: it moves bytes for the front until that or the supervisor is gone."""

from __future__ import annotations

import contextlib
import socket

from gemmserve_service.http.transfer.process import TransferProcess
from gemmserve_service.runtime.handoff import TransferHandoff
from gemmserve_service.runtime.tuning import keep_from_collector


def main() -> int:
    """Ends with the front: the supervisor starts the next one."""
    handoff = TransferHandoff.receive()
    control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    control.connect(handoff.control_path)
    keep_from_collector()
    with contextlib.closing(TransferProcess(control, handoff.name)) as transfer:
        transfer.run()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
