"""What happens in one run, drawn from a seed. When the signal really meets the work, the machine decides."""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import Enum

from tests.faults.pattern import CHUNK


class Victim(Enum):
    """Who gets the signal."""

    WORKER = "worker"
    READER = "reader"
    SERVER = "server"


class Fault(Enum):
    """What it gets."""

    KILL = "SIGKILL"
    PAUSE = "SIGSTOP, SIGCONT"
    """For a shorter time than anybody's patience."""
    PAUSE_AND_KILL = "SIGSTOP, SIGKILL"
    LONG_PAUSE = "SIGSTOP beyond all time-outs, SIGCONT"


class Moment(Enum):
    """What the signal waits for, besides a random delay."""

    ANY = "any time"
    COMPUTING = "the worker writes rows"
    STORING = "the server copies"
    READING = "the reader copies"


@dataclass(frozen=True)
class Scenario:
    """One run.

    Attributes:
        number: of the run; tokens and request ids come from it.
        delay_s: after the moment, or after both have begun.
        stop_s: how long a stopped process stays so.
        store_pause_s, read_pause_s: of each chunk's copy, half way.
        chunks, tail: length of the stored prompt, chunks and tokens.
        twin: another worker stores the same prompt at the same time.
        same_id: the next worker comes back under the same instance id.
    """

    number: int
    victim: Victim
    fault: Fault
    moment: Moment
    delay_s: float
    stop_s: float
    store_pause_s: float
    read_pause_s: float
    chunks: int
    tail: int
    twin: bool
    same_id: bool

    @property
    def kills(self) -> bool:
        """The victim does not survive."""
        return self.fault in (Fault.KILL, Fault.PAUSE_AND_KILL)

    @property
    def num_tokens(self) -> int:
        """Of the stored prompt."""
        return self.chunks * CHUNK + self.tail


MOMENTS = {
    Victim.WORKER: (Moment.ANY, Moment.COMPUTING, Moment.STORING),
    Victim.READER: (Moment.ANY, Moment.READING, Moment.READING),
    Victim.SERVER: (Moment.ANY, Moment.STORING, Moment.READING),
}
VICTIMS, VICTIM_WEIGHTS = (Victim.WORKER, Victim.READER, Victim.SERVER), (4, 4, 1)
FAULTS = (Fault.KILL, Fault.PAUSE, Fault.PAUSE_AND_KILL)
LONG_PAUSE_SHARE = 0.02
MAX_PAUSE_S = 0.006


def draw(seed: int, number: int) -> Scenario:
    """Run `number` of a campaign; the same for the same arguments."""
    dice = random.Random(f"{seed} {number}")
    victim = dice.choices(VICTIMS, VICTIM_WEIGHTS)[0]
    is_long = dice.random() < LONG_PAUSE_SHARE
    is_paced = dice.random() < 0.9
    moment = dice.choice(MOMENTS[victim])
    return Scenario(
        number=number,
        victim=victim,
        fault=Fault.LONG_PAUSE if is_long else dice.choice(FAULTS),
        moment=moment,
        delay_s=dice.uniform(0.0, 0.01 if moment is Moment.ANY else MAX_PAUSE_S),
        stop_s=dice.uniform(0.005, 0.05),
        store_pause_s=dice.uniform(0.0005, MAX_PAUSE_S) if is_paced else 0.0,
        read_pause_s=dice.uniform(0.0005, MAX_PAUSE_S) if is_paced else 0.0,
        chunks=dice.randint(3, 8),
        tail=dice.choice((0, dice.randint(1, CHUNK - 1))),
        twin=dice.random() < 0.3,
        same_id=dice.random() < 0.5,
    )
