"""append_codes against the codes that the host makes of the same keys."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from cases.device_cases import greedy, load
from cases.inside import decoder_of
from cases.seeded import new_rng
from cases.slowly import combinations
from cases.tiny_models import random_tokens

from gpu_ops.append_codes import append_codes
from gpu_ops.code_scores import code_page_bytes
from offload.decode.gpu.placement import HeadPlacement, Place
from offload.decode.gpu.resident_codes import CodeLists
from offload.policies.registry import make_policy
from offload.policies.sketch.codes import LEVELS, OUTER, encode_rows, rotation

SINKS, RECENT, NUM_KV_HEADS, PAGE_TOKENS = 3, 5, 3, 16


class Case:
    """Rows whose last keys are in their windows, means, and empty pages for their codes."""

    def __init__(
        self,
        device: str,
        positions: list[int],
        *,
        bits: int = 2,
        head_dim: int = 64,
        heads: tuple[int, ...] = (0, 2),
        dtype: torch.dtype = torch.float32,
        parts: int = 2,
    ) -> None:
        rng = new_rng()
        n, num_heads = len(positions), len(heads)
        self.positions, self.bits, self.heads, self.head_dim = positions, bits, heads, head_dim
        window = rng.standard_normal((n, parts, NUM_KV_HEADS, SINKS + RECENT, head_dim))
        self.window = torch.from_numpy(window).to(device=device, dtype=dtype)
        means = rng.standard_normal((n, num_heads, head_dim), dtype="float32")
        self.means = torch.from_numpy(means).to(device)
        num_pages = max(positions) // PAGE_TOKENS + 1
        page_bytes = code_page_bytes(num_heads, PAGE_TOKENS, head_dim, bits)
        self.pages = torch.full((n, num_pages, page_bytes), 0x77, dtype=torch.uint8, device=device)
        addresses = [[page.data_ptr() for page in pages] for pages in self.pages]
        self.table = torch.tensor(addresses, device=device)

    def operands(self) -> tuple[torch.Tensor, ...]:
        device = self.window.device
        return (
            self.window,
            torch.from_numpy(rotation(self.head_dim)).to(device),
            self.means,
            self.table,
            torch.tensor(self.positions, device=device),
            torch.tensor(self.heads, dtype=torch.int32, device=device),
        )

    def options(self) -> dict[str, Any]:
        return {
            "first_token": 10,
            "sink_tokens": SINKS,
            "levels": LEVELS[self.bits].tolist(),
            "outer": float(OUTER),
            "page_tokens": PAGE_TOKENS,
        }

    def key(self, row: int, head: int) -> torch.Tensor:
        position = self.positions[row]
        index = position if position < SINKS else SINKS + (position - SINKS) % RECENT
        return self.window[row, 0, head, index].float().cpu()

    def check(self) -> None:
        append_codes(*self.operands(), **self.options())
        pages, width = self.pages.cpu(), self.head_dim * self.bits // 8
        split = len(self.heads) * PAGE_TOKENS * width
        codes = pages[..., :split].view(*pages.shape[:2], len(self.heads), PAGE_TOKENS, width)
        scales = pages[..., split:].contiguous().view(torch.float32)
        scales = scales.view(*pages.shape[:2], len(self.heads), PAGE_TOKENS)
        written = torch.zeros(codes.shape[:4], dtype=torch.bool)
        for row, position in enumerate(self.positions):
            if position < 10:
                continue
            at = (row, position // PAGE_TOKENS, slice(None), position % PAGE_TOKENS)
            written[at] = True
            for i, head in enumerate(self.heads):
                expected, scale = self.encoded(self.key(row, head), self.means[row, i].cpu())
                np.testing.assert_array_equal(codes[at][i], expected)
                np.testing.assert_allclose(scales[at][i], scale, rtol=1e-5)
        assert (codes[~written] == 0x77).all()
        assert (scales[~written].view(torch.int32) == 0x77777777).all()

    def encoded(self, key: torch.Tensor, mean: torch.Tensor) -> tuple[np.ndarray, float]:
        """By the host's own code: of one token, the first of a block."""
        codes = np.zeros((self.head_dim * self.bits // 8, 64), np.uint8)
        scales = np.zeros(64, np.float32)
        rows = key.numpy()[None].copy()
        levels = LEVELS[self.bits]
        encode_rows(rows, mean.numpy(), self.bits, levels, codes.reshape(-1), scales, 0)
        return codes[:, 0], float(scales[0])


@pytest.mark.parametrize(("bits", "head_dim"), combinations([1, 2], [16, 32, 64, 80, 128]))
def test_head_dims(device: str, head_dim: int, bits: int) -> None:
    Case(device, [37], head_dim=head_dim, bits=bits).check()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rows_of_a_batch(device: str, dtype: torch.dtype) -> None:
    """Inactive ones, ones without codes yet, and at the ends of pages."""
    Case(device, [15, -1, 9, 10, 16, 63], head_dim=32, dtype=dtype).check()


def test_some_heads(device: str) -> None:
    for heads in ((1,), (0, 1, 2)):
        Case(device, [20, 31], head_dim=32, heads=heads).check()
    Case(device, [20, 31], head_dim=32, parts=1).check()  # a window of keys alone


def test_a_key_that_is_the_mean_has_no_scale(device: str) -> None:
    case = Case(device, [12], heads=(1,))
    case.means[0, 0] = case.key(0, 1)
    append_codes(*case.operands(), **case.options())
    scales = case.pages[0, 0, PAGE_TOKENS * 16 :].cpu().view(torch.float32)
    assert scales[12] == 0.0


@pytest.mark.slow
def test_steps_of_a_model(interpreter, tiny_folders, monkeypatch) -> None:
    """The kernels list and append in decode steps, over pages that were loaded and that grow."""
    options = {"budget_tokens": 24, "sink_tokens": 2, "recent_tokens": 8, "dense_layers": 2}
    policy = make_policy("sketch", candidate_ratio=4.0, **options)
    model = load(tiny_folders["llama"], policy, ("cpu", "inline"))
    tokens = random_tokens(1, 90)
    expected = greedy(model, tokens, 10)
    places = np.array(decoder_of(model).placement.places)
    places[2] = Place.CODES
    decoder_of(model).place(HeadPlacement(places))
    launched = []
    for name in ("find", "append"):
        original = getattr(CodeLists, name)

        def launch(*args: Any, name: str = name, original: Any = original) -> None:
            launched.append(name)
            with interpreter():
                original(*args)

        monkeypatch.setattr(CodeLists, name, launch)
    assert torch.equal(greedy(model, tokens, 10), expected)
    assert launched == ["find", "append"] * 9


def test_wrong_operands() -> None:
    case = Case("cpu", [12])

    def refuses(message: str, **changed: Any) -> None:
        with pytest.raises(ValueError, match=message):
            append_codes(*case.operands(), **case.options() | changed)

    refuses("levels must be 2 or 4, got 3", levels=[-1.0, 0.0, 1.0])
    refuses(r"sink_tokens must be in \[0, 8\), got 8", sink_tokens=8)
    refuses("first_token must not be negative, got -1", first_token=-1)
    refuses("page_tokens must be a power of two", page_tokens=24)
