"""What a service manager is told (sd_notify): READY=1, STOPPING=1, and a line about what is going on.

Only where NOTIFY_SOCKET says that somebody wants to know. Telling never fails, and never waits.
"""

import contextlib
import os
import socket


def notify(*lines: str) -> None:
    """Send `lines` to the service manager, if there is one."""
    path = os.environ.get("NOTIFY_SOCKET", "")
    if not path.startswith(("/", "@")):
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.setblocking(False)
        sock.connect(path.replace("@", "\0", 1) if path.startswith("@") else path)
        sock.send("\n".join(lines).encode())
