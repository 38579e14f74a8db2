from typing import Any

import pytest

from demo.prompts import HARBOUR, PROMPTS, _chat, tokenize


def test_names_and_texts_are_distinct() -> None:
    assert len(PROMPTS) >= 8
    assert (
        len({prompt.name for prompt in PROMPTS})
        == len({prompt.text for prompt in PROMPTS})
        == len(PROMPTS)
    )


def test_at_least_four_share_the_system_text() -> None:
    assert sum(prompt.text.startswith(f"<|im_start|>system\n{HARBOUR}") for prompt in PROMPTS) >= 4


@pytest.mark.vllm
def test_lengths_reach_beyond_a_chunk_and_vary(tokenizer: Any) -> None:
    lengths = [len(ids) for ids in tokenize(tokenizer).values()]
    assert min(lengths) > 256
    assert 800 < max(lengths) <= 900
    assert len(set(lengths)) == len(lengths)


@pytest.mark.vllm
def test_tokens_give_the_text_back(tokenizer: Any) -> None:
    token_ids = tokenize(tokenizer)
    assert {prompt.name: tokenizer.decode(token_ids[prompt.name]) for prompt in PROMPTS} == {
        prompt.name: prompt.text for prompt in PROMPTS
    }


@pytest.mark.vllm
def test_shared_prefix_ends_inside_a_block_whose_start_is_inside_a_chunk(tokenizer: Any) -> None:
    shared = [ids for name, ids in tokenize(tokenizer).items() if name.startswith("harbour-")]
    same = [len(set(column)) == 1 for column in zip(*shared, strict=False)]
    length = same.index(False)
    assert length > 400
    for block_size in (16, 32, 64, 128):
        assert length % block_size != 0
        assert (length - length % block_size) % 256 != 0


@pytest.mark.vllm
def test_chat_is_written_as_the_template_writes_it(tokenizer: Any) -> None:
    messages = [
        {"role": "system", "content": HARBOUR},
        {"role": "user", "content": "Will it rain?"},
    ]
    templated = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert _chat(HARBOUR, "Will it rain?") == templated
