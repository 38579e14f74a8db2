"""vLLM's own scheduler, driven as `EngineCore` drives it, with the runner and the worker of this folder behind it.

The loop is `EngineCore.step` (one step at a time) or `step_with_batch_queue` (some under way at once: asynchronous
scheduling, pipelines), including where aborts are heard: before a step is scheduled, and again just before its output
is handed to the scheduler.
"""

from __future__ import annotations

import functools
from collections import Counter, deque
from collections.abc import Callable
from random import Random
from typing import Any

import torch
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from lmcache_qclient.capture.finished_chunk import FinishedChunk
from lmcache_qclient.capture.step import StepMeta
from lmcache_qclient.identity.embeddings import embeds_item
from lmcache_qprotocol.hashing import NONE_HASH, chunk_hash, chunk_hashes, root_hash
from lmcache_qprotocol.identity import Identity, LoraIdentity
from lmcache_qprotocol.limits import MAX_SALT_CHARS
from lmcache_qprotocol.messages import IdentityClaim
from tests.scheduler.engine_config import cache_groups, vllm_config
from tests.scheduler.expected import Life, Ran, fates, foretold, most, positions, spans
from tests.scheduler.model import queries, root, states
from tests.scheduler.runner import VOCABULARY, Forward, Runner
from tests.scheduler.scenario import Scenario
from tests.scheduler.wishes import Wish, draw_wish, selected
from tests.scheduler.worker import Worker
from tests.worker_client.capture.fake_adapter import Stored

Span = tuple[str, int, int]
"""Request id and positions [from, to)."""
TUNED = LoraIdentity("tune", "/tune")
STOP = 7
MOST_ROUNDS = 3000


class Engine:
    """See the head of this file.

    Attributes:
        lives: every request ever added, and what was computed of it.
        steps: calls of `schedule`.
        seen: what happened, for tests that must not be about nothing.
    """

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.random = Random(scenario.seed)
        self.lives: list[Life] = []
        self.alive: dict[str, Life] = {}
        self.steps = 0
        self.seen: Counter[str] = Counter()
        family = scenario.family
        config, groups = vllm_config(scenario), cache_groups(scenario)
        kind = AsyncScheduler if family.asynchronous else Scheduler
        self.scheduler = kind(
            vllm_config=config,
            kv_cache_config=groups,
            structured_output_manager=StructuredOutputManager(config),
            block_size=scenario.block_size,
        )
        self.scheduler.use_v2_model_runner = family.new_form
        self.guard = self.scheduler.connector._tracker
        self.worker = Worker(self.random, scenario, groups)
        self.runner = Runner(
            self.random,
            lambda name: self.alive[name].root,
            block_size=scenario.block_size,
            num_blocks=scenario.num_blocks,
            group_index=1 if scenario.groups == "window+full" else 0,
            accept=scenario.accept,
            drafts=scenario.drafts,
            asynchronous=family.asynchronous,
            new_form=family.new_form,
            scattered=scenario.scattered,
        )
        self._make_hooks_fail()
        self._hasher = get_request_block_hasher(scenario.block_size, sha256)
        self._under_way: deque[tuple[Any, Forward | None]] = deque()
        self._texts = [
            [self.random.randrange(VOCABULARY) for _ in range(scenario.max_length)]
            for _ in range(3)
        ]
        self._arrived = 0
        self._last_step: StepMeta | None = None

    def _make_hooks_fail(self) -> None:
        """Let the tracker's hooks raise now and then, as a bug or an engine of another version would."""
        tracker = self.guard._tracker

        def failing(hook: Callable[..., Any], *arguments: Any) -> Any:
            if self.random.random() < self.scenario.faults:
                self.seen["hook failed"] += 1
                raise RuntimeError("on purpose")
            return hook(*arguments)

        for name in ("request_allocated", "request_finished", "build", "_step"):
            setattr(tracker, name, functools.partial(failing, getattr(tracker, name)))

    # --- traffic ----------------------------------------------------------------------------------------------

    def add(
        self,
        name: str,
        prompt: list[int],
        outputs: int,
        *,
        salt: str | None = None,
        lora: bool = False,
        embedded: bool = False,
        unnameable: bool = False,
        stops: bool = False,
        priority: int = 0,
        wish: Wish | None = None,
    ) -> None:
        """A request arrives."""
        embeds = None
        if embedded:
            generator = torch.Generator().manual_seed(self.random.randrange(1 << 30))
            embeds = torch.randn(len(prompt), 2, generator=generator)
        if unnameable:
            salt = "x" * (MAX_SALT_CHARS + 1)
        request = Request(
            name,
            None if embedded else prompt,
            SamplingParams(
                max_tokens=outputs,
                stop_token_ids=[STOP] if stops else None,
                ignore_eos=True,
                extra_args=None if wish is None else wish.extra_args,
            ),
            None,
            arrival_time=float(self._arrived),
            prompt_embeds=embeds,
            lora_request=LoRARequest("tune", 1, "/tune") if lora else None,
            cache_salt=salt,
            priority=priority,
            block_hasher=self._hasher,
        )
        self._arrived += 1
        # vLLM's prefix cache takes no salt and an empty one for the same.
        content = None if embeds is None else embeds_item(embeds).digest
        life = Life(
            request,
            root(salt or "", lora, content),
            nameable=not unnameable,
            selected=selected(self.scenario, wish, name, len(prompt)),
        )
        self.seen["selected otherwise than the engine says"] += wish is not None
        self.lives.append(life)
        self.alive[name] = life
        self.scheduler.add_request(request)

    def add_random(self) -> None:
        """A request as the scenario has them: often with the beginning of another."""
        random, most = self.random, self.scenario.max_length - 1
        shared = random.choice(self._texts)[: random.choice([0, 0, 16, 33, 64, most])]
        own = [random.randrange(VOCABULARY) for _ in range(random.choice([0, 1, 9, 40, 100]))]
        prompt = [*shared, *own][:most] or [1]
        outputs = random.choice([1, 2, 11, 17, 26, 101])
        if random.random() < 0.4:  # ends just where a chunk does
            outputs += -(len(prompt) + outputs) % self.scenario.chunk_size
        name = f"r{self._arrived}"
        ended = sorted({life.request.request_id for life in self.lives} - set(self.alive))
        if self.scenario.reuse_ids and ended and random.random() < 0.4:
            name = random.choice(ended)
        self.add(
            name,
            prompt,
            outputs,
            salt=random.choice([None, None, None, "", "a salt"]),
            lora=random.random() < 0.15,
            embedded=random.random() < 0.08,
            unnameable=random.random() < 0.04,
            stops=random.random() < self.scenario.stop,
            priority=random.randint(0, 2),
            wish=draw_wish(random, self.scenario),
        )

    def _abort(self, chance: float) -> None:
        if self.alive and self.random.random() < chance:
            name = self.random.choice(sorted(self.alive))
            self.seen["aborted"] += 1
            self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
            self._forget_ended()

    def _disturb(self) -> None:
        """What reaches an engine between two steps."""
        scenario, random = self.scenario, self.random
        self._abort(scenario.abort)
        if random.random() < scenario.reset:
            self.seen["reset"] += 1
            self.scheduler.reset_prefix_cache(reset_running_requests=random.random() < 0.7)
        if self.scheduler.pause_state != PauseState.UNPAUSED:
            if random.random() < 0.4:
                self.scheduler.set_pause_state(PauseState.UNPAUSED)
        elif random.random() < scenario.pause:
            self.seen["paused"] += 1
            self.scheduler.set_pause_state(
                random.choice([PauseState.PAUSED_NEW, PauseState.PAUSED_ALL])
            )

    def _forget_ended(self) -> None:
        for name in [name for name, life in self.alive.items() if life.request.is_finished()]:
            del self.alive[name]

    # --- the loop ---------------------------------------------------------------------------------------------

    def run(self) -> None:
        """All of the scenario's requests, to the end."""
        left = self.scenario.requests
        for _ in range(MOST_ROUNDS):
            while left and (not self.alive or self.random.random() < 0.25):
                self.add_random()
                left -= 1
            self._disturb()
            if not self.busy and not left:
                break
            self.round()
        assert not self.busy, "the engine does not come to an end"
        self.check_over()

    def finish(self) -> None:
        """Until nothing is left, with the step that only tells of the last ends."""
        for _ in range(MOST_ROUNDS):
            if not self.busy:
                break
            self.round()
        self.check_over()

    def run_rounds(self, rounds: int) -> None:
        """Some rounds of what has been added."""
        for _ in range(rounds):
            self._disturb()
            self.round()

    def stop(self) -> None:
        """The worker shuts down in the middle."""
        self.worker.capture.shutdown()
        self.worker.check_over()
        self._stored()

    @property
    def busy(self) -> bool:
        """Requests (a paused scheduler denies having them), or news of ended ones, are left."""
        return bool(self.alive or self.scheduler.has_requests() or self._under_way)

    def round(self) -> None:
        """`EngineCore.step`, or `step_with_batch_queue`."""
        depth, executed = self.scenario.family.depth, False
        if self.scheduler.has_requests():
            output = self.scheduler.schedule()
            self._under_way.append((output, self._execute(output)))
            executed = output.total_num_scheduled_tokens > 0
            if len(self._under_way) < depth and (executed or self.scheduler.has_requests()):
                return
        if not self._under_way:
            return
        output, forward = self._under_way.popleft()
        self._abort(self.scenario.abort / 2)
        self._deliver(output, forward)
        if self.scenario.drafts and executed:
            drafts = self.runner.proposed
            self.scheduler.update_draft_token_ids(DraftTokenIds([*drafts], [*drafts.values()]))
        if self.random.random() < self.scenario.idle:
            self._idle()

    def _idle(self) -> None:
        """No step comes for a while, as far as the worker can see."""
        if not self.scenario.beside:
            self.seen["idle apart"] += 1
            self.worker.idle(None)
            return
        ended = self.guard.ended_since(self._last_step, most=2)
        self.seen["ended while idle"] += len(ended)
        self.worker.idle(ended)

    def _execute(self, output: Any) -> Forward | None:
        self.steps += 1
        self._last_step = output.kv_connector_metadata.step
        self._note(output)
        forward = self.runner.execute(output)
        self.worker.step(
            output.kv_connector_metadata.step, output.total_num_scheduled_tokens, forward
        )
        assert self.guard.failures == self.seen["hook failed"], "a hook has failed: see the log"
        return forward

    def _note(self, output: Any) -> None:
        """Write every request's part of the step into its life."""
        cached = output.scheduled_cached_reqs
        parts = [
            (data.req_id, data.num_computed_tokens, bool(self.alive[data.req_id].steps), "new")
            for data in output.scheduled_new_reqs
        ]
        for name, start in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            parts.append((name, start, name in cached.resumed_req_ids, "cached"))
        for name, start, resumed, form in parts:
            count = output.num_scheduled_tokens[name]
            guesses = output.scheduled_spec_decode_tokens.get(name, ())
            drafts = len(guesses)
            self.alive[name].steps.append(Ran(start, count, drafts, resumed))
            self.seen[f"resumed as {form}"] += resumed
            self.seen["prefix hit"] += bool(start and len(self.alive[name].steps) == 1)
            self.seen["drafts"] += bool(drafts)
            self.seen["drafts padded"] += -1 in guesses
        assert len(parts) == len(output.num_scheduled_tokens)

    def _deliver(self, output: Any, forward: Forward | None) -> None:
        sampled = forward.sampled if forward is not None else {}
        self.scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=[*sampled],
                req_id_to_index={name: index for index, name in enumerate(sampled)},
                sampled_token_ids=[list(tokens) for tokens in sampled.values()],
            ),
        )
        self._forget_ended()

    # --- what must hold in the end ------------------------------------------------------------------------------

    def check_over(self) -> None:
        """Nothing is left, every stored chunk is right, and the account agrees with the requests' lives."""
        self.worker.check_over()
        assert self.guard._tracker._requests == {}, "the tracker keeps ended requests"
        assert self.worker.computed == sum(life.computed for life in self.lives)
        self.seen["server gone"] += self.worker.adapter.outages
        if self.runner.misled:
            # vLLM 0.32: a request that priority scheduling preempts in the step that it was scheduled in leaves blocks
            # in the prefix cache that nobody computes. The engine's own answers are wrong from there on, so no row of
            # this scenario can be compared with the truth.
            assert self.scenario.priority
            self.seen["vLLM misled itself"] += 1
            return
        self._check_account(self._stored())

    def _stored(self) -> Counter[Span]:
        """How often each span was stored, all of them compared with the truth."""
        stored: Counter[Span] = Counter()
        times: Counter[tuple[int, ...]] = Counter()
        for item in self.worker.adapter.stored:
            chunk = item.chunk
            stored[chunk.request_id, chunk.start, chunk.end] += 1
            owners = self._owners(item)
            assert owners, f"{chunk} does not hold the rows of its request"
            # Of requests with one id and one text nobody can say whose it is.
            names = tuple(id(life) for life in owners)
            times.update((*names, position) for position in range(chunk.start, chunk.end))
        again = {key for key, count in times.items() if count > len(key) - 1}
        assert not again, f"positions that are stored more than once: {sorted(again)}"
        return stored

    def _owners(self, item: Stored) -> list[Life]:
        """The requests (of one id) whose rows these are: exactly, by name and by every element."""
        chunk, rows = item.chunk, self.worker.rows(item)
        found = []
        for life in self.lives:
            tokens = life.tokens[: chunk.end]
            if life.request.request_id != chunk.request_id or len(tokens) < chunk.end:
                continue
            truth = states(life.root, tokens)[chunk.start :]
            right = rows == queries(truth, range(chunk.start, chunk.end))
            wanted = life.of_selected(chunk.start, chunk.end) == chunk.tokens
            if wanted and right.all() and self._is_named(chunk, tokens, life.request):
                found.append(life)
        return found

    def _is_named(self, chunk: FinishedChunk, tokens: list[int], request: Any) -> bool:
        size, pieces = self.scenario.chunk_size, self.scenario.pieces
        base = chunk.start // size * size
        lora = None if request.lora_request is None else TUNED
        embeds = request.prompt_embeds
        identity = Identity(lora, () if embeds is None else (embeds_item(embeds),))
        parent = [root_hash(identity), *chunk_hashes(tokens[:base], size, identity)][-1]
        own = tuple(tokens[base:])
        inside = () if base else identity.items
        plain = [NONE_HASH, *chunk_hashes(tokens[:base], size)][-1]
        claim = IdentityClaim(plain_parent_hash=plain, lora=lora, items=identity.items)
        return (
            0 < len(own) <= size
            and (pieces or (chunk.start, len(own)) == (base, size))
            and chunk.chunk_hash == chunk_hash(parent, own, base, inside)
            and chunk.cache_salt == (request.cache_salt or "")
            and chunk.parent_hash == (parent if pieces else None)
            and chunk.piece_tokens == (own if pieces else ())
            and chunk.piece_items == (inside if pieces else ())
            and chunk.claim == (claim if pieces else None)
        )

    def _check_account(self, stored: Counter[Span]) -> None:
        scenario, lives, outcomes = self.scenario, self.lives, self.worker.outcomes()
        beyond = outcomes - most(scenario, lives)
        assert not beyond, f"more tokens than can be: {beyond}"
        preempted = any(life.was_preempted for life in lives)
        if foretold(scenario, lives):
            self.seen["foretold"] += 1
            expected: Counter[str] = sum((fates(scenario, life) for life in lives), Counter())
            assert +outcomes == +expected
        split = scenario.idle and not scenario.beside  # idle times cut chunks in pieces
        if foretold(scenario, lives) and not preempted and not split:
            assert stored == self._must_be_stored(lambda life: life.steps)
        elif foretold(scenario, lives) and not preempted:
            self.seen["foretold with idle times"] += 1
            assert _spelled(stored) == _spelled(self._must_be_stored(lambda life: life.steps))
        elif foretold(scenario, lives):
            self.seen["foretold with preemption"] += 1
            all_of_them = Counter(
                (life.request.request_id, at) for life in lives for at in positions(life)
            )
            assert _spelled(stored) == all_of_them
        elif scenario.roomy:
            must = _spelled(self._must_be_stored(lambda life: life.last_run))
            missing = must - _spelled(stored)
            assert not missing, f"computed since the last preemption, not stored: {missing}"

    def _must_be_stored(self, steps: Callable[[Life], list[Ran]]) -> Counter[Span]:
        return Counter(
            (life.request.request_id, *span)
            for life in self.lives
            for span in spans(self.scenario, life, steps(life))
        )


def _spelled(stored: Counter[Span]) -> Counter[tuple[str, int]]:
    """How often each position of each request id was stored."""
    found: Counter[tuple[str, int]] = Counter()
    for (name, start, end), count in stored.items():
        for position in range(start, end):
            found[name, position] += count
    return found


def simulate(scenario: Scenario) -> Engine:
    """Run a scenario to its end.

    Raises:
        AssertionError: something did not hold; the message tells the scenario.
    """
    try:
        engine = Engine(scenario)
        engine.run()
    except Exception as error:
        raise AssertionError(f"{error}\nin {scenario}") from error
    return engine
