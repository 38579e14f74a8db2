"""One random engine with its traffic: everything that a simulated run depends on."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import ClassVar


@dataclass(frozen=True)
class Family:
    """What kind of engine.

    Attributes:
        asynchronous: vLLM's `AsyncScheduler`; token ids are known one step late.
        new_form: a resumed request comes as a new one (model runner V2), else among the cached ones (V1).
        depth: steps that may be under way at once.
        stages: pipeline stages.
        drafts: most draft tokens a step (n-gram speculation); 0 for none.
    """

    name: str
    asynchronous: bool = False
    new_form: bool = False
    depth: int = 1
    stages: int = 1
    drafts: int = 0


FAMILIES = (
    Family("plain-v1"),
    Family("plain-v2", new_form=True),
    Family("drafts-v1", drafts=4),
    Family("drafts-v2", drafts=4, new_form=True),
    Family("async-v1", asynchronous=True, depth=2),
    Family("async-v2", asynchronous=True, depth=2, new_form=True),
    Family("pipeline-v1", depth=2, stages=2),
    Family("async-pipeline-v2", asynchronous=True, depth=3, stages=2, new_form=True),
)


@dataclass(frozen=True)
class Scenario:
    """See the head of this file.

    Attributes:
        block_size, num_blocks: the engine's cache; block 0 is never used.
        groups: "full", "window", or "window+full" (the reference group is the second then).
        chunk_size: tokens per chunk.
        budget, long_prefill: most tokens a step, and most of one prompt (0 for no limit).
        max_running, max_length: requests at once, tokens of one request.
        drafts: tokens that the engine guesses a step.
        accept: chance (0 to 1) of a draft to be right.
        priority: priority scheduling, else first come first served.
        reserve: admit a request only when the whole of it fits.
        pieces: parts of chunks are stored as well.
        ring_blocks: blocks of the ring.
        answer: chance (0 to 1) a step that a store under way is answered.
        refuse: chance (0 to 1) that the answer is "no room".
        outage: chance per step that the server is gone for a while.
        requests: how many arrive.
        stop, abort, reset, pause: chance of a request to have a stop token, and per step of an abort, of a cache reset
            that preempts all, of a pause.
        faults: chance per step that something of ours fails: a hook beside the scheduler, a layer's hook, a row's slot.
        reuse_ids: a request may get the id of one that has ended.
        scattered: rows of one request need not be neighbours in a batch.
        idle: chance per round that no step follows for a while.
        beside: the worker runs in the scheduler's process, and can ask it then who has ended.
        tokens, sample: what the engine captures of requests that say nothing: which tokens, and which share of them.
        asks: chance of a request to say something of itself.
        reclaim_first: as vLLM does it with drafts: finished stores are taken back before the step's are sent.
    """

    AMPLE: ClassVar[int] = 600

    family: Family
    seed: int
    block_size: int = 16
    num_blocks: int = 1000
    groups: str = "full"
    chunk_size: int = 32
    budget: int = 64
    long_prefill: int = 0
    max_running: int = 4
    max_length: int = 180
    drafts: int = 0
    accept: float = 0.0
    priority: bool = False
    reserve: bool = True
    pieces: bool = True
    ring_blocks: int = AMPLE
    answer: float = 1.0
    refuse: float = 0.0
    outage: float = 0.0
    requests: int = 10
    stop: float = 0.0
    abort: float = 0.0
    reset: float = 0.0
    pause: float = 0.0
    faults: float = 0.0
    reuse_ids: bool = False
    scattered: bool = False
    reclaim_first: bool = False
    idle: float = 0.0
    beside: bool = True
    tokens: str = "all"
    sample: float = 1.0
    asks: float = 0.0

    @property
    def roomy(self) -> bool:
        """Whether nothing is lost for want of room, here or at the server, and nothing of ours fails."""
        trouble = self.refuse + self.outage + self.faults
        return self.ring_blocks >= self.AMPLE and trouble == 0.0


def draw(family: Family, seed: int) -> Scenario:
    """A random scenario: half of them with little cache, and half of them, others, with trouble on our side."""
    random = Random(f"{family.name} {seed}")
    block_size = random.choice([8, 16])
    max_length = random.choice([90, 150, 200])
    needed = -(-max_length // block_size) + 1
    tight, trouble = random.random() < 0.5, random.random() < 0.5
    small_ring, busy_server, faulty = (
        trouble and random.random() < chance for chance in (0.5, 0.6, 0.4)
    )
    groups = random.choice(["full", "full", "full", "window", "window+full"])
    if groups == "window+full":
        needed *= 2
    drafts = random.randint(1, family.drafts) if family.drafts else 0
    return Scenario(
        family,
        seed,
        block_size=block_size,
        num_blocks=needed + random.randint(1, needed) if tight else 1000,
        groups=groups,
        chunk_size=random.choice([16, 32]),
        budget=random.choice([13, 23, 37, 61, 101, 203]) + 4 * drafts,
        long_prefill=random.choice([0, 0, 19]),
        max_running=random.choice([2, 3, 5]),
        max_length=max_length,
        drafts=drafts,
        accept=random.choice([0.2, 0.7, 0.95]),
        priority=random.random() < 0.3,
        reserve=random.random() < 0.5,
        pieces=random.random() < 0.6,
        ring_blocks=random.choice([1, 3, 6, 12]) if small_ring else Scenario.AMPLE,
        answer=0.4 if busy_server else 1.0,
        refuse=0.2 if busy_server and random.random() < 0.5 else 0.0,
        outage=0.05 if busy_server and random.random() < 0.5 else 0.0,
        requests=random.randint(4, 9),
        stop=random.choice([0.0, 0.5]),
        abort=random.choice([0.0, 0.0, 0.06]),
        reset=random.choice([0.0, 0.0, 0.05]),
        pause=random.choice([0.0, 0.0, 0.05]),
        faults=0.04 if faulty else 0.0,
        reuse_ids=family.depth == 1 and random.random() < 0.5,
        scattered=random.random() < 0.3,
        reclaim_first=bool(drafts),
        idle=random.choice([0.0, 0.1]),
        beside=random.random() < 0.5,
        tokens=random.choice(["all", "all", "prompt", "decode"]),
        sample=random.choice([1.0, 1.0, 0.6]),
        asks=random.choice([0.0, 0.5]),
    )
