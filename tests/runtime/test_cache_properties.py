"""Random life of caches: `OffloadedCache` of ours against `DynamicCache` of the stock model.

Several conversations of one model take turns. Each is fed, stepped, cropped, reordered, copied and
generated from, in both models by the same calls; logits, tokens and lengths agree all the way, and
at the end nothing is left in the KV store.
"""

from __future__ import annotations

import copy
import gc
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from transformers import DynamicCache

Pair = tuple[Any, Any]

GREEDY = {"do_sample": False}
MAX_CONVERSATIONS, MAX_ROWS, MAX_COLUMNS = 4, 5, 150


@dataclass
class Conversation:
    """What was fed so far: tokens and mask int64 [batch_size, columns], in two caches."""

    caches: list[Any]  # of the stock model, of ours
    tokens: torch.Tensor
    mask: torch.Tensor

    @property
    def num_rows(self) -> int:
        return len(self.tokens)

    @property
    def num_columns(self) -> int:
        return self.tokens.shape[1]

    def take(self, rows: Any) -> None:
        self.tokens, self.mask = self.tokens[rows], self.mask[rows]


class CacheMachine(RuleBasedStateMachine):
    """Every rule does the same to both models."""

    def __init__(self, pairs: dict[str, Pair]) -> None:
        super().__init__()
        self.pairs = pairs
        self.conversations: list[Conversation] = []

    @initialize(data=st.data())
    def choose_model(self, data: st.DataObject) -> None:
        self.pair = self.pairs[data.draw(st.sampled_from(sorted(self.pairs)), label="model")]
        # Of a failed example before, else 0.
        self.sequences_before = self.pair[1].kv_store.num_sequences

    def draw_conversation(self, data: st.DataObject) -> Conversation:
        index = data.draw(st.integers(0, len(self.conversations) - 1), label="conversation")
        return self.conversations[index]

    def draw_tokens(self, data: st.DataObject, num_rows: int, num_new: int) -> torch.Tensor:
        seed = data.draw(st.integers(0, 2**16), label="tokens")
        shape, generator = (num_rows, num_new), torch.Generator().manual_seed(seed)
        tokens = torch.randint(0, 256, shape, generator=generator)
        if data.draw(st.booleans(), label="equal rows"):
            tokens = tokens[:1].repeat(num_rows, 1)
        return tokens

    @precondition(lambda self: len(self.conversations) < MAX_CONVERSATIONS)
    @rule()
    def new_cache(self) -> None:
        none = torch.empty(0, 0, dtype=torch.int64)
        caches = [DynamicCache(), self.pair[1].new_cache()]
        self.conversations.append(Conversation(caches, none, none.clone()))

    @precondition(lambda self: self.conversations)
    @rule(
        data=st.data(),
        num_rows=st.integers(1, MAX_ROWS),
        num_new=st.one_of(st.just(1), st.integers(1, 6), st.integers(1, 60)),
    )
    def feed(self, data: st.DataObject, num_rows: int, num_new: int) -> None:
        """A prompt, a turn, a step or a draft, with all that `forward` takes."""
        talk = self.draw_conversation(data)
        if talk.num_columns + num_new > MAX_COLUMNS:
            return
        if talk.tokens.numel() == 0 and talk.num_rows == 0:
            talk.tokens = talk.mask = torch.empty(num_rows, 0, dtype=torch.int64)
        num_rows = talk.num_rows
        tokens = self.draw_tokens(data, num_rows, num_new)
        mask = torch.ones_like(tokens)
        # In the middle it is no part of our windows, and of the stock model's it is.
        may_pad = not talk.num_columns or not any(self.pair[1]._offload.lean.each("window"))
        if num_new > 1 and may_pad and data.draw(st.booleans(), label="padding"):
            for row in mask:
                row[: data.draw(st.integers(0, num_new - 1), label="padding of row")] = 0
        talk.tokens = torch.cat([talk.tokens, tokens], dim=1)
        talk.mask = torch.cat([talk.mask, mask], dim=1)
        options: dict[str, Any] = {}
        if not bool(talk.mask.all()) or data.draw(st.booleans(), label="mask"):
            dtype = data.draw(st.sampled_from([torch.int64, torch.bool]), label="mask dtype")
            options["attention_mask"] = talk.mask.to(dtype)
        if data.draw(st.booleans(), label="position_ids"):
            positions = (talk.mask.cumsum(1) - 1).clamp(min=0)[:, -num_new:]
            if "attention_mask" not in options:  # only ascending positions are one sequence
                positions = positions * data.draw(st.integers(1, 3), label="distance")
            options["position_ids"] = positions
        keep = data.draw(
            st.one_of(st.just(0), st.integers(1, num_new), st.just("first and last")), label="keep"
        )
        kept = torch.tensor([0, num_new - 1]) if isinstance(keep, str) else keep
        by_embeddings = data.draw(st.booleans(), label="inputs_embeds")
        logits = []
        for model, cache in zip(self.pair, talk.caches, strict=True):
            inputs = {"input_ids": tokens}
            if by_embeddings:
                inputs = {"inputs_embeds": self.pair[0].get_input_embeddings()(tokens)}
            with torch.no_grad():
                out = model(**inputs, **options, past_key_values=cache, logits_to_keep=kept)
            assert out.past_key_values is cache
            logits.append(out.logits)
        attended = mask[:, kept] if isinstance(keep, str) else mask[:, -keep:]
        assert_close(logits[1][attended == 1], logits[0][attended == 1])

    @precondition(lambda self: self.conversations)
    @rule(
        data=st.data(),
        num_new=st.integers(1, 20),
        max_new_tokens=st.integers(1, 8),
        mode=st.sampled_from(["greedy", "logits", "sampled", "lookup", "chunks"]),
    )
    def generate(self, data: st.DataObject, num_new: int, max_new_tokens: int, mode: str) -> None:
        """A turn as a chat makes it: the history, the new tokens and the cache."""
        talk = self.draw_conversation(data)
        if talk.num_columns + num_new + max_new_tokens > MAX_COLUMNS:
            return
        num_rows = talk.num_rows or data.draw(st.integers(1, MAX_ROWS), label="num_rows")
        if mode == "lookup" and num_rows > 1:
            return
        if talk.num_rows == 0:
            talk.tokens = talk.mask = torch.empty(num_rows, 0, dtype=torch.int64)
        new = self.draw_tokens(data, num_rows, num_new)
        tokens = torch.cat([talk.tokens, new], dim=1)
        mask = torch.cat([talk.mask, torch.ones_like(new)], dim=1)
        options = {
            "greedy": GREEDY,
            "logits": {"do_sample": False, "output_logits": True},
            "sampled": {"do_sample": True, "top_k": 30},
            "lookup": {},
            "chunks": {"do_sample": False, "prefill_chunk_size": 7},
        }[mode]
        dicts = data.draw(st.booleans(), label="return_dict_in_generate") or mode == "logits"
        outputs = []
        for model, cache in zip(self.pair, talk.caches, strict=True):
            torch.manual_seed(num_new)
            if mode == "lookup" and model is self.pair[0]:
                options = GREEDY  # drafts change no token; the stock model's do behind short caches
            elif mode == "lookup":
                options = {**GREEDY, "prompt_lookup_num_tokens": 4}
            out = model.generate(
                tokens,
                attention_mask=mask,
                past_key_values=cache,
                max_new_tokens=max_new_tokens,
                return_dict_in_generate=dicts,
                **options,
            )
            outputs.append(out)
        if mode == "logits":
            for ours, theirs in zip(outputs[1].logits, outputs[0].logits, strict=True):
                assert_close(ours, theirs)
        expected, got = (out.sequences if dicts else out for out in outputs)
        assert torch.equal(got, expected)
        # Both keep the columns of a draft behind the token that ended it.
        for cache in talk.caches:
            cache.crop(min(0, got.shape[1] - 1 - cache.get_seq_length()))
        talk.tokens = got[:, :-1]
        talk.mask = torch.nn.functional.pad(mask, (0, got.shape[1] - 1 - mask.shape[1]), value=1)

    @rule(
        data=st.data(),
        num_rows=st.integers(1, 3),
        num_tokens=st.integers(2, 40),
        mode=st.sampled_from([{}, {"num_beams": 3}, {"num_return_sequences": 2}]),
    )
    def generate_apart(
        self, data: st.DataObject, num_rows: int, num_tokens: int, mode: dict[str, int]
    ) -> None:
        """With a cache of its own, between the calls with the others."""
        tokens = self.draw_tokens(data, num_rows, num_tokens)
        mask = torch.ones_like(tokens)
        for row in mask:
            row[: data.draw(st.integers(0, num_tokens - 1), label="padding of row")] = 0
        outputs = []
        for model in self.pair:
            torch.manual_seed(num_tokens)
            sampled = "num_return_sequences" in mode
            options = {**mode, "do_sample": sampled, "max_new_tokens": 5}
            outputs.append(model.generate(tokens, attention_mask=mask, **options))
        assert torch.equal(outputs[1], outputs[0])

    @precondition(lambda self: self.conversations)
    @rule(data=st.data())
    def crop(self, data: st.DataObject) -> None:
        talk = self.draw_conversation(data)
        num_removed = data.draw(st.integers(0, talk.num_columns + 2), label="num_removed")
        for cache in talk.caches:
            cache.crop(-num_removed)
        num_left = max(0, talk.num_columns - num_removed)
        talk.tokens, talk.mask = talk.tokens[:, :num_left], talk.mask[:, :num_left]

    @precondition(lambda self: self.conversations)
    @rule(data=st.data(), operation=st.sampled_from(["reorder", "select", "mask", "interleave"]))
    def change_rows(self, data: st.DataObject, operation: str) -> None:
        talk = self.draw_conversation(data)
        if talk.num_columns == 0:  # the stock cache has no rows to change then
            return
        last = talk.num_rows - 1
        if operation == "interleave":
            repeats = data.draw(st.integers(1, MAX_ROWS // talk.num_rows), label="repeats")
            for cache in talk.caches:
                cache.batch_repeat_interleave(repeats)
            talk.take(torch.arange(talk.num_rows).repeat_interleave(repeats))
            return
        if operation == "mask":
            kept = st.lists(st.booleans(), min_size=last + 1, max_size=last + 1).filter(any)
            rows = torch.tensor(data.draw(kept, label="rows kept"))
        elif operation == "select":
            rows = torch.tensor(
                data.draw(
                    st.lists(st.integers(-last - 1, last), min_size=1, max_size=MAX_ROWS),
                    label="rows",
                )
            )
        else:
            same_size = st.lists(st.integers(0, last), min_size=last + 1, max_size=last + 1)
            rows = torch.tensor(data.draw(same_size, label="beam_idx"))
        for cache in talk.caches:
            if operation == "reorder":
                cache.reorder_cache(rows)
            else:
                cache.batch_select_indices(rows)
        talk.take(rows)

    @precondition(lambda self: 0 < len(self.conversations) < MAX_CONVERSATIONS)
    @rule(data=st.data(), shallow=st.booleans())
    def copy(self, data: st.DataObject, shallow: bool) -> None:
        """Ours may be copied without `deepcopy`, too: the stock cache may not."""
        talk = self.draw_conversation(data)
        stock, ours = talk.caches
        copied = [copy.deepcopy(stock), copy.copy(ours) if shallow else copy.deepcopy(ours)]
        self.conversations.append(Conversation(copied, talk.tokens, talk.mask))

    @precondition(lambda self: self.conversations)
    @rule(data=st.data())
    def reset(self, data: st.DataObject) -> None:
        talk = self.draw_conversation(data)
        for cache in talk.caches:
            cache.reset()
        talk.tokens = talk.mask = torch.empty(0, 0, dtype=torch.int64)

    @precondition(lambda self: self.conversations)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        self.conversations.remove(self.draw_conversation(data))

    @invariant()
    def lengths_agree(self) -> None:
        for talk in self.conversations:
            stock, ours = talk.caches
            assert ours.get_seq_length() == stock.get_seq_length() == talk.num_columns
            assert ours.get_mask_sizes(1, 0) == (talk.num_columns + 1, 0)
            if talk.num_columns:
                assert ours.kv_lens == talk.mask.sum(dim=1).tolist()

    def teardown(self) -> None:
        if not hasattr(self, "pair"):
            return
        self.conversations.clear()
        gc.collect()
        assert self.pair[1].kv_store.num_sequences <= self.sequences_before


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3)


@pytest.fixture
def pairs(stock_models: dict[str, Any], offloaded_models: dict[str, Any]) -> dict[str, Pair]:
    return {name: (stock_models[name], offloaded_models[name]) for name in stock_models}


def run(pairs: dict[str, Pair], max_examples: int, steps: int) -> None:
    run_state_machine_as_test(
        partial(CacheMachine, pairs),
        settings=settings(
            max_examples=max_examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
        ),
    )
    assert all(model.kv_store.host_bytes_used == 0 for _, model in pairs.values())


def test_caches_live_as_those_of_the_stock_model(pairs: dict[str, Pair]) -> None:
    run(pairs, max_examples=12, steps=12)


@pytest.mark.slow
def test_caches_live_long_as_those_of_the_stock_model(pairs: dict[str, Pair]) -> None:
    run(pairs, max_examples=300, steps=25)
