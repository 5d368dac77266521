"""window_attention against float64: windows empty, filling, full and wrapped; the host's part."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from operands import DTYPES, TOLERANCE, assert_close, attention, poisoned, random
from seeded import new_rng

from gpu_ops.launch import runs_kernel
from gpu_ops.online_softmax import tile_tokens
from gpu_ops.window_attention import window_attention

INFINITY = float("inf")
NAN = float("nan")


def host(x: torch.Tensor, device: str) -> torch.Tensor:
    """Where the CPU leaves its part."""
    return x.cpu().pin_memory() if device == "cuda" else x.cpu()


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
    has_host: bool = False,
) -> None:
    """Fill each row's window token by token, as rope_publish does, and compare."""
    rng = new_rng()
    n, tokens = len(positions), sink_tokens + recent_tokens
    sm_scale = head_dim**-0.5
    num_qo_heads = num_kv_heads * group_size
    query = random(rng, n, num_qo_heads * head_dim, dtype=dtype, device=device, scale=2.0)
    window = poisoned(n, 2, num_kv_heads, tokens, head_dim, dtype=dtype, device=device)
    out = poisoned(n, num_qo_heads * head_dim, dtype=dtype, device=device)
    host_out = poisoned(n, num_qo_heads * head_dim, dtype=torch.float32, device="cpu")
    host_lse = torch.full((n, num_qo_heads), -INFINITY)
    expected = out.double().zero_()
    for row, position in enumerate(positions):
        kv_len = position + 1
        if not kv_len:
            continue
        kv = random(rng, 2, num_kv_heads, kv_len, head_dim, dtype=dtype, device=device)
        attended = list(range(min(sink_tokens, kv_len)))
        attended += range(max(sink_tokens, kv_len - recent_tokens), kv_len)
        for p in attended:
            index = p if p < sink_tokens else sink_tokens + (p - sink_tokens) % recent_tokens
            window[row, :, :, index] = kv[:, :, p]
        if has_host:
            of_host = sorted(set(range(kv_len)) - set(attended))[::2]
            if of_host:
                keys, values = kv[:, :, of_host]
                o, lse = attention(query[row], keys, values, sm_scale)
                host_out[row], host_lse[row] = o.float(), lse.float()
            attended += of_host
        keys, values = kv[:, :, attended]
        expected[row] = attention(query[row], keys, values, sm_scale)[0]

    window_attention(
        query,
        window,
        torch.tensor(positions, device=device),
        sm_scale=sm_scale,
        host_out=host(host_out, device),
        host_lse=host(host_lse, device),
        out=out,
    )
    # Weights are rounded to the dtype before they meet the values, as everywhere on GPUs.
    assert_close(out, expected, TOLERANCE[dtype])
    assert (out.cpu()[torch.tensor(positions) < 0] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "group_size"), [(64, 3), (128, 4), (128, 1), (96, 20)])
@pytest.mark.parametrize("has_host", [False, True])
def test_shapes(
    device: str, dtype: torch.dtype, head_dim: int, group_size: int, has_host: bool
) -> None:
    check(
        device,
        dtype,
        [0, -1, 40, 200],
        has_host=has_host,
        head_dim=head_dim,
        group_size=group_size,
        sink_tokens=4,
        recent_tokens=64,
    )


@pytest.mark.parametrize("sink_tokens", [0, 4, 16])
@pytest.mark.parametrize("kv_len", [1, 3, 4, 5, 16, 17, 23, 24, 25, 60])
def test_fills_and_wraps(device: str, sink_tokens: int, kv_len: int) -> None:
    check(
        device,
        torch.float32,
        [kv_len - 1],
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


class Merge:
    """One head whose window holds one token: its part is that token's value, 1."""

    def __init__(self, device: str, host_part: float, host_lse: float, position: int = 0) -> None:
        self.device = device
        self.query = torch.zeros(1, 64, device=device)
        self.window = torch.ones(1, 2, 1, 8, 64, device=device)
        self.positions = torch.tensor([position], device=device)
        self.host_out = host(torch.full((1, 64), host_part), device)
        self.host_lse = host(torch.tensor([[host_lse]]), device)
        self.out = poisoned(1, 64, dtype=torch.float32, device=device)

    def run(self, **options: Any) -> list[float]:
        window_attention(
            self.query,
            self.window,
            self.positions,
            sm_scale=1.0,
            host_out=self.host_out,
            host_lse=self.host_lse,
            out=self.out,
            **options,
        )
        values: list[float] = self.out.cpu().unique().tolist()
        return values


@pytest.mark.parametrize(
    ("position", "host_part", "host_lse", "expected"),
    [
        (0, 3.0, 0.0, 2.0),
        (1, 4.0, 0.0, 2.0),
        (0, 3.0, 500.0, 3.0),
        (0, 3.0, -500.0, 1.0),
        (0, NAN, -INFINITY, 1.0),  # the CPU had nothing to attend to
        (-1, 3.0, 1.0, 3.0),
        (-1, NAN, -INFINITY, 0.0),  # an inactive row
        (0, 3.0, INFINITY, 3.0),  # the CPU's answer is complete
        (-1, 3.0, INFINITY, 3.0),
    ],
)
def test_weights(
    device: str, position: int, host_part: float, host_lse: float, expected: float
) -> None:
    assert Merge(device, host_part, host_lse, position).run() == [expected]


def flags_of(device: str, value: int) -> dict[str, torch.Tensor]:
    flag = host(torch.full((1,), value, dtype=torch.int32), device)
    return {"flag": flag, "counter": torch.zeros(1, dtype=torch.int32, device=device)}


def test_lowers_the_flag(device: str) -> None:
    flags = flags_of(device, 1)
    assert Merge(device, 3.0, 0.0).run(**flags) == [2.0]
    assert flags["flag"].tolist() == flags["counter"].tolist() == [0]


def test_waits_for_the_flag(device: str) -> None:
    if device == "cpu" and runs_kernel(torch.empty(0)):
        pytest.skip("the interpreter does not wait")
    merge, flags = Merge(device, NAN, NAN), flags_of(device, 0)
    times = torch.zeros(2, dtype=torch.int64, device=device)
    merge.run(**flags_of(device, 1))  # compiled by now

    def answer() -> None:
        time.sleep(0.1)
        merge.host_out.fill_(5.0)
        merge.host_lse.fill_(0.0)
        flags["flag"][0] = 1

    thread = threading.Thread(target=answer)
    thread.start()
    assert merge.run(**flags, times=times) == [3.0]
    thread.join()
    waited = int(times[1] - times[0])
    assert 10**7 < waited < 10**9


def test_wrong_operands() -> None:
    query, window = torch.zeros(1, 128), torch.zeros(1, 2, 2, 8, 64)
    position, lse = torch.zeros(1, dtype=torch.int64), torch.zeros(1, 2)
    operands = {"sm_scale": 1.0, "host_out": query, "host_lse": lse, "out": query}
    with pytest.raises(ValueError, match=r"window must be \[n, 2, .*, got \[2, 2, 8, 64\]"):
        window_attention(query, window[0], position, **operands)
    with pytest.raises(ValueError, match=r"host_out must be torch.float32, got torch.float16"):
        window_attention(query, window, position, **{**operands, "host_out": query.half()})
    with pytest.raises(ValueError, match=r"host_lse must be \[1, 2\], got \[2, 2\]"):
        window_attention(query, window, position, **{**operands, "host_lse": lse.expand(2, 2)})
    with pytest.raises(ValueError, match=r"head_dim must be a multiple of 16, got 60"):
        window_attention(query, window[..., :60], position, **operands)
    flag = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"flag and counter must be given together"):
        window_attention(query, window, position, **operands, flag=flag)
    with pytest.raises(ValueError, match=r"flag must be torch.int32, got torch.int64"):
        window_attention(query, window, position, **operands, flag=position, counter=flag)


@pytest.mark.cuda
def test_host_memory_must_be_pinned() -> None:
    merge = Merge("cuda", 1.0, 0.0)
    merge.host_out = merge.host_out.clone()
    with pytest.raises(ValueError, match=r"host_out must be on cuda:0 or in pinned host memory"):
        merge.run()
