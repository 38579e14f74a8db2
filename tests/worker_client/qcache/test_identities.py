"""`identities` against the real daemon: all that is stored for the same tokens, and nothing that is not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmcache_qclient.identity.lora_files import lora_digest
from lmcache_qclient.qcache import (
    Identities,
    ItemIdentity,
    LoraIdentity,
    QCacheContext,
    StoredIdentity,
    connect,
)
from lmcache_qprotocol.errors import ErrorCode, RequestError
from lmcache_qprotocol.hashing import NONE_HASH, HashChain
from lmcache_qprotocol.identity import PLAIN, Identity
from lmcache_qprotocol.messages import IdentityClaim, IdentityQuery, PartialChunk
from lmcache_qserver.testing.bare_client import BareClient, BareLifeline
from lmcache_qserver.testing.daemon import RunningDaemon, running_daemon
from tests.worker_client.qcache.engine import CHUNK, Engine, expected, layout_of
from tests.worker_client.qcache.test_retrieve import bits

TOKENS = [3 * number % 500 for number in range(3 * CHUNK + 5)]
names = count()


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    with running_daemon(chunk_size=CHUNK, pool_bytes=64 << 20) as running:
        yield running


def started(daemon: RunningDaemon, **layout: object) -> Engine:
    """An engine with a model of its own."""
    return Engine(daemon.url, layout_of(**layout), f"identities-{next(names)}")


def opened(daemon: RunningDaemon, engine: Engine) -> QCacheContext:
    return connect(daemon.url, daemon.http_url, engine.model_name)


def summary(found: Identities) -> set[tuple[str, str, tuple[tuple[str, int], ...], int, int]]:
    """(salt, LoRA's name, items, tokens of the prefix, tokens stored) of each."""
    assert not found.more
    listed = {
        (
            one.cache_salt,
            one.lora.name if one.lora else "",
            tuple((item.digest, item.offset) for item in one.mm),
            one.num_tokens,
            one.tokens_stored,
        )
        for one in found
    }
    assert len(listed) == len(found)
    return listed


def make_adapter(folder: Path, weights: bytes) -> Path:
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"r": 8}))
    (folder / "adapter_model.safetensors").write_bytes(weights)
    return folder


# --- the cases of the field -----------------------------------------------------------------------


def test_c25_loras_of_one_text_and_salt(daemon: RunningDaemon, tmp_path: Path) -> None:
    """Two adapters, none, and the first one's name with another path: each is found under its own, and listed."""
    paths = [make_adapter(tmp_path / name, name.encode()) for name in ("one", "two", "three")]
    engine = started(daemon)
    loras = [
        LoraIdentity(name, str(path), lora_digest(path))
        for name, path in zip("xyx", paths, strict=True)
    ]
    unread = [LoraIdentity("far", "/a"), LoraIdentity("far", "/b")]
    lengths: dict[LoraIdentity | None, int] = {None: 20}
    lengths.update(zip([*loras, *unread], (21, 22, 23, 24, 25), strict=True))
    for lora, length in lengths.items():
        engine.store_all(TOKENS[:length], Identity(lora), cache_salt="s")
    with opened(daemon, engine) as cache:
        assert cache.retrieve(TOKENS, cache_salt="s").num_tokens == 20
        for path, length in zip(paths, (21, 22, 23), strict=True):
            assert cache.retrieve(TOKENS, cache_salt="s", lora=path).num_tokens == length
            assert cache.retrieve(TOKENS, cache_salt="s", lora=str(path)).num_tokens == length
        for lora, length in zip(unread, (24, 25), strict=True):
            assert cache.retrieve(TOKENS, cache_salt="s", lora=lora).num_tokens == length
        found = cache.identities(TOKENS)
        assert {(one.lora, one.num_tokens) for one in found} == set(lengths.items())
        for one in found:
            assert cache.retrieve(TOKENS, **one.arguments).num_tokens == one.num_tokens
    engine.close()


def test_c26_two_pictures_in_one_text(daemon: RunningDaemon) -> None:
    """Equal placeholders, two pictures in turn two; turn one is shared, and not listed for itself."""
    engine = started(daemon)
    turn_two = CHUNK + 3
    red, blue = ItemIdentity("mm", "red", turn_two), ItemIdentity("mm", "blue", turn_two)
    engine.store_all(TOKENS, Identity(None, (red,)))
    engine.store_all(TOKENS[: 2 * CHUNK], Identity(None, (blue,)))
    with opened(daemon, engine) as cache:
        assert cache.retrieve(TOKENS, mm=[("red", turn_two)]).num_tokens == len(TOKENS)
        assert cache.retrieve(TOKENS, mm=[blue]).num_tokens == 2 * CHUNK
        assert cache.retrieve(TOKENS, mm=[("red", turn_two + 1)]).num_tokens == turn_two
        assert cache.retrieve(TOKENS).num_tokens == turn_two, "turn one has nothing of the picture"
        assert summary(cache.identities(TOKENS)) == {
            ("", "", (("red", turn_two),), len(TOKENS), len(TOKENS)),
            ("", "", (("blue", turn_two),), 2 * CHUNK, 2 * CHUNK),
        }
        assert summary(cache.identities(TOKENS[:turn_two])) == {("", "", (), turn_two, turn_two)}
    engine.close()


SALTS = ("", "_default", "@", "/", "..", "\N{GRINNING FACE}", "x" * 300)


def test_c24_every_salt_is_a_tenant_of_its_own(daemon: RunningDaemon) -> None:
    """Same tokens under each salt, of another length each: none is found under another, all are listed."""
    engine = started(daemon)
    for length, salt in enumerate(SALTS, 5):
        engine.store_all(TOKENS[:length], cache_salt=salt)
    with opened(daemon, engine) as cache:
        for length, salt in enumerate(SALTS, 5):
            found = cache.retrieve(TOKENS, cache_salt=salt)
            assert found.num_tokens == length
            want = expected(TOKENS[:length], (0, 1, 2), range(4), 8, "bfloat16")
            assert np.array_equal(bits(found.tensor, "bfloat16"), want)
        assert cache.retrieve(TOKENS, cache_salt="nobody").num_tokens == 0
        assert {(one.cache_salt, one.num_tokens) for one in cache.identities(TOKENS)} == {
            (salt, length) for length, salt in enumerate(SALTS, 5)
        }
        assert [one.num_tokens for one in cache.identities(TOKENS)] == [11, 10, 9, 8, 7, 6, 5]
    engine.close()


# --- what is listed -------------------------------------------------------------------------------


@st.composite
def stores(draw: st.DrawFn) -> list[tuple[str, LoraIdentity | None, tuple[ItemIdentity, ...], int]]:
    """(salt, LoRA, items, length), each salt and LoRA with one sequence of items, so that none hides another."""
    found = []
    for salt in draw(st.sets(st.sampled_from(["", "a", "b"]), min_size=1)):
        for lora in draw(st.sets(st.sampled_from([None, LoraIdentity("l", "/l")]), min_size=1)):
            offsets = draw(st.sets(st.integers(0, len(TOKENS) - 1), max_size=3))
            items = tuple(ItemIdentity("mm", f"i{at}", at) for at in sorted(offsets))
            found.append((salt, lora, items, draw(st.integers(1, len(TOKENS)))))
    return found


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(stores(), st.integers(1, len(TOKENS)))
def test_all_is_listed_and_nothing_else(
    daemon: RunningDaemon,
    stored: list[tuple[str, LoraIdentity | None, tuple[ItemIdentity, ...], int]],
    asked: int,
) -> None:
    engine = started(daemon)
    want = set()
    for salt, lora, items, length in stored:
        engine.store_all(TOKENS[:length], Identity(lora, items), cache_salt=salt)
        reach = min(asked, length)
        told = tuple((item.digest, item.offset) for item in items if item.offset < reach)
        want.add((salt, "" if lora is None else lora.name, told, reach, reach))
    with opened(daemon, engine) as cache:
        found = cache.identities(TOKENS[:asked])
        assert summary(found) == want
        for one in found:
            assert cache.retrieve(TOKENS[:asked], **one.arguments).num_tokens == one.num_tokens
    engine.close()


def test_a_gap_and_an_end_elsewhere_are_told_apart(daemon: RunningDaemon) -> None:
    engine = started(daemon)
    engine.store_piece(TOKENS, CHUNK, CHUNK + 7, Identity(LoraIdentity("l", "/l")))
    with opened(daemon, engine) as cache:
        assert summary(cache.identities(TOKENS)) == {("", "l", (), 0, 7)}
        other = [*TOKENS[: CHUNK + 4], 999, *TOKENS[CHUNK + 5 :]]
        assert summary(cache.identities(other)) == {("", "l", (), 0, 4)}
        assert summary(cache.identities([1, *TOKENS[1:]])) == set()
        assert len(cache.identities([])) == 0
    engine.close()


def test_what_goes_on_without_the_item_is_listed_for_itself(daemon: RunningDaemon) -> None:
    engine = started(daemon)
    picture = ItemIdentity("mm", "red", CHUNK + 3)
    engine.store_all(TOKENS, Identity(None, (picture,)))
    engine.store_all(TOKENS[: CHUNK + 4])
    with opened(daemon, engine) as cache:
        assert summary(cache.identities(TOKENS)) == {
            ("", "", (("red", CHUNK + 3),), len(TOKENS), len(TOKENS)),
            ("", "", (), CHUNK + 4, CHUNK + 4),
        }
    engine.close()


def test_one_adapter_under_two_names_is_one_identity(daemon: RunningDaemon) -> None:
    engine = started(daemon)
    engine.store_all(TOKENS[:CHUNK], Identity(LoraIdentity("a", "/a", "blake3:1")))
    engine.store_all(TOKENS, Identity(LoraIdentity("b", "/b", "blake3:1")))
    with opened(daemon, engine) as cache:
        (one,) = cache.identities(TOKENS)
        assert (one.num_tokens, one.lora and one.lora.digest) == (len(TOKENS), "blake3:1")
    engine.close()


def test_every_layout_of_the_model_is_named(daemon: RunningDaemon) -> None:
    engine = started(daemon)
    engine.store_all(TOKENS, cache_salt="s")
    engine.close()
    selected = layout_of(layer_ids=(1, 2))
    for length, model in ((CHUNK, engine.model_name), (CHUNK, f"identities-{next(names)}")):
        other = Engine(daemon.url, selected, model)
        other.store_all(TOKENS[:length], cache_salt="s")
        other.close()
    with opened(daemon, engine) as cache:
        (one,) = cache.identities(TOKENS)
        assert [layout.layer_ids for layout in one.layouts] == [(0, 1, 2), (1, 2)]
        assert (one.num_tokens, one.tokens_stored) == (len(TOKENS), len(TOKENS))
        found = cache.retrieve(TOKENS, layout=one.layouts[1], **one.arguments)
        assert (found.num_tokens, found.layer_ids) == (CHUNK, (1, 2))


def test_a_lie_is_not_listed(daemon: RunningDaemon) -> None:
    """A claim that nothing but a lookup can refute: a LoRA of another name behind the first chunk."""
    engine = started(daemon)
    identity = Identity(LoraIdentity("right", "/r"))
    chain = HashChain(CHUNK, identity)
    chain.extend(TOKENS)
    lie = IdentityClaim(
        plain_parent_hash=chain.plain_parent(1), lora=LoraIdentity("wrong", "/w"), items=()
    )
    engine.store_piece(TOKENS, CHUNK, 2 * CHUNK, identity, claim=lie)
    with opened(daemon, engine) as cache:
        assert cache.lookup(TOKENS[: 2 * CHUNK], lora=identity.lora).missing[0].end == CHUNK
        assert len(cache.identities(TOKENS)) == 0
    engine.close()


def test_long_sequences_take_several_questions(daemon: RunningDaemon) -> None:
    """More chunks than fit into one request; an identity only at its beginning, one only at its end."""
    engine = started(daemon)
    tokens = list(range(70 * CHUNK))
    engine.store_piece(tokens, 0, CHUNK, cache_salt="begin")
    engine.store_piece(tokens, 69 * CHUNK, 70 * CHUNK, cache_salt="end")
    with opened(daemon, engine) as cache:
        assert summary(cache.identities(tokens)) == {
            ("begin", "", (), CHUNK, CHUNK),
            ("end", "", (), 0, CHUNK),
        }
    engine.close()


# --- who may ask ----------------------------------------------------------------------------------


def test_salts_are_told_over_a_lifeline_only(daemon: RunningDaemon) -> None:
    chunk = PartialChunk(index=0, parent_hash=NONE_HASH, tokens=(1,))
    query = IdentityQuery(model_name="m##query", chunks=(chunk,))
    with BareClient(daemon.url) as client, BareLifeline(daemon.lifeline) as lifeline:
        with pytest.raises(RequestError) as caught:
            client.ask("identities_q", query)
        assert caught.value.code is ErrorCode.HELLO_REQUIRED
        session = client.hello().session
        with pytest.raises(RequestError) as caught:
            client.ask("identities_q", query)
        assert caught.value.code is ErrorCode.LIFELINE_REQUIRED
        lifeline.attach(session)
        assert client.ask("identities_q", query).result.identities == ()


# --- arguments ------------------------------------------------------------------------------------


def test_arguments_that_can_not_be_used(daemon: RunningDaemon, tmp_path: Path) -> None:
    engine = started(daemon)
    with opened(daemon, engine) as cache:
        with pytest.raises(ValueError, match="pass its folder, or LoraIdentity"):
            cache.lookup(TOKENS, lora=tmp_path / "nothing")
        with pytest.raises(TypeError, match="not a int"):
            cache.lookup(TOKENS, lora=3)  # type: ignore[arg-type]  # what is tested
        for item in ("red", ("red", "3"), (3, "red"), ("red",)):
            with pytest.raises(TypeError, match="an item of mm"):
                cache.lookup(TOKENS, mm=[item])  # type: ignore[list-item]  # what is tested
        assert isinstance(cache.identities(TOKENS), Identities)
    engine.close()
    assert StoredIdentity("s", None, (), 1, 1, ()).arguments == {
        "cache_salt": "s",
        "lora": None,
        "mm": (),
    }
    assert Identity() == PLAIN
