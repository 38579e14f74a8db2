"""One run: both work, the signal comes, and then all must be well."""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass

from tests.faults.actor import ANSWER_S, Actor
from tests.faults.audit import Presence
from tests.faults.page import Phase
from tests.faults.pattern import CHUNK
from tests.faults.reader import Reading
from tests.faults.scenario import Fault, Moment, Scenario, Victim
from tests.faults.stage import Stage
from tests.faults.worker import WorkerState

POLL_S = 0.0002
MOMENT_S = 0.05
"""Moments may pass unseen: then the victim is idle, and counted so."""


@dataclass(frozen=True)
class Outcome:
    """What a run showed.

    Attributes:
        under_way: what the victim was at when the signal came; "idle": nothing.
        stored: how much of the prompt is there afterwards: "all", "part", "none".
        gone_s: seconds until the server had let a dead client go; None when no client died.
        back_s: seconds until the worker was back at the new server, after the server had died.
    """

    under_way: str
    stored: str
    gone_s: float | None = None
    back_s: float | None = None


class Run:
    """One run on a stage; `play` it once.

    Raises:
        AssertionError: something is not as it must be.
    """

    def __init__(self, stage: Stage, scenario: Scenario) -> None:
        self.stage = stage
        self.scenario = scenario
        stage.raise_worker(scenario.same_id)
        stage.raise_reader()
        assert stage.worker is not None
        assert stage.reader is not None
        self.worker: Actor = stage.worker
        self.reader: Actor = stage.reader
        self.written = stage.new_tokens(scenario.num_tokens)
        self.read = self._something_stored()
        self.before: WorkerState = self.worker.ask("come_back")
        self.twin_before = stage.witness.state()
        self.twin_id = stage.new_request_id()

    def _something_stored(self) -> list[int]:
        """A prompt to read; of a new server there is one that this run has stored before."""
        stage = self.stage
        if not stage.readable:
            tokens = stage.new_tokens(6 * CHUNK + 11)
            self.worker.ask("store", stage.new_request_id(), tokens)
            stage.remember(tokens)
        return stage.readable[self.scenario.number % len(stage.readable)]

    def play(self) -> Outcome:
        """From the beginning to the last check."""
        self._begin()
        self._wait_for_the_moment()
        under_way = self._strike()
        victim = self.scenario.victim
        if not self.scenario.kills:
            outcome = self._all_survive(under_way)
        elif victim is Victim.WORKER:
            outcome = self._without_the_worker(under_way)
        elif victim is Victim.READER:
            outcome = self._without_the_reader(under_way)
        else:
            outcome = self._on_another_server(under_way)
        self.stage.remember(self.written, outcome.stored != "none")
        self.stage.look(self.read)
        self.stage.check_service()
        return outcome

    # --- until the signal ---------------------------------------------------------------------------------------

    def _begin(self) -> None:
        scenario, stage = self.scenario, self.stage
        stage.server_page.pause_s = scenario.store_pause_s
        self.reader.page.pause_s = scenario.read_pause_s
        self.worker.begin("store", stage.new_request_id(), self.written)
        self.reader.begin("retrieve", self.read)
        if scenario.twin:
            stage.witness.submit(self.twin_id, self.written)

    def _wait_for_the_moment(self) -> None:
        deadline = time.monotonic() + MOMENT_S
        while not self._is_the_moment() and time.monotonic() < deadline:
            time.sleep(POLL_S)
        time.sleep(self.scenario.delay_s)

    def _is_the_moment(self) -> bool:
        moment = self.scenario.moment
        if moment is Moment.COMPUTING:
            return self.worker.page.phase is Phase.COMPUTING
        if moment is Moment.STORING:
            return self.stage.server_page.copies_under_way > 0
        return moment is Moment.ANY or self.reader.page.phase is Phase.COPYING

    def _strike(self) -> str:
        """Send the signals; what the victim was at."""
        first = signal.SIGKILL if self.scenario.fault is Fault.KILL else signal.SIGSTOP
        self._send(first)
        under_way = self._what_was_under_way()
        if first is signal.SIGSTOP:
            time.sleep(self._stop_s())
            self._send(signal.SIGKILL if self.scenario.kills else signal.SIGCONT)
        return under_way

    def _stop_s(self) -> float:
        if self.scenario.fault is not Fault.LONG_PAUSE:
            return self.scenario.stop_s
        patience = self.stage.patience
        longest = max(patience.lease_timeout_s, patience.reap_timeout_s, patience.reply_timeout_s)
        return 2 * longest

    def _send(self, number: signal.Signals) -> None:
        victim = self.scenario.victim
        if victim is Victim.SERVER:
            process = self.stage.daemon.process
            process.send_signal(number)
            if number is signal.SIGKILL:
                process.wait(ANSWER_S)
        else:
            (self.worker if victim is Victim.WORKER else self.reader).signal(number)

    def _what_was_under_way(self) -> str:
        victim = self.scenario.victim
        writes, reads = self.worker.page.phase, self.reader.page.phase
        copies = self.stage.server_page.copies_under_way > 0
        if victim is Victim.WORKER:
            is_copied = writes is Phase.STORING and copies
            return "storing, being copied" if is_copied else writes.name.lower()
        if victim is Victim.READER:
            return reads.name.lower()
        if copies:
            return "copying into the pool"
        if reads is Phase.COPYING:
            return "being read under a lease"
        return "a request under way" if {writes, reads} - {Phase.IDLE, Phase.COMPUTING} else "idle"

    # --- after it -----------------------------------------------------------------------------------------------

    def _all_survive(self, under_way: str) -> Outcome:
        """Stopped and continued: all goes on as if nothing had been, unless somebody's patience was over."""
        state: WorkerState = self.worker.answer()
        reading: Reading = self.reader.answer()
        twin = self._end_of_twin()
        if self.scenario.fault is Fault.LONG_PAUSE:
            return self._after_a_long_pause(under_way, state, reading)
        self._check_account(state, lost=0)
        self._check_reading(reading)
        assert twin == (len(self.written) if self.scenario.twin else 0)
        return Outcome(under_way, self._stored(must_be="all"))

    def _after_a_long_pause(self, under_way: str, state: WorkerState, reading: Reading) -> Outcome:
        self._check_account(state)
        assert reading.right
        back: WorkerState = self.worker.ask("come_back")
        assert back.healthy
        assert back.free_blocks == back.blocks, back
        self.stage.witness.come_back()
        again: Reading = self.reader.ask("retrieve_at_last", self.read)
        self._check_reading(again)
        return Outcome(under_way, self._stored())

    def _without_the_worker(self, under_way: str) -> Outcome:
        gone_s = self.stage.wait_until_gone(self.stage.worker_id)
        self.stage.bury_worker()
        self._check_reading(self.reader.answer())
        twin = self._end_of_twin()
        if self.scenario.twin:
            assert twin == len(self.written), "the second writer takes over from the dead one"
        return Outcome(under_way, self._stored("all" if self.scenario.twin else ""), gone_s)

    def _without_the_reader(self, under_way: str) -> Outcome:
        gone_s = self.stage.wait_until_gone("")
        self.stage.bury_reader()
        self._check_account(self.worker.answer(), lost=0)
        self._end_of_twin()
        return Outcome(under_way, self._stored(must_be="all"), gone_s)

    def _on_another_server(self, under_way: str) -> Outcome:
        """Losses are counted, all come back, and nothing of the old server is taken for the new one's."""
        stage = self.stage
        stage.server_page.pause_s = 0.0
        began = time.monotonic()
        stage.restart_server()
        state: WorkerState = self.worker.answer()
        self._check_account(state)
        assert set(state.lost) - set(self.before.lost) <= {"server_unavailable"}, state
        reading: Reading = self.reader.answer()
        assert reading.right
        if self.scenario.twin:
            self._end_of_twin()
        back: WorkerState = self.worker.ask("come_back")
        back_s = time.monotonic() - began
        assert back.healthy
        assert back.free_blocks == back.blocks, f"blocks stay in quarantine: {back}"
        assert stage.witness.come_back().healthy
        again: Reading = self.reader.ask("retrieve_at_last", self.read)
        assert (again.tokens, again.error) == (0, ""), (
            f"of the old server's, the new one has {again}"
        )
        stored = self._stored(must_be="" if self._may_have_been_sent_late(state) else "none")
        self._store_and_read_anew()
        return Outcome(under_way, stored, back_s=back_s)

    def _may_have_been_sent_late(self, state: WorkerState) -> bool:
        """A worker that was still computing when the old server died may store at the new one."""
        return state.captured > self.before.captured or self.scenario.twin

    def _store_and_read_anew(self) -> None:
        """Other content lies now where the old server's objects lay."""
        tokens = self.stage.new_tokens(6 * CHUNK + 7)
        before: WorkerState = self.worker.ask("come_back")
        after: WorkerState = self.worker.ask("store", self.stage.new_request_id(), tokens)
        assert after.captured - before.captured == len(tokens), (before, after)
        self.stage.remember(tokens)
        reading: Reading = self.reader.ask("retrieve", tokens)
        assert (reading.tokens, reading.right) == (len(tokens), True), reading

    # --- checks -------------------------------------------------------------------------------------------------

    def _end_of_twin(self) -> int:
        """Tokens of the prompt that the second writer captured."""
        witness = self.stage.witness
        if self.scenario.twin:
            witness.settle(self.twin_id)
        after, before = witness.state(), self.twin_before
        assert after.pending == 0
        return after.captured - before.captured

    def _check_account(self, after: WorkerState, lost: int | None = None) -> None:
        """Every token of the prompt has come to rest; `lost` of them, if that is known."""
        before = self.before
        captured = after.captured - before.captured
        gone = sum(after.lost.values()) - sum(before.lost.values())
        assert after.pending == 0
        assert after.computed - before.computed == len(self.written)
        assert captured + gone == len(self.written), (before, after)
        if lost is not None:
            assert gone == lost, (before, after)

    def _check_reading(self, reading: Reading) -> None:
        assert not reading.error, reading
        assert reading.right, "wrong bytes"
        assert reading.tokens == len(self.read) or reading.reasons, reading

    def _stored(self, must_be: str = "") -> str:
        """How much of the prompt is there, all of it right; by then nothing is left of who died in the middle."""
        self.stage.wait_until_clean()
        presence: Presence = self.stage.look(self.written)
        there = "part" if presence.present else "none"
        there = there if presence.missing else "all"
        assert not must_be or there == must_be, presence
        return there
