"""The ring of queries against a list of all of them."""

from __future__ import annotations

import random

import torch

from offload.kv_compression.window import NUM_QUERIES, SPACING, QueryWindow

LAYERS, HEADS, HEAD_DIM = 2, 3, 8


def queries_of(tokens: range, salt: int) -> torch.Tensor:
    """[LAYERS, HEADS, n, HEAD_DIM] that tell token, layer, head and `salt`."""
    told = torch.tensor([[[salt * 1e6 + t + h / 10 for t in tokens] for h in range(HEADS)]])
    return (told + torch.arange(LAYERS)[:, None, None] * 1e5)[..., None].expand(
        -1, -1, -1, HEAD_DIM
    )


def test_against_a_list() -> None:
    """Prompts, steps, and tokens that are taken back; known ones are right, and not forgotten."""
    chance = random.Random(3)
    for _ in range(30):
        window = QueryWindow(
            num_layers=LAYERS, num_qo_heads=HEADS, head_dim=HEAD_DIM, dtype=torch.float32
        )
        length, valid, written = 0, {}, 0
        for salt in range(40):
            if length and chance.random() < 0.3:
                length -= chance.randrange(min(length, 40))
            num_new = chance.choice([1, 1, 1, 5, 30, 300])
            tokens = range(length, length + num_new)
            new = queries_of(tokens, salt)
            for layer_idx in range(LAYERS):
                window.record(layer_idx, new[layer_idx], tokens.stop)
            valid = {t: q for t, q in valid.items() if t < length}
            valid |= {t: new[:, :, t - length] for t in tokens if t % SPACING == SPACING - 1}
            written, length = max(written, tokens.stop), tokens.stop
            known = window.last(length)
            expected = [valid[t] for t in sorted(valid)][-NUM_QUERIES:][::-1]
            assert known.shape[2] <= len(expected)
            for i, query in enumerate(expected[: known.shape[2]]):
                torch.testing.assert_close(known[:, :, -1 - i], query, rtol=0, atol=0)
            if written == length:  # nothing was taken back since
                assert known.shape[2] >= min(len(expected), 1)


def test_steps_and_prompts_leave_the_same() -> None:
    all_queries = queries_of(range(400), 1)
    windows = []
    for sizes in ([400], [100] * 4, [1] * 400):
        window = QueryWindow(
            num_layers=LAYERS, num_qo_heads=HEADS, head_dim=HEAD_DIM, dtype=torch.float32
        )
        end = 0
        for size in sizes:
            window.record(slice(None), all_queries[:, :, end : end + size], end + size)
            end += size
        windows.append(window.last(400))
    expected = all_queries[:, :, 400 - SPACING * NUM_QUERIES + SPACING - 1 :: SPACING]
    for window in windows:
        torch.testing.assert_close(window, expected, rtol=0, atol=0)


def test_copies_part_when_one_records() -> None:
    window = QueryWindow(
        num_layers=LAYERS, num_qo_heads=HEADS, head_dim=HEAD_DIM, dtype=torch.float32
    )
    window.record(slice(None), queries_of(range(16), 1), 16)
    copies = [window.copy() for _ in range(2)]
    before, num_bytes = window.last(16).clone(), QueryWindow.held_bytes([window])
    assert QueryWindow.held_bytes([window, *copies]) == num_bytes
    copies[0].record(slice(None), queries_of(range(16, 24), 2), 24)
    assert QueryWindow.held_bytes([window, *copies]) == 2 * num_bytes
    assert copies[0].last(24).shape[2] == 3
    copies[1].release()
    assert window.is_own
    torch.testing.assert_close(window.last(16), before, rtol=0, atol=0)
