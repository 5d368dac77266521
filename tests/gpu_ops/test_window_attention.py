"""window_attention against float64, over windows that are empty, filling, full and wrapped."""

from __future__ import annotations

import pytest
import torch
from cases.operands import DTYPES, TOLERANCE, assert_close, attention, poisoned, random
from cases.seeded import new_rng
from cases.slowly import combinations

from gpu_ops.checks import num_parts
from gpu_ops.online_softmax import tile_tokens
from gpu_ops.window_attention import window_attention


def check(
    device: str,
    dtype: torch.dtype,
    positions: list[int],
    *,
    head_dim: int,
    num_kv_heads: int = 2,
    group_size: int,
    sink_tokens: int,
    recent_tokens: int,
    softcap: float = 0.0,
    latent_dim: int = 0,
) -> None:
    """Fill each row's window token by token, as rope_publish does, and compare."""
    rng = new_rng()
    n, tokens = len(positions), sink_tokens + recent_tokens
    sm_scale = head_dim**-0.5
    num_qo_heads = num_kv_heads * group_size
    query = random(rng, n, num_qo_heads * head_dim, dtype=dtype, device=device, scale=2.0)
    parts = num_parts(latent_dim)
    window = poisoned(n, parts, num_kv_heads, tokens, head_dim, dtype=dtype, device=device)
    out = poisoned(n, num_qo_heads * head_dim, dtype=torch.float32, device=device)
    lse = poisoned(n, num_qo_heads, dtype=torch.float32, device=device)
    expected_out, expected_lse = out.double().zero_(), lse.double().fill_(float("-inf"))
    for row, position in enumerate(positions):
        kv_len = position + 1
        if not kv_len:
            continue
        kv = random(rng, parts, num_kv_heads, kv_len, head_dim, dtype=dtype, device=device)
        sinks = list(range(min(sink_tokens, kv_len)))
        recent = list(range(max(sink_tokens, kv_len - recent_tokens), kv_len))
        for p in sinks + recent:
            index = p if p < sink_tokens else sink_tokens + (p - sink_tokens) % recent_tokens
            window[row, :, :, index] = kv[:, :, p]
        kv = kv[:, :, sinks + recent]
        values = kv[-1, ..., : latent_dim or head_dim]
        o, expected_lse[row] = attention(query[row], kv[0], values, sm_scale, softcap=softcap)
        expected_out[row].view(num_qo_heads, -1)[:, : latent_dim or head_dim] = o.view(
            num_qo_heads, -1
        )

    window_attention(
        query,
        window,
        torch.tensor(positions, device=device),
        sm_scale=sm_scale,
        out=out,
        lse=lse,
        softcap=softcap,
        latent_dim=latent_dim,
    )
    if latent_dim:  # nobody reads the rest
        out, expected_out = (
            x.view(n, num_qo_heads, -1)[..., :latent_dim] for x in (out, expected_out)
        )
    # Weights are rounded to the dtype before they meet the values, as everywhere on GPUs.
    assert_close(out, expected_out, TOLERANCE[dtype])
    inactive = torch.tensor(positions) < 0
    assert (out.cpu()[inactive] == 0).all()
    assert (lse.cpu()[inactive] == float("-inf")).all()
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "group_size"),
    combinations(DTYPES, [(64, 3), (128, 4), (128, 1), (96, 20)]),
)
def test_shapes(device: str, dtype: torch.dtype, head_dim: int, group_size: int) -> None:
    check(
        device,
        dtype,
        [0, -1, 40, 200],
        head_dim=head_dim,
        group_size=group_size,
        sink_tokens=4,
        recent_tokens=64,
    )


@pytest.mark.parametrize(("dtype", "softcap"), combinations(DTYPES, [0.5, 2.0, 50.0]))
def test_soft_caps(device: str, dtype: torch.dtype, softcap: float) -> None:
    sizes = {"head_dim": 96, "group_size": 3, "sink_tokens": 4, "recent_tokens": 64}
    check(device, dtype, [0, -1, 40, 200], **sizes, softcap=softcap)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "latent_dim", "group_size"),
    combinations(DTYPES, [(576, 512, 20), (48, 32, 3), (320, 256, 4)]),
)
def test_keys_alone(
    device: str, dtype: torch.dtype, head_dim: int, latent_dim: int, group_size: int
) -> None:
    """Values are their first elements."""
    sizes = {"head_dim": head_dim, "latent_dim": latent_dim, "group_size": group_size}
    check(device, dtype, [0, -1, 40, 200], sink_tokens=4, recent_tokens=64, **sizes)


@pytest.mark.parametrize("sink_tokens", [0, 4, 16])
def test_fills_and_wraps(device: str, sink_tokens: int) -> None:
    check(
        device,
        torch.float32,
        [kv_len - 1 for kv_len in (1, 3, 4, 5, 16, 17, 23, 24, 25, 60)],
        head_dim=64,
        group_size=3,
        sink_tokens=sink_tokens,
        recent_tokens=8,
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_tile_boundaries(device: str, dtype: torch.dtype) -> None:
    tile = tile_tokens(64, dtype.itemsize)
    check(
        device,
        dtype,
        [length - 1 for length in (1, tile - 1, tile, tile + 1, 4 * tile + 3)],
        head_dim=64,
        num_kv_heads=1,
        group_size=3,
        sink_tokens=4,
        recent_tokens=4 * tile,
    )


def test_wrong_operands() -> None:
    query, window = torch.zeros(1, 128), torch.zeros(1, 2, 2, 8, 64)
    position, lse = torch.zeros(1, dtype=torch.int64), torch.zeros(1, 2)
    with pytest.raises(ValueError, match=r"window must be \[n, 2, .*, got \[2, 2, 8, 64\]"):
        window_attention(query, window[0], position, sm_scale=1.0, out=query, lse=lse)
    with pytest.raises(ValueError, match=r"out must be torch.float32, got torch.float16"):
        window_attention(query, window, position, sm_scale=1.0, out=query.half(), lse=lse)
    with pytest.raises(ValueError, match=r"window must be \[1, 2, 2, 8, 64\], got .*60\]"):
        window_attention(query, window[..., :60], position, sm_scale=1.0, out=query, lse=lse)
