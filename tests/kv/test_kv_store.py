"""The KV store case by case: layout, what is written and read back, what is refused."""

import ctypes
import itertools

import numpy as np
import pytest
import torch
from cases.kv_store_cases import (
    DTYPES,
    HEAD_DIM,
    HEADS,
    LAYERS,
    PAGE_TOKENS,
    assert_same,
    joined,
    make_store,
    random_rows,
    read_tokens,
    write_tokens,
)

import offload.kv.page_pool
import offload.system.huge_pages
from offload.kv.store import HostBudgetError


class TestLayout:
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_rows_are_where_the_docstring_says(self, dtype):
        store = make_store(dtype=dtype)
        seq = store.new_sequence()
        written = write_tokens(store, seq, 11)
        table = store.page_table(seq)
        row_bytes = HEAD_DIM * dtype.itemsize
        for layer_idx in range(LAYERS):
            for t in range(11):
                for kv_head in range(HEADS):
                    for is_value in (0, 1):
                        row = (is_value * HEADS + kv_head) * PAGE_TOKENS + t % PAGE_TOKENS
                        address = int(table[layer_idx, t // PAGE_TOKENS]) + row * row_bytes
                        expected = written[layer_idx][is_value, t, kv_head]
                        expected_bytes = expected.view(torch.uint8).numpy().tobytes()
                        assert ctypes.string_at(address, row_bytes) == expected_bytes

    def test_rows_written_through_the_page_table_are_gathered(self):
        store = make_store()
        seq = store.new_sequence()
        store.reserve([seq], [1])
        address = int(store.page_table(seq)[1, 0])
        key, value = np.full(HEAD_DIM, 5, np.float32), np.full(HEAD_DIM, 6, np.float32)
        head_bytes = PAGE_TOKENS * HEAD_DIM * 4
        ctypes.memmove(address + head_bytes, key.ctypes.data, key.nbytes)
        ctypes.memmove(address + (HEADS + 1) * head_bytes, value.ctypes.data, value.nbytes)
        store.commit([seq], [1])
        keys, values = store.gather(seq, 1)
        assert (keys[1, 0] == 5).all()
        assert (values[1, 0] == 6).all()

    def test_page_table_is_int64_contiguous_and_zero_where_no_page_is(self):
        store = make_store()
        seq = store.new_sequence()
        assert store.page_table(seq).shape == (LAYERS, 0)
        write_tokens(store, seq, 3 * PAGE_TOKENS)
        write_tokens(store, seq, 1)
        table = store.page_table(seq)
        assert table.dtype == np.int64
        assert table.flags.c_contiguous
        assert (table[:, :4] != 0).all()
        assert (table[:, 4:] == 0).all()
        assert len(np.unique(table[:, :4])) == 4 * LAYERS
        store.truncate(seq, 5)
        assert store.page_table(seq) is table
        assert (table[:, 2:] == 0).all()

    def test_page_table_stays_the_same_object_between_reserves(self):
        store = make_store()
        seq = store.new_sequence()
        store.reserve([seq], [2])
        table = store.page_table(seq)
        store.append(seq, 0, random_rows(2, store), random_rows(2, store))
        store.commit([seq], [2])
        child = store.fork(seq)
        assert store.page_table(seq) is table
        assert not np.shares_memory(store.page_table(child), table)

    def test_offsets_beyond_four_gib(self, monkeypatch):
        # One slab of 5 GiB of which only the two written pages ever become resident.
        monkeypatch.setattr(offload.system.huge_pages, "touch", lambda memory: None)
        monkeypatch.setattr(offload.kv.page_pool, "host_memory_limit_bytes", lambda: 1 << 40)
        size = 5 << 30
        store = make_store(
            num_layers=1,
            num_kv_heads=8,
            head_dim=128,
            dtype=torch.bfloat16,
            page_tokens=256,
            host_budget_bytes=size,
        )
        num_tokens = size // store.page_bytes * 256
        seq = store.new_sequence()
        try:
            store.reserve([seq], [num_tokens])
        except HostBudgetError as error:
            pytest.skip(f"this machine does not map 5 GiB: {error}")
        store.commit([seq], [num_tokens])
        first, last = random_rows(1, store), random_rows(1, store)
        store.append(seq, 0, first, -first, start=0)
        store.append(seq, 0, last, -last, start=num_tokens - 1)
        table = store.page_table(seq)
        assert table[0, -1] - table[0, 0] == size - store.page_bytes > 2**32
        for position, rows in ((0, first), (num_tokens - 1, last)):
            keys, values = store.gather(seq, 0, position, position + 1)
            assert torch.equal(keys, rows.transpose(0, 1))
            assert torch.equal(values, -rows.transpose(0, 1))


class TestAppendAndGather:
    def test_any_range(self):
        store = make_store()
        seq = store.new_sequence()
        written = write_tokens(store, seq, 13)
        for start, num_tokens in itertools.product(range(6), range(7)):
            tokens = slice(start, start + num_tokens)
            keys, values = store.gather(seq, 1, tokens.start, tokens.stop)
            assert keys.is_contiguous()
            assert keys.shape == values.shape == (HEADS, num_tokens, HEAD_DIM)
            expected = written[1][:, tokens].transpose(1, 2)
            assert torch.equal(torch.stack([keys, values]), expected)
            replacement = random_rows(num_tokens, store)
            store.append(seq, 1, replacement, -replacement, start=start)
            written[1][:, tokens] = torch.stack([replacement, -replacement])
            assert_same(read_tokens(store, seq), written)

    def test_views_of_a_fused_projection(self):
        store = make_store()
        seq = store.new_sequence()
        qkv = torch.randn(10, 4 * HEADS * HEAD_DIM)
        keys, values = qkv.view(10, 4, HEADS, HEAD_DIM)[:, 2:].unbind(1)
        store.reserve([seq], [10])
        store.append(seq, 0, keys, values)
        store.commit([seq], [10])
        assert torch.equal(store.gather(seq, 0)[0], keys.transpose(0, 1))
        assert torch.equal(store.gather(seq, 0)[1], values.transpose(0, 1))

    def test_gather_into_given_tensors(self):
        store = make_store()
        seq = store.new_sequence()
        written = write_tokens(store, seq, 6)
        rows = torch.full((2, HEADS, 8, HEAD_DIM), -1.0)
        out = (rows[0, :, 1:7], rows[1, :, 1:7])
        assert store.gather(seq, 0, out=out) == out
        assert torch.equal(rows[:, :, 1:7].transpose(1, 2), written[0])
        assert (rows[:, :, [0, 7]] == -1).all()
        with pytest.raises(ValueError, match=r"out must be .* \[2, 6, 8\], got .* \[2, 8, 8\]"):
            store.gather(seq, 0, out=(rows[0], rows[1]))

    @pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
    def test_keys_alone(self, kv_dtype):
        """Half of the bytes; values are their keys, also in a fork with tokens of its own."""
        options = {"kv_dtype": kv_dtype, "head_dim": 16}
        store, pairs = make_store(**options, keys_only=True), make_store(**options)
        assert 2 * store.page_bytes == pairs.page_bytes
        assert 2 * store.token_bytes == pairs.token_bytes
        seq, expected = store.new_sequence(), pairs.new_sequence()
        for length in (6, 5):
            keys = random_rows(length, store)
            for each, name, values in ((store, seq, keys * torch.nan), (pairs, expected, keys)):
                each.reserve([name], [length])
                for layer_idx in range(LAYERS):
                    each.append(name, layer_idx, (1 + layer_idx) * keys, (1 + layer_idx) * values)
                each.commit([name], [length])
            seq, before = store.fork(seq), seq
        assert_same(read_tokens(store, seq), read_tokens(pairs, expected))
        assert_same(read_tokens(store, before, 6), read_tokens(pairs, expected, 6))
        kept = store.gather(seq, 1, 3, 9, kept=True)
        assert torch.equal(kept[0], pairs.gather(expected, 1, 3, 9, kept=True)[0])
        out = torch.empty(2, HEADS, 6, kept[0].shape[2], dtype=kept[0].dtype)
        store.gather(seq, 1, 3, 9, out=(out[0], out[1]), kept=True)
        assert torch.equal(out[0], kept[0])
        assert torch.equal(out[1], kept[1])

    def test_reserved_rows_can_be_gathered_before_the_commit(self):
        store = make_store()
        seq = store.new_sequence()
        past = write_tokens(store, seq, 3)
        new = random_rows(3, store)
        store.reserve([seq], [3])
        store.append(seq, 1, new, new)
        assert store.kv_len(seq) == 3
        assert torch.equal(store.gather(seq, 1)[0].transpose(0, 1), past[1][0])
        keys, _ = store.gather(seq, 1, stop=6)
        assert torch.equal(keys.transpose(0, 1), torch.cat([past[1][0], new]))

    def test_slabs_made_under_inference_mode_can_be_written_outside(self):
        store = make_store()
        seq = store.new_sequence()
        with torch.inference_mode():
            first = write_tokens(store, seq, 5)
        second = write_tokens(store, seq, 5)
        assert_same(read_tokens(store, seq), joined(first, second))

    def test_tensors_that_require_grad(self):
        store = make_store()
        seq = store.new_sequence()
        keys = random_rows(2, store).requires_grad_()
        store.reserve([seq], [2])
        store.append(seq, 0, keys, keys)
        assert not store.gather(seq, 0, stop=2)[0].requires_grad


class TestRefusals:
    @pytest.fixture
    def store(self):
        return make_store()

    @pytest.fixture
    def seq(self, store):
        seq = store.new_sequence()
        write_tokens(store, seq, 5)
        store.reserve([seq], [2])
        return seq

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"num_layers": 0}, "num_layers must be at least 1, got 0"),
            ({"num_kv_heads": -1}, "num_kv_heads must be at least 1, got -1"),
            ({"page_tokens": 0}, "page_tokens must be at least 1, got 0"),
            ({"slab_bytes": 0}, "slab_bytes must be at least 1, got 0"),
            ({"head_dim": 12}, "head_dim must be a multiple of 8, got 12"),
            ({"dtype": torch.int8}, r"no dtype torch.int8; available: torch.float32, torch.float"),
            ({"host_budget_bytes": -1}, "host_budget_bytes must not be negative, got -1"),
        ],
    )
    def test_options(self, options, message):
        with pytest.raises(ValueError, match=message):
            make_store(**options)

    def test_shapes(self, store, seq):
        good = random_rows(2, store)
        with pytest.raises(ValueError, match=r"keys must be .* = \[2, 2, 8\], got \[2, 3, 8\]"):
            store.append(seq, 0, torch.zeros(2, 3, 8), good)
        with pytest.raises(ValueError, match=r"values must be .* = \[2, 2, 8\], got \[1, 2, 8\]"):
            store.append(seq, 0, good, good[:1])
        with pytest.raises(ValueError, match=r"keys must be .*, got \[\]"):
            store.append(seq, 0, torch.tensor(1.0), good)

    def test_dtypes(self, store, seq):
        good = random_rows(2, store)
        with pytest.raises(ValueError, match=r"values must be torch.float32, got torch.float16"):
            store.append(seq, 0, good, good.half())

    @pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_non_finite_values_are_not_written(self, bad, dtype):
        store = make_store(dtype=dtype)
        seq = store.new_sequence()
        written = write_tokens(store, seq, 5)
        good = random_rows(5, store)
        poisoned = good.clone()
        poisoned[4, 1, 7] = bad
        with pytest.raises(ValueError, match=f"non-finite keys in layer 1 of sequence {seq}"):
            store.append(seq, 1, poisoned, good, start=0)
        with pytest.raises(ValueError, match=f"non-finite values in layer 1 of sequence {seq}"):
            store.append(seq, 1, good, poisoned, start=0)
        assert_same(read_tokens(store, seq), written)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_large_finite_values_are_written(self, dtype):
        store = make_store(dtype=dtype)
        seq = store.new_sequence()
        largest = torch.full((3, HEADS, HEAD_DIM), torch.finfo(dtype).max, dtype=dtype)
        store.reserve([seq], [3])
        store.append(seq, 0, largest, -largest)
        assert torch.equal(store.gather(seq, 0, stop=3)[1], -largest.transpose(0, 1))

    def test_positions_that_are_not_reserved(self, store, seq):
        for num_tokens, start in ((3, None), (1, 7), (1, -1)):
            rows = random_rows(num_tokens, store)
            with pytest.raises(ValueError, match=r"not reserved: it has 7 positions; call reserve"):
                store.append(seq, 0, rows, rows, start=start)

    def test_commit_of_more_than_is_reserved(self, store, seq):
        other = store.new_sequence()
        store.reserve([other], [3])
        with pytest.raises(ValueError, match=f"cannot commit 3 tokens of sequence {seq}: 2 are"):
            store.commit([other, seq], [3, 3])
        assert store.kv_len(other) == 0

    def test_ranges_and_layers(self, store, seq):
        rows = random_rows(1, store)
        for start, stop in ((0, 8), (3, 2), (-1, 2)):
            with pytest.raises(ValueError, match=f"7 positions, cannot gather {start}..{stop}"):
                store.gather(seq, 0, start, stop)
        for layer_idx in (-1, LAYERS):
            with pytest.raises(ValueError, match=rf"layer_idx must be in 0..2, got {layer_idx}"):
                store.gather(seq, layer_idx)
            with pytest.raises(ValueError, match=rf"layer_idx must be in 0..2, got {layer_idx}"):
                store.append(seq, layer_idx, rows, rows)
        for kv_len in (-1, 6):
            with pytest.raises(ValueError, match=f"of 5 tokens to {kv_len}"):
                store.truncate(seq, kv_len)

    @pytest.mark.parametrize("method", ["reserve", "commit"])
    def test_batches(self, store, seq, method):
        call = getattr(store, method)
        with pytest.raises(ValueError, match="must have the same length, got 2 and 1"):
            call([seq, seq], [1])
        with pytest.raises(ValueError, match=rf"seqs must be distinct, got \[{seq}, {seq}\]"):
            call([seq, seq], [1, 1])
        with pytest.raises(ValueError, match=r"must not be negative, got \[-1\]"):
            call([seq], [-1])
        with pytest.raises(ValueError, match="unknown sequence handle 99"):
            call([seq, 99], [1, 1])

    def test_handles_that_are_gone(self, store, seq):
        store.free(seq)
        rows = random_rows(1, store)
        for call in (
            lambda: store.free(seq),
            lambda: store.kv_len(seq),
            lambda: store.fork(seq),
            lambda: store.truncate(seq, 0),
            lambda: store.page_table(seq),
            lambda: store.gather(seq, 0),
            lambda: store.append(seq, 0, rows, rows),
            lambda: store.reserve([seq], [1]),
            lambda: store.commit([seq], [1]),
        ):
            with pytest.raises(ValueError, match=f"unknown sequence handle {seq}: never made, or"):
                call()
        assert store.new_sequence() != seq

    def test_closed_store(self, store, seq):
        store.close()
        with pytest.raises(ValueError, match=f"unknown sequence handle {seq}: .* is closed"):
            store.kv_len(seq)
        with pytest.raises(ValueError, match="the KV store is closed"):
            store.new_sequence()
        assert store.host_bytes_used == store.host_bytes_reserved == store.num_sequences == 0
