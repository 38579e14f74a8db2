"""The scheduler's side: what each step computes, told to the worker as a `StepMeta`.

vLLM hands out requests and block ids piecemeal; this keeps, per request, the block ids of the reference group, how many
token ids the worker knows, and vLLM's own `Request` (for token ids that become known later). Duck-typed: no import of
vLLM.

What was missed once (a hook that failed, a request that was never announced) makes a request *strange*: its blocks and
token ids may be wrong from then on, so all its later steps say `skip`, and its tokens are counted as capture_disabled.
"""

from __future__ import annotations

import contextlib
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lmcache_qclient.capture.step import FinishedRequest, RequestStep, StepMeta
from lmcache_qclient.vllm.adapters import Adapters
from lmcache_qclient.vllm.identity import request_identity
from lmcache_qclient.vllm.selection import Selection
from lmcache_qprotocol.identity import PLAIN, Identity
from lmcache_qprotocol.reasons import LossReason


@dataclass
class _Tracked:
    request: Any
    block_ids: list[int] = field(default_factory=list)
    tokens_sent: int = 0
    announced: bool = False
    strange: bool = False


class ScheduleTracker:
    """See the head of this file.

    Args:
        group_index: the cache group whose block ids attribute rows.
        block_size: tokens per block of that group.
        selection: which requests and tokens are captured; None for all.
    """

    def __init__(
        self, group_index: int, block_size: int, selection: Selection | None = None
    ) -> None:
        self._selection = selection or Selection()
        self.group_index = group_index
        self.block_size = block_size
        self._requests: dict[str, _Tracked] = {}
        self._finished: deque[FinishedRequest] = deque()
        self._adapters = Adapters()

    def request_allocated(self, request: Any) -> None:
        """vLLM gives a waiting request its blocks: new, or resumed."""
        known = self._requests.get(request.request_id)
        if known is None or known.request is not request:
            self._requests[request.request_id] = _Tracked(request)

    def request_finished(self, request: Any) -> None:
        """A request has ended, for whatever cause; its final tokens go out with the next step."""
        tracked = self._requests.get(request.request_id)
        if tracked is None or not tracked.announced or tracked.strange:
            self.lose_request(request.request_id)
            return
        sent, tokens = _tokens_from(tracked)
        ended = FinishedRequest(request.request_id, request.num_tokens, tokens, sent)
        del self._requests[request.request_id]
        self._finished.append(ended)

    def build(self, output: Any) -> StepMeta:
        """The step that a `SchedulerOutput` stands for. When it raises, call `lose_step`."""
        self._doubt_changed_adapters()
        steps = [self._new(data, output) for data in output.scheduled_new_reqs]
        cached = output.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids):
            blocks, start = cached.new_block_ids[index], cached.num_computed_tokens[index]
            resumed = request_id in cached.resumed_req_ids
            tracked = self._known(request_id)
            if resumed:
                tracked.block_ids.clear()
            if blocks is not None:
                tracked.block_ids.extend(blocks[self.group_index])
            steps.append(self._step(request_id, tracked, start, output, resumed))
        return StepMeta(tuple(steps), self.take_finished())

    def lose_step(self, output: Any) -> StepMeta:
        """What can be told of a step whose `build` has raised: who has ended before, and how many tokens it computes.

        Every request may have missed something, so none is captured any more.
        """
        for tracked in self._requests.values():
            tracked.strange = True
        return StepMeta((), self.take_finished(), untold=_scheduled_tokens(output))

    def lose_request(self, request_id: str) -> None:
        """A request has ended and nothing of it can be told: what it has open is not to be stored."""
        tracked = self._requests.pop(request_id, None)
        if tracked is not None and tracked.announced:
            self._finished.append(FinishedRequest(request_id, skip=LossReason.CAPTURE_DISABLED))

    def take_finished(self, most: int = sys.maxsize) -> tuple[FinishedRequest, ...]:
        """The next ends that have not been told yet. Each is told once, also when two threads ask."""
        taken: list[FinishedRequest] = []
        with contextlib.suppress(IndexError):
            while len(taken) < most:
                taken.append(self._finished.popleft())
        return tuple(taken)

    def _known(self, request_id: str) -> _Tracked:
        if request_id not in self._requests:
            self._requests[request_id] = _Tracked(None, strange=True)
        return self._requests[request_id]

    def _new(self, data: Any, output: Any) -> RequestStep:
        tracked = self._known(data.req_id)
        # Model runner V2 brings a resumed request as a new one.
        resumed = tracked.announced
        tracked.block_ids = list(data.block_ids[self.group_index])
        return self._step(data.req_id, tracked, data.num_computed_tokens, output, resumed)

    def _step(
        self, request_id: str, tracked: _Tracked, start: int, output: Any, resumed: bool
    ) -> RequestStep:
        count = output.num_scheduled_tokens[request_id]
        drafts = len(output.scheduled_spec_decode_tokens.get(request_id, ()))
        if tracked.strange:
            return _strange(request_id, tracked, start, count, resumed)
        first_block = start // self.block_size
        last_block = (start + count - 1) // self.block_size
        first = not tracked.announced
        tracked.announced = True
        identity, skip, positions = PLAIN, None, None  # type: tuple[Identity, LossReason | None, Any]
        if first:
            identity, skip, positions = self._first_seen(tracked.request)
        sent, tokens = _tokens_from(tracked)
        return RequestStep(
            request_id=request_id,
            start=start,
            count=count,
            block_ids=tuple(tracked.block_ids[first_block : last_block + 1]),
            settled=start + count - drafts,
            new_tokens=tokens,
            first=first,
            resumed=resumed,
            cache_salt=(tracked.request.cache_salt or "") if first and skip is None else "",
            identity=identity,
            skip=skip,
            tokens_from=sent,
            selected=positions,
        )

    def _first_seen(
        self, request: Any
    ) -> tuple[Identity, LossReason | None, tuple[int, int] | None]:
        """Identity, why nothing of it is captured (if so), and the positions that are (None: all)."""
        identity, skip = self._identity(request)
        choice = self._selection.of(request)
        if skip is None and not choice.captured:
            return PLAIN, LossReason.NOT_SELECTED, None
        return identity, skip, choice.positions

    def _identity(self, request: Any) -> tuple[Identity, LossReason | None]:
        """What besides token ids the request's tensors depend on, and why it can't be captured, if so."""
        if request.lora_request is not None:
            self._adapters.note_in_use(request.lora_request, self._loras().values())
        identity = request_identity(request, self._adapters)
        if identity is not None:
            return identity, None
        self._lose_doubtful()
        return PLAIN, LossReason.CAPTURE_DISABLED

    def _doubt_changed_adapters(self) -> None:
        """Before a step: vLLM may load an adapter's files again in any (`load_inplace`, or after it had to go)."""
        distinct = {
            (lora.lora_name, lora.lora_path): lora
            for name, lora in self._loras().items()
            if self._requests[name].announced
        }
        sure = [self._adapters.identity(lora) is not None for lora in distinct.values()]
        if not all(sure):
            self._lose_doubtful()

    def _lose_doubtful(self) -> None:
        for name, lora in self._loras().items():
            if self._adapters.is_doubtful(lora):
                self._requests[name].strange = True

    def _loras(self) -> dict[str, Any]:
        """`LoRARequest`s of the requests under way, by request id."""
        loras = {
            name: getattr(tracked.request, "lora_request", None)
            for name, tracked in self._requests.items()
            if tracked.request is not None
        }
        return {name: lora for name, lora in loras.items() if lora is not None}


def _strange(
    request_id: str, tracked: _Tracked, start: int, count: int, resumed: bool
) -> RequestStep:
    first = not tracked.announced
    tracked.announced = True
    return RequestStep(
        request_id,
        start,
        count,
        block_ids=(),
        settled=start,
        first=first,
        resumed=resumed,
        skip=LossReason.CAPTURE_DISABLED,
    )


def _tokens_from(tracked: _Tracked) -> tuple[int, tuple[int, ...]]:
    """How many token ids were told before, and those that have become known since."""
    sent = tracked.tokens_sent
    tokens: Sequence[int] = tracked.request.all_token_ids[sent:]
    tracked.tokens_sent += len(tokens)
    return sent, tuple(tokens)


def _scheduled_tokens(output: Any) -> int:
    try:
        return int(sum(output.num_scheduled_tokens.values()))
    except Exception:  # noqa: BLE001 - the output is what has failed before; 0 is all that is known then
        return 0
