"""`lmcache-qserver verify`: asks a running daemon to hash what it holds, over the wire."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import zmq

from lmcache_qprotocol.codec import decode_reply, encode, encode_request
from lmcache_qprotocol.errors import ProtocolError, RequestError
from lmcache_qprotocol.messages import PROTOCOL_VERSION, Hello, VerifyReply
from lmcache_qprotocol.operations import HELLO, VERIFY_Q, Operation
from lmcache_qserver import installed_version

HELLO_TIMEOUT_S = 5.0


class VerifyFailed(Exception):
    """Nothing was verified; the message says why and what to do."""


def verify(url: str, timeout_s: float) -> VerifyReply:
    """Let the daemon hash everything that it stores, and drop what has changed.

    Args:
        timeout_s: seconds; a server hashes some gigabytes in one.

    Raises:
        VerifyFailed: nobody answers there in time, or not with a result.
    """
    hello = Hello(
        protocol_version=PROTOCOL_VERSION,
        client=f"lmcache-qserver verify {installed_version()}",
        pid=os.getpid(),
    )
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        try:
            socket.connect(url)
            _ask(socket, HELLO, (hello,), HELLO_TIMEOUT_S)
            reply: VerifyReply = _ask(socket, VERIFY_Q, (), timeout_s)
        except zmq.Again:
            raise VerifyFailed(
                f"no answer from {url} in time; is the daemon running, is --url its address, is --timeout long enough?"
            ) from None
        except zmq.ZMQError as error:
            raise VerifyFailed(
                f"{url!r} is no address to connect to ({error}); write tcp://HOST:PORT or ipc:///PATH"
            ) from None
        except (RequestError, ProtocolError) as error:
            raise VerifyFailed(f"{url} did not verify: {error}") from None
    return reply


def _ask(
    socket: zmq.Socket[bytes], operation: Operation, payloads: Sequence[Any], timeout_s: float
) -> Any:
    for option in (zmq.SNDTIMEO, zmq.RCVTIMEO):
        socket.setsockopt(option, int(timeout_s * 1000))
    socket.send_multipart(encode_request(encode(operation.name), operation, payloads))
    return decode_reply(socket.recv_multipart(), operation).result


def in_words(reply: VerifyReply) -> str:
    """The outcome for people."""
    return (
        f"{reply.nbytes / 1e9:.2f} GB hashed: {reply.verified} objects as they were stored, {reply.made} without a "
        f"checksum until now, {reply.corrupt} changed in memory and dropped"
    )
