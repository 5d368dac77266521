"""Decode attention over paged keys and values in host memory, on the worker pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cpu_ops import _native
from cpu_ops.native import (
    INT8_ROWS,
    MAX_GROUP_SIZE,
    check_head_dim,
    check_rotary_dim,
    check_tensor,
    dtype_code,
    isa_name,
    of_layers,
    page_shift,
)
from cpu_ops.step_rows import DecodeStep
from cpu_ops.trace import TraceEvent
from cpu_ops.worker_pool import WorkerPool


class NativeAttention:
    """Attention of decode steps: to all tokens, or to some under a policy that a subclass sets.

    Args:
        num_qo_heads, num_kv_heads, head_dim: of all layers, or of each; as many query heads as a
            multiple of KV heads.
        page_tokens: tokens of a page; a power of two.
        dtype: of queries, keys and values.
        int8_rows: keys and values are int8 with a float16 scale of each 64, as the KV store has
            them.
        keys_only: pages have keys alone, of which values are the first elements. Outputs are then
            of whole keys.
        sm_scale: softmax scale, or that of each layer; None takes head_dim ** -0.5.
        softcap: scores are softcap * tanh(score / softcap), or that of each layer; 0: not capped.
        windows: how many tokens a row sees in each layer, the last ones; 0: all. A layer with a
            window selects nothing.
        sinks: of each layer float32 [num_qo_heads], logits that join each softmax and have no
            value, or None: outputs are less by their share, lse is of the tokens alone.
        isa: an ISA other than the process's (tests).

    Attributes:
        pool: whose threads attend.
        layer_heads: (num_qo_heads, num_kv_heads, head_dim) of each layer.
        num_qo_heads, num_kv_heads, head_dim: the most that a layer has.
        sm_scales, windows: of each layer.
        native: the C++ object, for native code that attends by itself.
        sparse_layers: bool [num_layers], where rows of more than `dense_tokens` select.
        window: sink tokens and recent tokens of every selection; None without a policy.
        is_probed: whether selections are compared with exact attention (`start_probe`).
        estimate_clusters: of each KV head, that stand for what is not chosen; 0: it is dropped.

    Raises:
        ValueError: shapes the kernels do not take.
    """

    estimate_clusters: int = 0

    def __init__(
        self,
        pool: WorkerPool,
        *,
        num_layers: int,
        num_qo_heads: int | Sequence[int],
        num_kv_heads: int | Sequence[int],
        head_dim: int | Sequence[int],
        page_tokens: int,
        dtype: torch.dtype,
        sm_scale: float | Sequence[float] | None = None,
        softcap: float | Sequence[float] = 0.0,
        windows: int | Sequence[int] = 0,
        sinks: Sequence[Tensor | None] | None = None,
        int8_rows: bool = False,
        keys_only: bool = False,
        isa: str | None = None,
    ) -> None:
        heads = {"num_qo_heads": num_qo_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
        columns = [of_layers(num_layers, name, size) for name, size in heads.items()]
        self.layer_heads: list[tuple[int, int, int]] = [*zip(*columns, strict=True)]
        for heads_of_layer in set(self.layer_heads):
            _check_heads(*heads_of_layer)
        self.pool = pool
        self.heads_differ = len(set(self.layer_heads)) > 1
        self.num_layers = num_layers
        self.num_qo_heads, self.num_kv_heads, self.head_dim = map(max, columns)
        self.dtype = dtype
        scale = [dim**-0.5 for dim in columns[2]] if sm_scale is None else sm_scale
        self.sm_scales = of_layers(num_layers, "sm_scale", scale)
        caps = of_layers(num_layers, "softcap", softcap)
        self.windows = of_layers(num_layers, "windows", windows)
        self.sinks = [None] * num_layers if sinks is None else list(sinks)  # kept alive
        for (num_heads, *_), of_layer in zip(self.layer_heads, self.sinks, strict=True):
            if of_layer is not None:
                check_tensor("sinks", of_layer, (num_heads,), torch.float32)
        addresses = [0 if x is None else x.data_ptr() for x in self.sinks]
        self.sparse_layers = np.zeros(num_layers, bool)
        self.window: tuple[int, int] | None = None
        self.budget_tokens = 0
        self.dense_tokens = 0
        self.is_probed = False
        self._prepares = False  # whether the policy has a `prepare`
        self.native = _native.DecodeAttention(
            pool.native,
            isa or isa_name(),
            [*zip(*columns, self.sm_scales, caps, self.windows, addresses, strict=True)],
            page_shift(page_tokens),
            dtype_code(dtype),
            INT8_ROWS if int8_rows else dtype_code(dtype),
            keys_only,
        )

    def query_features(self, layer_idx: int) -> int:
        """Elements of a token's queries in a layer."""
        num_qo_heads, _, head_dim = self.layer_heads[layer_idx]
        return num_qo_heads * head_dim

    def qkv_features(self, layer_idx: int) -> int:
        """Elements of a token's queries, keys and values in a layer."""
        num_qo_heads, num_kv_heads, head_dim = self.layer_heads[layer_idx]
        return (num_qo_heads + 2 * num_kv_heads) * head_dim

    def rope_append(
        self,
        layer_idx: int,
        step: DecodeStep,
        qkv: Tensor,
        rope: tuple[Tensor, Tensor],
        *,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        norm_eps: float = 0.0,
    ) -> None:
        """Rotate q and k, and write each row's k and v into its page of the host KV store.

        Args:
            qkv: [n, (num_qo_heads + 2 num_kv_heads) * head_dim]; queries are rotated in place.
            rope: cos, sin: [n, rotary_dim], of the first elements of each head.
            q_norm, k_norm: RMSNorm weights [head_dim] applied per head before the rotation (Qwen3);
                both or neither.
        """
        n, cos, sin = len(step.seqs), *rope
        head_dim = self.layer_heads[layer_idx][2]
        check_tensor("qkv", qkv, (n, self.qkv_features(layer_idx)), self.dtype)
        rotary_dim = check_rotary_dim(cos.shape[-1], head_dim)
        for name, table in (("cos", cos), ("sin", sin)):
            check_tensor(name, table, (n, rotary_dim), self.dtype)
        for name, weight in (("q_norm", q_norm), ("k_norm", k_norm)):
            if weight is not None:
                check_tensor(name, weight, (head_dim,), self.dtype)
        if (q_norm is None) != (k_norm is None):
            raise ValueError("q_norm and k_norm must both be given, or neither")
        self.native.rope_append(
            layer_idx,
            step.native,
            qkv.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            rotary_dim,
            0 if q_norm is None else q_norm.data_ptr(),
            0 if k_norm is None else k_norm.data_ptr(),
            norm_eps,
        )

    def prepare(self, layer_idx: int, step: DecodeStep) -> None:
        """Run the `prepare` of a layer's selection; may overlap whatever computes its queries.

        `attend` does it first where it was not called.
        """
        if self._prepares and self.sparse_layers[layer_idx] and not step.in_turns:
            self.native.prepare(layer_idx, step.native)
            step.prepared.add(layer_idx)

    def attend(
        self,
        layer_idx: int,
        step: DecodeStep,
        query: Tensor,
        out: Tensor,
        lse: Tensor | None = None,
    ) -> None:
        """Attend the rows of `step` to their sequences' keys and values of one layer.

        Args:
            query: [n, >= num_qo_heads * head_dim], rotated, unit stride in the last dimension; the
                query heads come first in each row.
            out: the same shape rules; receives o in its first num_qo_heads * head_dim columns.
            lse: optional float32 [n, num_qo_heads], natural log.

        Raises:
            RuntimeError: NaN or inf in the query or the cache; names the layer.
        """
        n, width = len(step.seqs), self.query_features(layer_idx)
        for name, x in (("query", query), ("out", out)):
            if x.dtype != self.dtype or x.device.type != "cpu":
                raise ValueError(f"{name} must be {self.dtype} on the CPU, got {x.dtype}")
            if x.dim() != 2 or x.shape[0] != n or x.shape[1] < width or x.stride(1) != 1:
                raise ValueError(
                    f"{name} must be [{n}, >= {width}] with unit column stride,"
                    f" got {list(x.shape)} with strides {x.stride()}"
                )
        if lse is not None and (
            lse.dtype != torch.float32
            or list(lse.shape) != [n, self.layer_heads[layer_idx][0]]
            or not lse.is_contiguous()
        ):
            num_heads = self.layer_heads[layer_idx][0]
            raise ValueError(f"lse must be float32 [{n}, {num_heads}], contiguous")
        item = query.element_size()
        sparse = bool(self.sparse_layers[layer_idx])
        in_turns = sparse and step.in_turns
        for first in range(n) if in_turns else [0]:
            self.native.attend(
                layer_idx,
                query.data_ptr(),
                query.stride(0) * item,
                out.data_ptr(),
                out.stride(0) * item,
                0 if lse is None else lse.data_ptr(),
                step.native,
                first,
                1 if in_turns else n,
                sparse,
                layer_idx not in step.prepared,
            )

    def time_layers(
        self,
        step: DecodeStep,
        queries: Sequence[Tensor],
        out: Tensor,
        *,
        prepares: bool = True,
        chooses_only: bool = False,
    ) -> list[tuple[float, dict[str, Any]]]:
        """Attend layer after layer as the CPU's decode step does, without its linear layers: for
        benches. Policies prepare, and keep no queries for a later `build`.

        Args:
            queries: of each layer [n, num_qo_heads * head_dim], rotated, contiguous.
            out: of the same shape; holds the last layer's o then.
            prepares: whether preparing counts; else it is done by then, as with a GPU.
            chooses_only: nothing is attended, as where a GPU asks a layer ahead; `out` is of no
                use.

        Returns:
            (seconds, what `profile` would return) of each layer.

        Raises:
            ValueError: tensors that do not fit, or rows that must attend in turns.
            RuntimeError: as `attend`.
        """
        if step.in_turns:
            raise ValueError("rows of one sequence whose policy has state cannot be timed together")
        shape = (len(step.seqs), self.query_features(0))
        for name, x in (*(("queries", query) for query in queries), ("out", out)):
            check_tensor(name, x, shape, self.dtype)
        if len(queries) != self.num_layers:
            raise ValueError(f"expected {self.num_layers} queries, got {len(queries)}")
        return self.native.time_layers(
            [query.data_ptr() for query in queries],
            out.data_ptr(),
            step.native,
            self.sparse_layers.tolist(),
            prepares,
            chooses_only,
        )

    def last_selection(self) -> list[list[int]]:
        """Tokens of each (row, unit) of the last `attend` that was sparse; [] where dense."""
        return self.native.last_selection()

    def start_probe(self, share: float, *, seed: int) -> None:
        """From the next step on, compare a random share of what is selected with exact attention.

        Of each (row, layer, KV head) that attends to a selection, `share` are drawn, by a generator
        of their own: outputs do not change. Their keys are scored on all threads when the layer has
        attended, or with a `Coprocessor` at the end of the step, while the GPU goes on. An LFPS
        bypass, which answers from the sinks, counts as a selection of the sinks.
        """
        self.native.start_probe(share, seed)
        self.is_probed = share > 0.0

    def probed(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """What was found so far, [num_layers, num_kv_heads] each: how many were compared, and the
        sum of the attention mass that they kept, of each the mean over the head's query heads.
        """
        counts = np.zeros((self.num_layers, self.num_kv_heads), np.int64)
        sums = np.zeros(counts.shape)
        for index, (count, mass) in enumerate(self.native.probed()):
            counts.flat[index], sums.flat[index] = count, mass
        return counts, sums

    def num_probed(self) -> int:
        """The sum of the counts that `probed` returns."""
        return self.native.num_probed()

    def start_profile(self) -> None:
        """Count times, bytes and tokens from now on."""
        self.native.start_profile()

    def profile(self) -> dict[str, Any]:
        """What was counted since `start_profile`, summed over workers.

        seconds: of each phase (predict, score, select, attend, update), by the workers' clocks.
        bytes: of keys, values and the policy's arrays read and written. scored_tokens,
        attended_tokens: tokens x units whose keys were scored exactly, and which were attended.
        """
        return self.native.profile()

    def trace(self, on: bool) -> None:
        """Record what each worker does, and a `Coprocessor`'s thread, from now on, or no more."""
        self.native.record(on)

    def trace_events(self) -> tuple[list[TraceEvent], int]:
        """What was recorded since the last call, and how many events were lost because nothing
        collected them in time: first those of the leading thread, then each worker's."""
        events, num_lost = self.native.drain()
        return [TraceEvent(*event) for event in events], num_lost


def _check_heads(num_qo_heads: int, num_kv_heads: int, head_dim: int) -> None:
    if num_qo_heads < 1 or num_qo_heads % num_kv_heads:
        raise ValueError(
            f"num_qo_heads must be a multiple of num_kv_heads={num_kv_heads}, got {num_qo_heads}"
        )
    if num_qo_heads // num_kv_heads > MAX_GROUP_SIZE:
        raise ValueError(
            f"at most {MAX_GROUP_SIZE} query heads may share a KV head,"
            f" got {num_qo_heads // num_kv_heads}"
        )
    check_head_dim(head_dim)


def attend_csr_rows(
    attention: NativeAttention,
    layer_idx: int,
    step: DecodeStep,
    query: torch.Tensor,
    out: torch.Tensor,
    indices: npt.NDArray[np.int32],
) -> float:
    """Attend the only row of `step` to `indices` int32 [num_kv_heads, tokens] of one layer; seconds
    that it took, calls from Python not counted.

    ValueError where KV heads have pages of their own.
    """
    if step.starts.size:
        raise ValueError("attend_csr_rows takes no rows whose KV heads have pages of their own")
    num_kv_heads, tokens = indices.shape
    indptr = np.arange(num_kv_heads + 1, dtype=np.int64) * tokens
    pages = int(step.page_tables[0] + layer_idx * step.table_strides[0] * 8)
    return attention.native.attend_csr(
        query.data_ptr(),
        out.data_ptr(),
        0,
        pages,
        int(step.kv_lens[0]),
        indptr,
        indices.reshape(-1),
        0,
    )
