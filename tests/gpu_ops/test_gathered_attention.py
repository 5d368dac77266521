"""gathered_attention against float64: what it merges into a window's result, and what it leaves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from cases.host_pages import HostPages, Selections
from cases.operands import DTYPES, TOLERANCE, assert_close, attention, poisoned, random
from cases.pairwise import pairwise
from cases.seeded import new_rng
from cases.slowly import combinations

from gpu_ops.choose_places import fresh
from gpu_ops.gather_rows import gather_rows
from gpu_ops.gathered_attention import MissingRows, gathered_attention, num_gathered_splits


class Step:
    """Rows of one step: gathered tokens, and attention to some window before.

    Args:
        middle: per row and unit how many tokens are gathered, as of `Selections`.
        has_window: whether the window attended to anything; else its output is NaN.
    """

    def __init__(
        self,
        device: str,
        dtype: torch.dtype,
        middle: list[list[int]],
        *,
        capacity: int = 40,
        inactive: tuple[int, ...] = (),
        heads: tuple[int, ...] = (2, 0),
        num_kv_heads: int = 3,
        group_size: int = 3,
        head_dim: int = 64,
        num_splits: int = 3,
        has_window: bool = True,
    ) -> None:
        rng = self.rng = new_rng()
        n, num_qo_heads = len(middle), num_kv_heads * group_size
        self.device, self.dtype, self.heads, self.group_size = device, dtype, heads, group_size
        self.capacity, self.sm_scale = capacity, head_dim**-0.5
        kv_lens = [capacity + 20] * n
        self.lists = Selections(rng, device, kv_lens, middle, capacity)
        self.head_indices = torch.tensor(heads, dtype=torch.int32, device=device)
        self.positions = torch.tensor(kv_lens, device=device) - 1
        self.positions[list(inactive)] = -1
        shape = (n, 2, len(heads), capacity, head_dim)
        # Whatever an earlier step has left beyond this one's tokens must not count.
        self.gathered = poisoned(*shape, dtype=dtype, device=device)
        self.query = random(rng, n, num_qo_heads * head_dim, dtype=dtype, device=device, scale=2.0)
        window = random(
            rng, n, 2, num_kv_heads, 7, head_dim, dtype=dtype, device=device, scale=1.5
        ).double()
        parts = [
            attention(self.query[i], window[i, 0], window[i, 1], self.sm_scale) for i in range(n)
        ]
        self.window = window
        self.window_out = torch.stack([o for o, _ in parts]).float()
        self.window_lse = torch.stack([lse for _, lse in parts]).float()
        if not has_window:
            self.window = window[:, :, :, :0]
            self.window_out.fill_(float("nan"))
            self.window_lse.fill_(float("-inf"))
        self.out, self.lse = self.window_out.clone(), self.window_lse.clone()
        partial = (n, len(heads) * group_size, num_splits)
        options = {"dtype": torch.float32, "device": device}
        self.options: dict[str, Any] = self.lists.options() | {
            "group_size": group_size,
            "sm_scale": self.sm_scale,
            "partial_out": poisoned(*partial, head_dim, **options),
            "partial_lse": poisoned(*partial, **options),
        }
        self.fill()

    def fill(self) -> None:
        """Random keys and values where the lists have tokens, NaN beyond."""
        self.gathered.fill_(float("nan"))
        for row in range(len(self.gathered)):
            for slot, kv_head in enumerate(self.heads):
                kv = self.gathered[row, :, slot, : len(self.lists.of_head(row, kv_head))]
                kv.copy_(random(self.rng, *kv.shape, dtype=self.dtype, device=self.device))

    def run(self, **options: Any) -> None:
        gathered_attention(
            self.query,
            self.gathered,
            self.lists.counts,
            self.positions,
            self.head_indices,
            **{"out": self.out, "lse": self.lse} | self.options | options,
        )

    def check(self, tolerance: float) -> None:
        """Softmaxes over window and tokens of heads that gathered some; others are as before."""
        n, group_size = len(self.query), self.group_size
        out = self.out.view(n, self.lse.shape[1] // group_size, group_size, -1)
        query, before = self.query.view(out.shape), self.window_out.view(out.shape)
        lse, lse_before = (x.view(out.shape[:3]) for x in (self.lse, self.window_lse))
        for row, position in enumerate(self.positions.tolist()):
            for kv_head in range(out.shape[1]):
                slot = self.heads.index(kv_head) if kv_head in self.heads else -1
                num_tokens = len(self.lists.of_head(row, kv_head))
                if slot < 0 or position < 0 or not num_tokens:
                    assert torch.equal(
                        out[row, kv_head].nan_to_num(7.0), before[row, kv_head].nan_to_num(7.0)
                    )
                    assert torch.equal(lse[row, kv_head], lse_before[row, kv_head])
                    continue
                kv = self.gathered[row, :, slot, :num_tokens].double()
                kv = torch.cat((self.window[row, :, kv_head], kv), dim=1)[:, None]
                o, expected_lse = attention(
                    query[row, kv_head].flatten(), kv[0], kv[1], self.sm_scale
                )
                assert_close(out[row, kv_head].flatten(), o, tolerance)
                assert_close(lse[row, kv_head], expected_lse, 1e-5)

    def check_with_window(
        self,
        tolerance: float,
        clusters: int = 0,
        *,
        has_sinks: bool = False,
        softcap: float = 0.0,
    ) -> None:
        """In one launch: heads that gathered nothing attend to the window, inactive rows to
        nothing; other heads are left alone. Means of clusters count as often as they have tokens.
        """
        n, group_size = len(self.query), self.group_size
        num_kv_heads, head_dim = self.lse.shape[1] // group_size, self.gathered.shape[4]
        counts = torch.from_numpy(self.rng.integers(-3, 5, (n, num_kv_heads, clusters)))
        counts.clamp_min_(0)
        shape_of_means = (n, 2, len(self.heads), clusters, head_dim)
        means = random(self.rng, *shape_of_means, dtype=self.dtype, device=self.device, scale=1.5)
        rest = {"means": means, "log_counts": counts.float().log2().to(self.device)}
        sinks = random(
            self.rng, self.lse.shape[1], dtype=torch.float32, device=self.device, scale=4.0
        )
        of_groups = sinks.view(num_kv_heads, -1) if has_sinks else [None] * num_kv_heads
        window = poisoned(
            *(
                n,
                2,
                self.window.shape[2],
                self.window.shape[3] + 2,
                self.query.shape[1] // self.lse.shape[1],
            ),
            dtype=self.dtype,
            device=self.device,
        )
        window[:, :, :, : self.window.shape[3]] = self.window.to(self.dtype)
        # A short context: the window is not full. Then nothing can have been gathered.
        is_short = [
            not any(len(self.lists.of_head(row, head)) for head in self.heads) for row in range(n)
        ]
        for row, short in enumerate(is_short):
            if short and self.positions[row] >= 0:
                self.positions[row] = self.window.shape[3] - 1
            elif self.positions[row] >= 0:
                window[row, :, :, self.window.shape[3] :] = self.window[row, :, :, :2].to(
                    self.dtype
                )
        out = poisoned(*self.query.shape, dtype=self.dtype, device=self.device)
        partial_out, partial_lse = (self.options[f"partial_{name}"] for name in ("out", "lse"))
        *shape, num_splits = partial_lse.shape
        options = {"dtype": torch.float32, "device": self.device}
        self.run(
            out=out,
            lse=None,
            window=window,
            **(rest if clusters else {}),
            sinks=sinks if has_sinks else None,
            softcap=softcap,
            partial_out=poisoned(*shape, num_splits + 1, partial_out.shape[-1], **options),
            partial_lse=poisoned(*shape, num_splits + 1, **options),
        )
        grouped = out.view(n, self.lse.shape[1] // group_size, group_size, -1)
        query = self.query.view(grouped.shape)
        for row, position in enumerate(self.positions.tolist()):
            for kv_head in range(grouped.shape[1]):
                if kv_head not in self.heads:
                    assert grouped[row, kv_head].isnan().all()
                    continue
                if position < 0:
                    assert not grouped[row, kv_head].any()
                    continue
                slot = self.heads.index(kv_head)
                kv = self.gathered[row, :, slot, : len(self.lists.of_head(row, kv_head))].double()
                seen = window[row, :, kv_head, : position + 1].double()
                times = counts[row, kv_head].to(self.device)
                others = means[row, :, slot].double().repeat_interleave(times, dim=1)
                kv = torch.cat((seen, kv, others), dim=1)[:, None]
                q, of_group = query[row, kv_head].flatten(), of_groups[kv_head]
                o, _ = attention(q, kv[0], kv[1], self.sm_scale, of_group, softcap)
                assert_close(grouped[row, kv_head].flatten(), o, tolerance)


def check(device: str, dtype: torch.dtype, *arguments: Any, **options: Any) -> None:
    step = Step(device, dtype, *arguments, **options)
    step.run()
    step.check(2 * TOLERANCE[dtype])
    if options.get("has_window", True):
        step.check_with_window(2 * TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("dtype", "clusters", "softcap"), combinations(DTYPES, [0, 5], [0.5, 50.0])
)
def test_soft_caps(device: str, dtype: torch.dtype, clusters: int, softcap: float) -> None:
    """Of rows, of the window and of means."""
    step = Step(device, dtype, [[5, 0, 40], [3, 1, 0], [0, 0, 0]], inactive=(1,))
    step.check_with_window(2 * TOLERANCE[dtype], clusters, softcap=softcap)


@pytest.mark.parametrize("clusters", [0, 5])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sinks(device: str, dtype: torch.dtype, clusters: int) -> None:
    """Beside rows, means and the window; an inactive row is 0, and so is its sink's value."""
    step = Step(device, dtype, [[5, 0, 40], [3, 1, 0], [0, 0, 0], [7, 7, 7]], inactive=(1,))
    step.check_with_window(2 * TOLERANCE[dtype], clusters, has_sinks=True)
    with pytest.raises(ValueError, match="sinks need a window"):
        step.run(sinks=torch.zeros_like(step.lse[0]))


@pytest.mark.parametrize(
    ("dtype", "head_dim", "group_size"), pairwise(DTYPES, [64, 128], [1, 3, 4, 7]), ids=str
)
def test_shapes(device: str, dtype: torch.dtype, head_dim: int, group_size: int) -> None:
    middle = [[33, 7, 40], [9, 9, 9]]
    check(device, dtype, middle, head_dim=head_dim, group_size=group_size, inactive=(1,))


@pytest.mark.parametrize(
    ("middle", "shared"), combinations([0, 1, 15, 16, 17, 39, 40, -3, -7], [True, False])
)
def test_counts(device: str, middle: int, shared: bool) -> None:
    check(device, torch.float32, [[middle] if shared else [5, 3, middle]])


@pytest.mark.parametrize("num_splits", [1, 2, 7, 20])
def test_splits(device: str, num_splits: int) -> None:
    middle = [[300, 64, 1], [17, 130, 299]]
    check(device, torch.float32, middle, capacity=300, num_splits=num_splits)


@pytest.mark.parametrize("clusters", [1, 7, 64, 200])
@pytest.mark.parametrize("dtype", DTYPES)
def test_clusters(device: str, dtype: torch.dtype, clusters: int) -> None:
    """Of tokens that are neither gathered nor in the window; of some there are none."""
    step = Step(device, dtype, [[33, 7, 40], [9, 9, 9], [0, 0, 0]], inactive=(1,))
    step.check_with_window(2 * TOLERANCE[dtype], clusters)


@pytest.mark.parametrize("heads", [(0,), (1, 0), (2, 1, 0)])
def test_heads(device: str, heads: tuple[int, ...]) -> None:
    check(device, torch.float32, [[20, 0, 9]], heads=heads)


def test_without_a_window(device: str) -> None:
    """Its output may be anything; heads that gathered nothing keep it."""
    check(device, torch.float32, [[20, 4, 9], [0, 0, 6]], has_window=False)


def test_a_head_split_over_several(device: str) -> None:
    """Its tokens in two calls, each merged into what was there, are its tokens in one."""
    step = Step(device, torch.float32, [[33, 7, 40], [0, 9, 3]])
    for first, last in ((0, 9), (9, 40)):
        gathered_attention(
            step.query,
            step.gathered[:, :, :, first:last].contiguous(),
            step.lists.counts - first,
            step.positions,
            step.head_indices,
            out=step.out,
            lse=step.lse,
            **step.options,
        )
    step.check(2 * TOLERANCE[torch.float32])


def test_after_gather_rows(device: str) -> None:
    """The two together, over host pages."""
    middle, kv_lens = [[20, 7, 40], [0, 1, 33]], [60, 60]
    step = Step(device, torch.bfloat16, middle)
    host = HostPages(
        step.rng, device, torch.bfloat16, kv_lens, num_kv_heads=3, head_dim=64, page_tokens=16
    )
    step.gathered.fill_(float("nan"))
    gather_rows(
        step.lists.selection,
        step.lists.counts,
        host.table,
        step.positions,
        torch.tensor(step.heads, dtype=torch.int32, device=device),
        num_kv_heads=3,
        page_tokens=16,
        out=step.gathered,
        **step.lists.options(),
    )
    step.run()
    step.check(2 * TOLERANCE[torch.bfloat16])
    tokens = step.lists.of_head(0, 2)
    assert torch.equal(step.gathered[0, :, 0, :40].cpu(), host.kv[0][:, 2, tokens])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("capacity", "num_splits"), [(40, 3), (300, 2)])
def test_rows_that_are_missing(
    device: str, dtype: torch.dtype, capacity: int, num_splits: int
) -> None:
    """They are brought from host pages, of this layer's heads, and are there afterwards."""
    middle, first_head = [[capacity, 7, 33], [9, 9, 0], [9, 9, 9]], 1
    step = Step(device, dtype, middle, capacity=capacity, num_splits=num_splits, inactive=(2,))
    kv_lens = [capacity + 20] * 3
    host = HostPages(step.rng, device, dtype, kv_lens, num_kv_heads=3, head_dim=64, page_tokens=16)
    token_of = torch.full((3, 4, capacity), 2**30, dtype=torch.int32)
    step.gathered.fill_(float("nan"))
    for row, slot in np.ndindex(3, 2):
        tokens = step.lists.of_head(row, step.heads[slot])
        rows = host.kv[row][:, step.heads[slot], tokens]
        is_missing = torch.from_numpy(step.rng.random(len(tokens)) < (0.3, 1.0, 0.0)[row])
        if row == 0 and slot == 1:
            is_missing[:] = torch.arange(len(tokens)) >= 20  # side by side
        of_head = token_of[row, first_head + slot, : len(tokens)]
        of_head.copy_(torch.where(is_missing, fresh(tokens), tokens))
        rows = torch.where(is_missing[:, None], float("nan"), rows)
        step.gathered[row, :, slot, : len(tokens)] = rows.to(step.gathered)
    expected = token_of.clone()
    expected[:, 1:3] = torch.where(token_of[:, 1:3] < -1, fresh(token_of[:, 1:3]), expected[:, 1:3])
    token_of = token_of.to(device)
    step.run(missing=MissingRows(token_of, first_head, host.table, 16))
    step.check(2 * TOLERANCE[dtype])
    assert torch.equal(token_of.cpu(), expected)
    for row, slot in np.ndindex(2, 2):
        tokens = step.lists.of_head(row, step.heads[slot])
        held = step.gathered[row, :, slot, : len(tokens)].cpu()
        assert torch.equal(held, host.kv[row][:, step.heads[slot], tokens])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("what", ["rows", "missing rows", "means"])
def test_keys_alone(device: str, dtype: torch.dtype, what: str) -> None:
    """As with values that are their keys, of which the first elements are wanted."""
    step, latent_dim, n, clusters = Step(device, dtype, [[33, 7, 40], [9, 9, 0]]), 48, 2, 5
    of = {"dtype": dtype, "device": device}
    window = random(step.rng, n, 2, 3, 7, 64, **of)
    means = random(step.rng, n, 2, 2, clusters, 64, **of)
    keys = [random(step.rng, 1, 3, 60, 64, dtype=dtype, device="cpu") for _ in range(n)]
    for x in (window, means, step.gathered):
        x[:, 1] = x[:, 0]
    *shape, num_splits = step.options["partial_lse"].shape
    found = []
    for parts in (2, 1):
        pages = [kv.expand(parts, -1, -1, -1) for kv in keys]
        sizes = {"num_kv_heads": 3, "head_dim": 64, "page_tokens": 16, "kv": pages}
        host = HostPages(step.rng, device, dtype, [60] * n, **sizes)
        more: dict[str, Any] = {}
        if what == "missing rows":
            token_of = torch.full((n, 2, 40), 2**30, dtype=torch.int32)
            for row, slot in np.ndindex(n, 2):
                tokens = step.lists.of_head(row, step.heads[slot])
                token_of[row, slot, : len(tokens)] = fresh(tokens)
            more["missing"] = MissingRows(token_of.to(device), 0, host.table, 16)
        if what == "means":
            logs = torch.ones(n, 3, clusters, device=device)
            more |= {"means": means, "log_counts": logs}
        out = poisoned(*step.query.shape, **of)
        gathered_attention(
            step.query,
            step.gathered[:, :parts].contiguous(),
            step.lists.counts,
            step.positions,
            step.head_indices,
            latent_dim=latent_dim if parts == 1 else 0,
            window=window[:, :parts].contiguous(),
            out=out,
            **step.options
            | more
            | {
                "partial_out": poisoned(
                    *shape, num_splits + 1, 64, dtype=torch.float32, device=device
                ),
                "partial_lse": poisoned(*shape, num_splits + 1, dtype=torch.float32, device=device),
            },
        )
        found.append(out.view(n, 3, 3, 64)[:, list(step.heads), :, :latent_dim])
    assert found[0].isfinite().all()
    assert_close(found[1].flatten(), found[0].double().flatten(), 2 * TOLERANCE[dtype])


LARGE = {"capacity": 4096, "num_kv_heads": 8, "group_size": 4, "head_dim": 128}


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(5,), (0, 1, 2, 3, 4, 5, 6, 7)])
def test_real_sizes(dtype: torch.dtype, heads: tuple[int, ...]) -> None:
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    step = Step(
        "cuda",
        dtype,
        [[4096] * 8, [1, 4095, 0, 2000, 64, 65, 63, 1024]],
        heads=heads,
        num_splits=num_gathered_splits(len(heads), 4096, multiprocessors),
        **LARGE,
    )
    step.run()
    step.check(8 * TOLERANCE[dtype])  # long sums of what nearly cancels


@pytest.mark.cuda
def test_graph_replays_with_other_counts() -> None:
    step = Step("cuda", torch.bfloat16, [[4096] * 8], heads=(6, 1, 3), num_splits=64, **LARGE)
    step.run()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step.run()
    for middle, position in ((1, 4000), (3000, 5000), (0, 4115), (4096, -1), (77, 4115)):
        kv_lens = [4096 + 20]
        lists = Selections(step.rng, "cuda", kv_lens, [[middle] * 8], 4096)
        step.lists.counts.copy_(lists.counts)
        step.lists.chosen = lists.chosen
        step.positions.fill_(position)
        step.fill()
        step.out.copy_(step.window_out)
        step.lse.copy_(step.window_lse)
        graph.replay()
        step.check(8 * TOLERANCE[torch.bfloat16])


def test_number_of_splits() -> None:
    assert num_gathered_splits(8, 4096, 132) == 33  # two programs on each multiprocessor
    assert num_gathered_splits(1, 4096, 132) == 128
    assert num_gathered_splits(1, 256, 132) == 8
    assert num_gathered_splits(64, 16, 4) == 1


def test_wrong_operands() -> None:
    step = Step("cpu", torch.float32, [[5, 5, 5]])
    with pytest.raises(ValueError, match="groups of 8 heads of 64, got 576 columns"):
        step.run(group_size=8)
    with pytest.raises(ValueError, match="group_size must be at least 1, got 0"):
        step.run(group_size=0)
    with pytest.raises(ValueError, match=r"partial_lse must be \[1, 6, 4\], got \[1, 7, 4\]"):
        step.run(partial_lse=torch.zeros(1, 7, 4))
    step.lists.counts = step.lists.counts[:, :2]
    with pytest.raises(ValueError, match=r"counts must be \[n, 1\] or .*=3\], got \[1, 2\]"):
        step.run()


def test_a_window_that_is_not_finite_shows(device: str) -> None:
    step = Step(device, torch.float32, [[33, 7, 40], [9, 9, 9]])
    step.window[0, 0, 2, 3, 5] = float("nan")
    step.window = step.window.float()
    out = torch.zeros_like(step.query)
    *shape, num_splits = step.options["partial_lse"].shape
    options = {"dtype": torch.float32, "device": device if device == "cuda" else "cpu"}
    partial = {
        "partial_out": torch.zeros(*shape, num_splits + 1, 64, **options),
        "partial_lse": torch.zeros(*shape, num_splits + 1, **options),
    }
    gathered_attention(
        step.query,
        step.gathered,
        step.lists.counts,
        step.positions,
        step.head_indices,
        out=out,
        window=step.window,
        **step.options | partial,
    )
    is_finite = out.view(2, 3, -1).isfinite().all(-1).tolist()
    assert is_finite == [[True, True, False], [True, True, True]]
