"""The heartbeat: notices within milliseconds that the server is gone, and comes back when it does.

One daemon thread. It sleeps in one `poll` over the lifeline (hang-up), its wake (a ping's answer, another boot id,
`beat_now`, `stop`) and the time that `Pulse` says. What makes the server lost: the lifeline's hang-up; a ping without
an answer in time; a ping that fails; a boot id other than the greeting's. Then, in this order: `healthy` turns False,
answers that have been sent are taken, all requests that are still outstanding fail, `on_lost` is called, and the
connection is renewed until that and `on_restored` succeed.

`healthy` is False while `on_restored` runs, and turns True after it. No exception of a callback ends the thread.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections.abc import Callable, Sequence

from lmcache_qclient.link.connection import Connection
from lmcache_qclient.link.pulse import Pulse
from lmcache_qclient.link.requests import ReplyFuture
from lmcache_qclient.link.wake import Wake
from lmcache_qprotocol.errors import QServerError
from lmcache_qprotocol.messages import HelloReply
from lmcache_qprotocol.operations import PING

logger = logging.getLogger(__name__)

ARRIVE_S = 0.25
"""So long answers may come that were sent before the lifeline hung up: it overtakes them."""
JOIN_SLACK_S = 1.0


class Heartbeat:
    """See the head of this file.

    Args:
        connection: an open connection; its owner closes it after `stop`.
        interval_s: between two pings, seconds.
        reply_timeout_s: for a ping's answer, and for a renewal, seconds.
        on_lost: called once per outage, on the heartbeat's thread.
        on_restored: called with the new greeting (or with the present one, when the server does not know us any more):
            registers again. It may block and use `connection.link.call`; when it raises, all is tried again.
        ping_payloads: payloads of the next ping.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        interval_s: float = 10.0,
        reply_timeout_s: float = 5.0,
        on_lost: Callable[[], None] = lambda: None,
        on_restored: Callable[[HelloReply], None] = lambda hello: None,
        ping_payloads: Callable[[], Sequence[object]] = lambda: (None,),
    ) -> None:
        self._connection = connection
        self._reply_timeout_s = reply_timeout_s
        self._on_lost = on_lost
        self._on_restored = on_restored
        self._ping_payloads = ping_payloads
        self._pulse = Pulse(interval_s, time.monotonic())
        self._healthy = True
        self._first_failure = True
        self._asked = False
        self._stopped = False
        self._pid = os.getpid()
        self._start_lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._wake = Wake()

    # --- for all threads ----------------------------------------------------------------------------------------

    @property
    def healthy(self) -> bool:
        """The server is there and knows us, as far as is known; never blocks. False in a forked child."""
        return self._healthy if os.getpid() == self._pid else False

    def start(self) -> None:
        """Start the thread unless it runs; does nothing after `stop` and in a forked child."""
        if self._thread is not None or os.getpid() != self._pid:
            return
        with self._start_lock:
            if self._thread is None and not self._stopped:
                self._connection.link.on_boot_id = self._note_boot_id
                self._thread = threading.Thread(
                    target=self._run, name="lmcache-q-heartbeat", daemon=True
                )
                self._thread.start()

    def stop(self) -> None:
        """End the thread and wait for it (as long as a callback of it may take to time out); idempotent."""
        if os.getpid() != self._pid:
            return
        with self._start_lock:
            self._stopped = True
            thread = self._thread
        self._wake.set()
        if thread is not None and thread is not threading.current_thread():
            if not self._healthy:  # a renewal under way need not wait for its time-out
                self._connection.link.fail_all(ConnectionError("the heartbeat was stopped"))
            thread.join(self._reply_timeout_s + JOIN_SLACK_S)
        if thread is None or not thread.is_alive():
            self._wake.close()

    def beat_now(self) -> None:
        """Ping at once, so that a report gets out."""
        if os.getpid() == self._pid:
            self._asked = True
            self._wake.set()

    def _note_boot_id(self, boot_id: bytes | None) -> None:
        self._wake.set()

    # --- the heartbeat's thread ---------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopped:
            try:
                self._turn()
            except (
                Exception
            ):  # a bug; the engine goes on without a heartbeat rather than without this thread
                logger.exception("the heartbeat of %s stumbled", self._connection.url)
                self._lose("of an internal error")

    def _turn(self) -> None:
        """Wait for what comes next, and do it."""
        if self._pulse.healthy:
            cause = self._gone() or self._sleep_until_due()
            if cause:
                self._lose(cause)
            elif not self._stopped and self._due():
                self._ping()
        else:
            self._sleep(self._pulse.wait_s(time.monotonic()), watch_lifeline=False)
            if not self._stopped and self._due():
                self._try_to_return()

    def _due(self) -> bool:
        return self._pulse.wait_s(time.monotonic()) == 0

    def _sleep_until_due(self) -> str:
        self._sleep(self._pulse.wait_s(time.monotonic()))
        return self._gone()

    def _sleep(self, seconds: float, watch_lifeline: bool = True) -> None:
        """Sleep until the time is over, the lifeline hangs up, or somebody sets the wake."""
        poll = select.poll()
        poll.register(self._wake.fileno(), select.POLLIN)
        lifeline = self._connection.lifeline
        if watch_lifeline and lifeline is not None and lifeline.fileno() >= 0:
            poll.register(lifeline.fileno(), select.POLLRDHUP)
        poll.poll(1000 * seconds)
        self._wake.clear()
        if self._asked:
            self._asked = False
            self._pulse.beat_now(time.monotonic())

    def _gone(self) -> str:
        """Why the server is known to be gone; empty when it is not."""
        connection = self._connection
        if connection.lifeline is not None and not connection.lifeline.is_open():
            return "its lifeline hung up"
        if connection.link.boot_id != connection.hello.boot_id:
            return "it has been restarted"
        return ""

    def _ping(self) -> None:
        future = self._connection.link.submit(PING, self._ping_payloads())
        future.add_done_callback(lambda _: self._wake.set())
        cause = self._wait_for_answer(future)
        if self._stopped:
            return
        if cause:
            self._lose(cause)
        elif future.result():
            self._pulse.answered(time.monotonic())
        else:
            self._register_again()

    def _wait_for_answer(self, future: ReplyFuture) -> str:
        """Why there is none; empty when there is one."""
        deadline = time.monotonic() + self._reply_timeout_s
        while not future.done() and not self._stopped:
            cause = self._gone()
            left = deadline - time.monotonic()
            if not cause and left <= 0:
                cause = f"it did not answer a ping within {self._reply_timeout_s:g} s"
            if cause:
                self._connection.link.forget(future)
                return cause
            self._sleep(left)
        if self._stopped:
            self._connection.link.forget(future)
            return ""
        error = future.exception()
        return f"a ping failed: {error}" if error is not None else self._gone()

    def _register_again(self) -> None:
        logger.warning(
            "the server at %s does not know this worker any more: registering again",
            self._connection.url,
        )
        self._healthy = False
        try:
            self._on_restored(self._connection.hello)
        except Exception as error:  # noqa: BLE001 - whatever it was, all is tried again
            self._lose(f"registering again failed: {error}")
        else:
            self._return()

    def _let_answers_arrive(self) -> None:
        """What the server answered before it went may be on its way through this process: it is not lost."""
        deadline = time.monotonic() + ARRIVE_S
        while self._connection.link.outstanding and time.monotonic() < deadline:
            time.sleep(ARRIVE_S / 20)

    def _lose(self, cause: str) -> None:
        self._healthy = False
        self._let_answers_arrive()
        self._pulse.lost(time.monotonic())
        self._first_failure = True
        url = self._connection.url
        logger.warning("lost the server at %s because %s: trying to come back", url, cause)
        self._connection.link.fail_all(ConnectionError(f"lost the server at {url} because {cause}"))
        try:
            self._on_lost()
        except Exception:
            logger.exception("on_lost failed; the heartbeat goes on")

    def _try_to_return(self) -> None:
        try:
            hello = self._connection.renew(self._reply_timeout_s)
            self._on_restored(hello)
        except Exception as error:
            self._pulse.failed(time.monotonic())
            expected = isinstance(error, ConnectionError | QServerError)
            level = logging.WARNING if self._first_failure else logging.DEBUG
            logger.log(
                level,
                "can't come back to %s yet: %s",
                self._connection.url,
                error,
                exc_info=not expected,
            )
            self._first_failure = False
        else:
            self._return()

    def _return(self) -> None:
        self._pulse.restored(time.monotonic())
        self._healthy = True
        logger.info("the server at %s is there, and knows this worker", self._connection.url)
