"""vLLM's OpenAI server over HTTP: what clients asked is found by token ids, row by row, under the salt they sent."""

from __future__ import annotations

import concurrent.futures
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from lmcache_qserver.testing.daemon import RunningDaemon, running_daemon, wait_until
from tests.e2e.engine_process import transfer_config
from tests.e2e.openai_server import OpenAIServer, running_server
from tests.e2e.test_vllm import MODEL, ROOT, TRANSFER, prompt

pytestmark = pytest.mark.vllm

CHUNK = 64
TOLERANCE = 5e-5
SALT = "tenant-7"


@dataclass(frozen=True)
class Answered:
    """A request that was answered.

    Attributes:
        token_ids: prompt and completion.
        cached: of the prompt, from the engine's prefix cache.
        salt: that the client sent.
        captured: False when the client asked for no capture.
    """

    token_ids: list[int]
    cached: int
    salt: str = ""
    captured: bool = True


def answered(answer: dict[str, Any], salt: str = "") -> Answered:
    """From an answer of either endpoint: completions carry the prompt's ids in the choice, chats beside it."""
    choice = answer["choices"][0]
    asked = answer.get("prompt_token_ids") or choice["prompt_token_ids"]
    details = answer["usage"].get("prompt_tokens_details") or {}
    return Answered([*asked, *choice["token_ids"]], details.get("cached_tokens") or 0, salt)


def complete(server: OpenAIServer, token_ids: list[int], tokens: int, salt: str = "") -> Answered:
    """A completion of exactly `tokens` tokens."""
    body: dict[str, Any] = {"cache_salt": salt} if salt else {}
    body |= {"prompt": token_ids, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return answered(server.ask("/v1/completions", **body), salt)


def complete_uncaptured(server: OpenAIServer, token_ids: list[int], tokens: int) -> Answered:
    """A completion whose client wants nothing of it captured."""
    body: dict[str, Any] = {"prompt": token_ids, "max_tokens": tokens, "temperature": 0}
    body |= {"ignore_eos": True, "kv_transfer_params": {"qserver": {"capture": False}}}
    found = answered(server.ask("/v1/completions", **body))
    return dataclasses.replace(found, captured=False)


def chat(server: OpenAIServer) -> Answered:
    """A chat that ends when the model says so."""
    messages = [
        {"role": "system", "content": "You are a careful librarian. Answer in one short sentence."},
        {"role": "user", "content": "Where do I find books about lighthouses and the sea?"},
    ]
    body = {"messages": messages, "max_tokens": 24, "temperature": 0}
    return answered(server.ask("/v1/chat/completions", **body))


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    """A daemon with small chunks."""
    with running_daemon(pool_bytes=512 << 20, chunk_size=CHUNK) as running:
        yield running


@pytest.fixture(scope="module")
def requests(daemon: RunningDaemon, tmp_path_factory: pytest.TempPathFactory) -> list[Answered]:
    """What clients asked a server that has ended since."""
    from demo.model import prepare

    prepare(ROOT / MODEL)
    extra = {TRANSFER: True, "lmcache.q.server_url": daemon.url, "lmcache.q.heartbeat_s": 0.5}
    config = transfer_config({"extra": extra})
    log = tmp_path_factory.mktemp("openai") / "server.log"
    with running_server(MODEL, config, log, ROOT) as server:
        with concurrent.futures.ThreadPoolExecutor() as clients:
            together = [
                clients.submit(complete, server, prompt(200, 1), 8),
                clients.submit(complete, server, prompt(120, 2), 16),
                clients.submit(complete, server, prompt(150, 3), 4, SALT),
                clients.submit(chat, server),
                clients.submit(complete_uncaptured, server, prompt(110, 4), 6),
            ]
            found = [future.result() for future in together]
        found.append(complete(server, prompt(200, 1), 3))  # a hit of the prefix cache
        found.append(complete(server, prompt(120, 2), 3, SALT))  # none: another salt
        wait_until(lambda: is_stored(daemon, found[-1]), "an idle engine keeps no rows back")
        wait_until(
            lambda: daemon.status()["coverage"]["captured"] == needed(found),
            "an idle engine tells of all that it has done",
        )
    return found


def is_stored(daemon: RunningDaemon, request: Answered) -> bool:
    """All of its rows can be had."""
    from lmcache_qclient.qcache import connect

    with connect(daemon.url, daemon.http_url, MODEL) as cache:
        found = cache.retrieve(request.token_ids, cache_salt=request.salt)
        return found.num_tokens >= len(request.token_ids) - 1


def needed(requests: list[Answered], captured: bool = True) -> int:
    """Tokens that must have been computed: all but what was cached, and but the last of each."""
    return sum(
        len(request.token_ids) - 1 - request.cached
        for request in requests
        if request.captured is captured
    )


def test_every_row_is_found_and_right(daemon: RunningDaemon, requests: list[Answered]) -> None:
    from demo.reference import max_relative_row_error, reference_queries
    from demo.verify import expected_retrieval
    from lmcache_qclient.qcache import connect

    with connect(daemon.url, daemon.http_url, MODEL) as cache:
        for request in requests:
            if not request.captured:
                continue
            found = cache.retrieve(request.token_ids, cache_salt=request.salt)
            alike = [
                {"token_ids": other.token_ids, "cached_tokens": other.cached}
                for other in requests
                if other.salt == request.salt and other.captured
            ]
            assert found.num_tokens == expected_retrieval(request.token_ids, alike)
            assert found.num_tokens >= len(request.token_ids) - 1, "all but the last sampled token"
            right = reference_queries(ROOT / MODEL, request.token_ids)[:, : found.num_tokens]
            assert max_relative_row_error(found.tensor, right) <= TOLERANCE


def test_a_salt_keeps_its_rows_to_itself(daemon: RunningDaemon, requests: list[Answered]) -> None:
    from lmcache_qclient.qcache import connect

    salted = [request for request in requests if request.salt]
    only_salted = salted[0]
    assert [request.cached for request in salted] == [0, 0]
    with connect(daemon.url, daemon.http_url, MODEL) as cache:
        for salt in ("", "tenant-8"):
            assert cache.retrieve(only_salted.token_ids, cache_salt=salt).num_tokens == 0


def test_a_client_may_keep_its_request_out(daemon: RunningDaemon, requests: list[Answered]) -> None:
    from lmcache_qclient.qcache import connect

    (out,) = (request for request in requests if not request.captured)
    with connect(daemon.url, daemon.http_url, MODEL) as cache:
        assert cache.retrieve(out.token_ids).num_tokens == 0
    assert daemon.status()["coverage"]["lost"]["not_selected"] == needed([out], captured=False)


def test_every_computed_token_is_in_the_account(
    daemon: RunningDaemon, requests: list[Answered]
) -> None:
    coverage = daemon.status()["coverage"]
    lost = {reason: count for reason, count in coverage["lost"].items() if count}
    assert requests[5].cached >= CHUNK, "the prefix cache was not hit"
    assert coverage["captured"] + sum(lost.values()) == coverage["computed"]
    assert (coverage["captured"], coverage["pending"]) == (needed(requests), 0)
    # An engine that schedules ahead may compute a step of a request that has just ended.
    assert set(lost) <= {"discarded_after_finish", "not_selected"}
    wait_until(lambda: daemon.status()["registered_q_ids"] == [], "the ring is released")
