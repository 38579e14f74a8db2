"""Telling systemd how we are (sd_notify): one datagram to the socket that it names; nothing without systemd."""

from __future__ import annotations

import logging
import os
import socket

log = logging.getLogger(__name__)


def notify(state: str) -> bool:
    """Send a state such as "READY=1" or "STOPPING=1"; whether anybody was told.

    An address that begins with @ is an abstract one: its first byte is NUL.
    """
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return False
    if address.startswith("@"):
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
            channel.connect(address)
            channel.send(state.encode())
    except OSError as error:
        log.warning("systemd could not be told %s: %s", state, error)
        return False
    return True
