"""A command's way to a running daemon: says hello, attaches to the lifeline where that is asked for, asks once."""

from __future__ import annotations

import os
import socket as sockets
from collections.abc import Sequence
from typing import Any

import zmq

from lmcache_qprotocol.codec import decode_reply, encode, encode_request
from lmcache_qprotocol.errors import ProtocolError, RequestError
from lmcache_qprotocol.lifeline import (
    MAX_PACKET_BYTES,
    Attach,
    Attached,
    decode_packet,
    encode_packet,
)
from lmcache_qprotocol.messages import PROTOCOL_VERSION, Hello, HelloReply
from lmcache_qprotocol.operations import HELLO, Operation
from lmcache_qserver import installed_version

HELLO_TIMEOUT_S = 5.0


class AskFailed(Exception):
    """There is no answer; the message says why and what to do."""


def ask_daemon(
    url: str,
    operation: Operation,
    payloads: Sequence[Any],
    timeout_s: float,
    *,
    attach: bool = False,
) -> Any:
    """The answer to one request.

    Args:
        timeout_s: seconds to wait for it.
        attach: prove who asks by the daemon's Unix socket; what deletes needs that.

    Raises:
        AskFailed: nobody answers there in time, or not with a result.
    """
    hello = Hello(
        protocol_version=PROTOCOL_VERSION,
        client=f"lmcache-qserver {operation.name} {installed_version()}",
        pid=os.getpid(),
    )
    lifeline: sockets.socket | None = None
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        try:
            socket.connect(url)
            reply: HelloReply = _ask(socket, HELLO, (hello,), HELLO_TIMEOUT_S)
            if attach:
                lifeline = _attach(reply)
            return _ask(socket, operation, payloads, timeout_s)
        except zmq.Again:
            raise AskFailed(
                f"no answer from {url} in time; is the daemon running, is --url its address, is --timeout long enough?"
            ) from None
        except zmq.ZMQError as error:
            raise AskFailed(
                f"{url!r} is no address to connect to ({error}); write tcp://HOST:PORT or ipc:///PATH"
            ) from None
        except (RequestError, ProtocolError) as error:
            raise AskFailed(f"{url} refuses: {error}") from None
        finally:
            if lifeline is not None:
                lifeline.close()


def _ask(
    socket: zmq.Socket[bytes], operation: Operation, payloads: Sequence[Any], timeout_s: float
) -> Any:
    for option in (zmq.SNDTIMEO, zmq.RCVTIMEO):
        socket.setsockopt(option, int(timeout_s * 1000))
    socket.send_multipart(encode_request(encode(operation.name), operation, payloads))
    return decode_reply(socket.recv_multipart(), operation).result


def _attach(hello: HelloReply) -> sockets.socket:
    lifeline = sockets.socket(sockets.AF_UNIX, sockets.SOCK_SEQPACKET)
    try:
        lifeline.settimeout(HELLO_TIMEOUT_S)
        lifeline.connect(hello.lifeline)
        lifeline.send(encode_packet(Attach(hello.session)))
        answer, descriptors, _, _ = sockets.recv_fds(lifeline, MAX_PACKET_BYTES, 4)
        for descriptor in descriptors:
            os.close(descriptor)
        packet = decode_packet(answer)
        if not isinstance(packet, Attached):
            raise AskFailed(f"the daemon's Unix socket {hello.lifeline} refuses: {packet}")
    except (OSError, ProtocolError) as error:
        lifeline.close()
        raise AskFailed(
            f"the daemon's Unix socket {hello.lifeline} can't be used ({error}): run this on its host, as its user or "
            "one that it lets in (--allow-uid)"
        ) from None
    except AskFailed:
        lifeline.close()
        raise
    return lifeline
