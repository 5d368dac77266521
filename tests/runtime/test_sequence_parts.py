"""What a sequence has is in parts: a new one is a class, and an entry in the list."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases.device_cases import small
from cases.inside import runtime_of, states_of
from cases.tiny_models import random_tokens

from offload import OffloadedCache, OffloadedModel, SessionMiss
from offload.kv.sequence_part import RowToLoad, RowToSave, SequencePart

PROMPT = 220


class Colours(SequencePart):
    """Each sequence has a colour, and what was called for it is noted, with the store's length."""

    def __init__(self, model: Any) -> None:
        self.colours: dict[int, str] = {}
        self.calls: list[tuple[str, int, int]] = []
        self.store, self.fails = runtime_of(model).store, False
        runtime_of(model).sequences.parts.append(self)

    def _note(self, call: str, seq: int) -> None:
        self.calls.append((call, seq, self.store.kv_len(seq)))

    def fork(self, seq: int, child: int) -> None:
        self._note("fork", child)
        if seq in self.colours:
            self.colours[child] = self.colours[seq]
        if self.fails:
            raise MemoryError

    def truncate(self, seq: int, kv_len: int) -> Callable[[], None] | None:
        self._note(f"truncate to {kv_len}", seq)
        return lambda: self._note("truncated", seq)

    def roll_back(self, seq: int, kv_len: int) -> None:
        self._note(f"roll back to {kv_len}", seq)

    def forget(self, seq: int) -> None:
        self._note("forget", seq)
        self.colours.pop(seq, None)

    def save(self, seq: int, row: RowToSave) -> None:
        row.numbers["colour"] = self.colours[seq]
        row.add("letters", torch.tensor([*self.colours[seq].encode()], dtype=torch.bfloat16))

    def load(self, row: RowToLoad) -> Callable[[int], None]:
        colour, letters = row.numbers["colour"], row.read_tensor("letters", torch.bfloat16)
        if [*colour.encode()] != letters.tolist():
            raise SessionMiss("letters of another colour")
        return lambda seq: self.colours.update({seq: colour})


def load(tiny_folders: dict[str, Path], name: str = "quest") -> Any:
    return OffloadedModel.from_pretrained(
        tiny_folders["llama"], policy=small(name), dtype="float32", page_tokens=16
    )


def coloured(model: Any) -> tuple[Colours, OffloadedCache]:
    """A part, and a cache of one sequence that is blue."""
    part, cache = Colours(model), model.new_cache()
    model(random_tokens(1, PROMPT), past_key_values=cache)
    part.colours[cache.seqs[0]] = "blue"
    return part, cache


def test_a_new_part_is_told_of_all_that_becomes_of_a_sequence(
    tiny_folders: dict[str, Path], tmp_path: Path
) -> None:
    model = load(tiny_folders)
    part, cache = coloured(model)
    copied = copy.deepcopy(cache)
    assert part.colours[copied.seqs[0]] == "blue"
    (seq,), kept = copied.seqs, PROMPT - 5
    copied.crop(-5)
    copied.save(tmp_path / "cache")
    weight = model.model.layers[1].input_layernorm.weight.data
    before = weight.clone()
    weight.fill_(float("nan"))
    with pytest.raises((RuntimeError, ValueError), match="non-finite"):
        model(random_tokens(1, 1), past_key_values=copied)
    weight.copy_(before)
    copied.reset()
    assert part.calls == [
        ("fork", seq, PROMPT),
        (f"truncate to {kept}", seq, PROMPT),
        ("truncated", seq, kept),
        (f"roll back to {kept}", seq, kept),
        ("forget", seq, kept),
    ]
    loaded = OffloadedCache.load(model, tmp_path / "cache")
    assert part.colours == {cache.seqs[0]: "blue", loaded.seqs[0]: "blue"}
    assert runtime_of(model).store.kv_len(loaded.seqs[0]) == kept


def test_a_fork_that_a_later_part_refuses_leaves_nothing(tiny_folders: dict[str, Path]) -> None:
    model = load(tiny_folders)
    part, cache = coloured(model)
    model(random_tokens(1, 1), past_key_values=cache)  # has the policy build its arrays
    states, store = states_of(model), runtime_of(model).store
    before = states.num_bytes, store.host_bytes_used, store.num_sequences
    assert before[0]
    part.fails = True
    with pytest.raises(MemoryError):
        copy.deepcopy(cache)
    assert [call for call, _, _ in part.calls] == ["fork", "forget"]
    assert list(part.colours) == [*cache.seqs]
    assert (states.num_bytes, store.host_bytes_used, store.num_sequences) == before


def test_a_part_that_refuses_what_was_saved_makes_it_a_miss(
    tiny_folders: dict[str, Path], tmp_path: Path
) -> None:
    model = load(tiny_folders)
    cache = model.new_cache()
    model(random_tokens(1, PROMPT), past_key_values=cache)
    cache.save(tmp_path / "cache")  # by a model that knows no colours
    Colours(model)
    store = runtime_of(model).store
    with pytest.raises(SessionMiss, match="colour"):
        OffloadedCache.load(model, tmp_path / "cache")
    assert store.num_sequences == 1


def test_what_takes_away_goes_up_the_list(tiny_folders: dict[str, Path]) -> None:
    """A part may use what those before it have of a sequence, until it is told itself."""
    model, order = load(tiny_folders), []

    class Ordered(SequencePart):
        def __init__(self, name: str) -> None:
            self.name = name

        def fork(self, seq: int, child: int) -> None:
            order.append(f"fork {self.name}")

        def truncate(self, seq: int, kv_len: int) -> None:
            order.append(f"truncate {self.name}")

        def forget(self, seq: int) -> None:
            order.append(f"forget {self.name}")

    cache, parts = model.new_cache(), runtime_of(model).sequences.parts
    model(random_tokens(1, PROMPT), past_key_values=cache)
    parts[:] = [Ordered("first"), *parts, Ordered("last")]
    copied = copy.deepcopy(cache)
    copied.crop(-1)
    copied.reset()
    assert order == [
        *("fork first", "fork last"),
        *("truncate last", "truncate first"),
        *("forget last", "forget first"),
    ]


def test_a_part_that_no_file_holds_keeps_a_cache_from_being_saved(
    tiny_folders: dict[str, Path],
) -> None:
    class Unsaved(SequencePart):
        unsaved_option = "dreams"

    model = load(tiny_folders)
    sequences = runtime_of(model).sequences
    sequences.check_saves()
    sequences.parts.append(Unsaved())
    with pytest.raises(NotImplementedError, match="a model with dreams cannot be saved"):
        sequences.check_saves()
