"""Raw results -> bins, with a real tokenizer and through rendered prompts (spec P1 to P7)."""

from __future__ import annotations

import random

import pytest

from agentrl.chat.context import Chat
from agentrl.chat.format import ChatFormat
from agentrl.recipes.mars.packing import cut_to, pack_results
from agentrl.recipes.mars.roles import SYSTEM1, SYSTEM2
from agentrl.recipes.mars.workflow import MarsWorkflow

WORDS = [
    "river ",
    "the ",
    "x",
    "\n\n",
    "é",
    "日本語",
    "🦫",
    "<|im_end|>",
    "</search>",
    "  ",
    "123 ",
    "\ufffd",
    "e\u0301",
]
SEPARATOR = 1


@pytest.fixture(scope="module")
def format_(folder_of) -> ChatFormat:
    return ChatFormat.from_folder(folder_of("chatml"))


def pack(format_, texts, capacity, packing="ffd", separator=SEPARATOR):
    return pack_results(texts, capacity, separator, format_.encode_world, format_.decode, packing)


def size(format_, text) -> int:
    return len(format_.encode_world(text))


def used(format_, bin_) -> int:
    return sum(size(format_, t) for t in bin_.texts) + SEPARATOR * (len(bin_.texts) - 1)


def instances(count: int, seed: int = 0):
    rng = random.Random(seed)
    for _ in range(count):
        lengths = [rng.choice([0, 1, 3, 10, 40]) for _ in range(rng.randrange(12))]
        yield ["".join(rng.choice(WORDS) for _ in range(n)) for n in lengths], rng.randrange(4, 80)


@pytest.mark.parametrize("packing", ["ffd", "single", "truncate"])
def test_p1_no_bin_is_larger_than_the_capacity(format_, packing):
    for texts, capacity in instances(400):
        for bin_ in pack(format_, texts, capacity, packing):
            assert used(format_, bin_) == bin_.used <= capacity


@pytest.mark.parametrize("packing", ["ffd", "single"])
def test_p2_every_item_stands_in_one_bin_and_only_oversized_ones_are_cut(format_, packing):
    for texts, capacity in instances(400, 1):
        bins = pack(format_, texts, capacity, packing)
        assert sorted(i for b in bins for i in b.items) == list(range(len(texts)))
        for bin_ in bins:
            for i, text in zip(bin_.items, bin_.texts, strict=True):
                whole = size(format_, texts[i])
                if whole <= capacity:
                    assert text == texts[i]
                    continue
                assert len(bin_.items) == 1
                assert texts[i].startswith(text)
                # A cut inside a character moves back to its beginning: at most three tokens of it.
                assert capacity - 3 <= size(format_, text) <= capacity
                assert bin_.truncated_tokens == whole - size(format_, text) > 0
        assert sum(b.used + b.truncated_tokens for b in bins) == sum(size(format_, t) for t in texts) + SEPARATOR * (
            len(texts) - len(bins)
        )


def test_p2_plain_words_are_cut_to_exactly_the_capacity(format_):
    text = "river the " * 60
    cut, lost = cut_to(text, 37, format_.encode_world, format_.decode)
    assert (size(format_, cut), lost) == (37, size(format_, text) - 37)
    assert cut_to("short", 37, format_.encode_world, format_.decode) == ("short", 0)
    assert cut_to(text, 0, format_.encode_world, format_.decode) == ("", size(format_, text))
    assert cut_to(text, -5, format_.encode_world, format_.decode)[0] == ""


def test_p3_bins_lie_between_the_sum_and_the_number_of_items(format_):
    for texts, capacity in instances(200, 2):
        bins = pack(format_, texts, capacity)
        total = sum(min(size(format_, t), capacity) for t in texts)
        assert total / (capacity + SEPARATOR) <= len(bins) <= len(texts)


def letters(length: int) -> str:
    """A text of `length` tokens of which none merge."""
    return "z~" * (length // 2) + "z" * (length % 2)


@pytest.mark.parametrize(
    ("capacity", "lengths", "expected"),
    [
        (10, [7, 5, 5, 4, 3, 3, 2, 1], [[7, 3], [5, 5], [4, 3, 2, 1]]),
        (10, [25, 4, 4], [[10], [4, 4]]),
        (10, [], []),
    ],
)
def test_p4_vectors_of_the_spec(format_, capacity, lengths, expected):
    assert size(format_, letters(7)) == 7
    bins = pack(format_, [letters(n) for n in lengths], capacity, separator=0)
    assert [[size(format_, t) for t in b.texts] for b in bins] == expected


def test_p4_thirty_items_take_eleven_bins(format_):
    lengths = [51] * 6 + [27] * 6 + [26] * 6 + [23] * 12
    assert len(pack(format_, [letters(n) for n in lengths], 100, separator=0)) == 11


def test_p5_at_most_one_bin_is_half_empty(format_):
    for texts, capacity in instances(300, 3):
        bins = [b for b in pack(format_, texts, capacity) if not b.truncated_tokens]
        assert sum(2 * (b.used + SEPARATOR) <= capacity + SEPARATOR for b in bins) <= 1


def test_p6_packing_is_deterministic_and_ordered_by_first_item(format_):
    texts = ["river "] * 9 + ["the river "] * 4
    once = pack(format_, texts, 9)
    assert once == pack(format_, texts, 9)
    firsts = [b.first_item for b in once]
    assert firsts == sorted(firsts)
    assert all(list(b.items) == sorted(b.items) for b in once)


def test_truncation_keeps_the_beginning_of_all_results_in_their_order(format_):
    texts = ["", letters(6), letters(9), letters(5)]
    (bin_,) = pack(format_, texts, 12, "truncate")
    assert bin_.texts == ("", letters(6), letters(4))
    assert bin_.items == (0, 1, 2)
    assert bin_.truncated_tokens == 5 + 5
    (whole,) = pack(format_, texts, 60, "truncate")
    assert whole.texts == tuple(texts)
    assert whole.truncated_tokens == 0
    assert pack(format_, [], 60, "truncate") == []


def test_one_result_a_bin_without_packing(format_):
    texts = [letters(n) for n in (3, 30, 1)]
    bins = pack(format_, texts, 10, "single")
    assert [b.items for b in bins] == [(0,), (1,), (2,)]
    assert [b.truncated_tokens for b in bins] == [0, 20, 0]


@pytest.mark.parametrize(
    "shape", ["{items}\n\nPurpose: {purpose}", "{purpose}\n{items}", "<tool_call>{items}\n\n\n{purpose}"]
)
def test_p7_rendered_prompts_stay_within_the_limit_and_fill_it(lab, folder_of, template, shape):
    chat = Chat(ChatFormat.from_folder(folder_of(template)), enable_thinking=False)
    limit = 300
    recipe = lab.recipe({"distil_template": shape}, agents={SYSTEM1: {"max_prompt_tokens": limit, "prompt": "Distil."}})
    workflow = MarsWorkflow(recipe, {SYSTEM2: chat, SYSTEM1: chat}, {})
    encode, decode = chat.format.encode_world, chat.format.decode
    fullest = 0
    for texts, _ in instances(15, 4):
        for purpose in ("why", "日本 <|im_end|> 🦫 " * 5):
            capacity = workflow.capacity(purpose, "")
            assert capacity > 16
            for packing in ("ffd", "single", "truncate"):
                items = [f"[{i}] page\n{t}" for i, t in enumerate(texts)] + ["river " * 400]
                for bin_ in pack_results(items, capacity, workflow.separator, encode, decode, packing):
                    prompt = workflow.system1_prompt(bin_.texts, purpose, "")
                    assert len(prompt) == limit - capacity + bin_.used <= limit
                    fullest = max(fullest, len(prompt))
    assert fullest == limit
