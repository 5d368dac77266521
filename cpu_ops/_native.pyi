"""Types of the C++ extension (cpp/bindings/bindings.cpp).

Addresses are plain integers; `cpu_ops.native` checks them.
"""

from collections.abc import Sequence
from typing import Any, overload

import numpy as np
import numpy.typing as npt

BINDINGS_DIGEST: str
MAX_GROUP_SIZE: int
MAX_HEAD_DIM: int
HEAD_DIM_MULTIPLE: int
CODE_BLOCK: int
ERROR_BYTES: int
MAX_LINEAR_ROWS: int
PACKED_GROUP: int
FLAG_STRIDE: int

_Int64s = npt.NDArray[np.int64]
_Int32s = npt.NDArray[np.int32]

def available_isas() -> list[str]: ...
def known_isas() -> list[str]: ...
def default_isa() -> str: ...
def policy_context_offsets() -> dict[str, int]: ...
def top_k(isa: str, x: int, n: int, k: int) -> _Int32s: ...
def top_mass(x: int, positions: _Int32s, mass: float) -> int: ...
def score_codes(
    isa: str,
    query: int,
    group_size: int,
    head_dim: int,
    bits: int,
    levels: int,
    offsets: int,
    codes: int,
    scales: int,
    n: int,
    scores: int,
) -> None: ...
def rank_rows(
    isa: str,
    query: int,
    num_queries: int,
    head_dim: int,
    rows: int,
    scales: int,
    spreads: int,
    spread_weight: float,
    ranges: int,
    num_ranges: int,
    ranks: int,
) -> None: ...
def chunk_boxes(
    pool: WorkerPool,
    isa: str,
    dtype: int,
    keys: int,
    num_heads: int,
    head_bytes: int,
    row_bytes: int,
    width: int,
    starts: _Int64s,
    points: int,
    centres: int,
    widths: int,
) -> None: ...
def spherical_kmeans(
    pool: WorkerPool,
    isa: str,
    points: int,
    num_heads: int,
    num_points: int,
    width: int,
    num_clusters: int,
    iterations: int,
    labels: int,
    centroids: int,
) -> None: ...

IS_INTEL: bool

def has_products(isa: str, dtype: int) -> bool: ...
def has_causal_attention(isa: str, dtype: int, head_dim: int) -> bool: ...
def causal_attention(
    pool: WorkerPool,
    isa: str,
    dtype: int,
    queries: int,
    query_head: int,
    query_row: int,
    num_queries: int,
    group_size: int,
    keys: int,
    values: int,
    kv_head: int,
    kv_row: int,
    kv_len: int,
    num_kv_heads: int,
    head_dim: int,
    scale: float,
    window: int,
    sinks: int,
    out: int,
) -> None: ...
def rms_norm(
    pool: WorkerPool,
    isa: str,
    dtype: int,
    x: int,
    weight: int,
    eps: float,
    num_rows: int,
    width: int,
    out: int,
) -> None: ...

class DeltaRule:
    def __init__(
        self,
        dtype: int,
        sizes: Sequence[int],
        places: Sequence[int],
        conv: int,
        norm: int,
        rate: int,
        dt_bias: int,
        eps: float,
    ) -> None: ...
    def run(
        self,
        pool: WorkerPool,
        isa: str,
        projected: int,
        num_rows: int,
        row_size: int,
        conv_state: int,
        state: int,
        out: int,
    ) -> None: ...

def rotate_heads(
    pool: WorkerPool,
    isa: str,
    dtype: int,
    x: int,
    token: int,
    num_tokens: int,
    num_heads: int,
    head_dim: int,
    rotary_dim: int,
    cos: int,
    sin: int,
    out: int,
) -> None: ...
def time_sequential_read(pool: WorkerPool, isa: str, data: int, num_bytes: int) -> float: ...
def time_row_gather(
    pool: WorkerPool, isa: str, data: int, rows: _Int32s, row_bytes: int
) -> float: ...

class WorkerPool:
    def __init__(self, num_threads: int, spin_us: int) -> None: ...
    @property
    def num_threads(self) -> int: ...
    def close(self) -> None: ...

class StepRows:
    def __init__(
        self,
        page_tables: _Int64s,
        table_strides: _Int64s,
        kv_lens: _Int64s,
        arrays: _Int64s,
        text_marks: _Int64s,
        starts: _Int64s,
        budgets: _Int64s,
    ) -> None: ...

class DecodeAttention:
    def __init__(
        self,
        pool: WorkerPool,
        isa: str,
        layers: Sequence[tuple[int, int, int, float, float, int, int]],
        page_shift: int,
        dtype: int,
        row_format: int,
        keys_only: bool,
    ) -> None: ...
    def set_policy(
        self,
        budget_tokens: int,
        dense_tokens: int,
        sink_tokens: int,
        recent_tokens: int,
        top_p: float,
        per_query_head: bool,
        members: Sequence[tuple[bool, Sequence[int], Sequence[float], int, int]],
        roles: Sequence[int],
        shares_selection: bool,
        member_of: Sequence[int],
        number_of: Sequence[int],
        estimate_clusters: int,
    ) -> None: ...
    def attend(
        self,
        layer_idx: int,
        query: int,
        query_stride_bytes: int,
        output: int,
        output_stride_bytes: int,
        lse: int,
        step: StepRows,
        first_row: int,
        num_rows: int,
        sparse: bool,
        prepares: bool,
    ) -> None: ...
    def rope_append(
        self,
        layer_idx: int,
        step: StepRows,
        qkv: int,
        cos: int,
        sin: int,
        rotary_dim: int,
        q_norm: int,
        k_norm: int,
        norm_eps: float,
    ) -> None: ...
    def start_probe(self, share: float, seed: int) -> None: ...
    def probed(self) -> list[tuple[int, float]]: ...
    def num_probed(self) -> int: ...
    def learn(
        self,
        layer_idx: int,
        query: int,
        step: StepRows,
        window_on_device: bool,
        sink_tokens: int,
        recent_tokens: int,
        chooses_only: bool,
        elsewhere: list[bool],
    ) -> None: ...
    def prepare(
        self,
        layer_idx: int,
        step: StepRows,
    ) -> None: ...
    def hold_top_p(self, top_p: float) -> None: ...
    def take_chosen(self) -> tuple[int, int]: ...
    def time_layers(
        self,
        queries: list[int],
        output: int,
        step: StepRows,
        sparse_layers: list[bool],
        prepares: bool,
        chooses_only: bool,
    ) -> list[tuple[float, dict[str, Any]]]: ...
    def attend_csr(
        self,
        query: int,
        output: int,
        lse: int,
        pages: int,
        kv_len: int,
        indptr: _Int64s,
        indices: _Int32s,
        weights: int,
    ) -> float: ...
    def start_profile(self) -> None: ...
    def profile(self) -> dict[str, Any]: ...
    def record(self, on: bool) -> None: ...
    def drain(self) -> tuple[list[tuple[str, int, int, int, int, int, int, int]], int]: ...
    def last_selection(self) -> list[list[int]]: ...

class HotRows:
    def __init__(
        self, num_slots: int, num_layers: int, num_kv_heads: int, hot_tokens: int
    ) -> None: ...
    def forget(self, slot: int) -> None: ...
    def estimate(self, slot: int) -> None: ...
    def estimates(self, slot: int) -> bool: ...
    def hot(self, slot: int, layer_idx: int, kv_head: int) -> _Int32s: ...
    def take_counts(self) -> tuple[int, int]: ...
    def choose(self, slot: int, layer_idx: int, kv_head: int, tokens: _Int32s) -> _Int32s: ...

class Coprocessor:
    def __init__(
        self,
        attention: DecodeAttention,
        mailbox: list[int],
        max_rows: int,
        selection_units: int,
        selection_tokens: int,
        fetch_tokens: int,
        requests: list[list[int]],
        sparse_layers: list[bool],
        sink_tokens: int,
        recent_tokens: int,
        device_heads: list[bool],
        publishing_heads: list[bool],
        listed_heads: list[bool],
        hot_heads: list[bool],
        hot_rows: HotRows | None,
        experts: list[RoutedMlp | None],
        keep: object,
    ) -> None: ...
    def set_deadline(self, ns: int) -> None: ...
    def begin(
        self,
        slots: _Int64s,
        step: StepRows,
        queries: int,
        keep: object,
    ) -> None: ...
    def serve(self, request: int) -> None: ...
    def end(self) -> None: ...
    def start(self) -> None: ...
    def queue(
        self,
        slots: _Int64s,
        step: StepRows,
        queries: int,
        keep: object,
    ) -> None: ...
    def release_done(self) -> list[Any]: ...
    def wait(self, timeout_ns: int) -> tuple[str, str]: ...
    def abort(self, grace_ns: int) -> bool: ...
    def reset(self) -> None: ...
    def close(self) -> None: ...
    def forked(self) -> bool: ...
    def inject_stall(self, layer_idx: int, ns: int) -> None: ...
    def inject_death(self, layer_idx: int) -> None: ...

class Linear:
    @overload
    def __init__(
        self,
        dtype: int,
        in_features: int,
        weights: list[int],
        biases: list[int],
        out_features: list[int],
    ) -> None: ...
    @overload
    def __init__(
        self,
        dtype: int,
        in_features: int,
        formats: list[int],
        codes: list[int],
        scales: list[int],
        minimums: list[int],
        tables: list[int],
        biases: list[int],
        out_features: list[int],
    ) -> None: ...
    def unpack(self, pool: WorkerPool, isa: str, first: int, last: int, out: int) -> None: ...
    def run(
        self,
        pool: WorkerPool,
        isa: str,
        x: int,
        num_rows: int,
        norm_weight: int,
        norm_eps: float,
        gate: int,
        residual: int,
        out: int,
    ) -> None: ...

class RoutedLinear:
    def __init__(
        self,
        dtype: int,
        in_features: int,
        num_experts: int,
        out_features: int,
        format: int,
        codes: int,
        scales: int,
        minimums: int,
        table: int,
        bias: int,
        gate: int,
        alpha: float,
        limit: float,
    ) -> None: ...
    def run(
        self,
        pool: WorkerPool,
        isa: str,
        x: int,
        num_rows: int,
        pairs_per_row: int,
        experts: int,
        out: int,
    ) -> None: ...

def run_experts(
    up: RoutedLinear,
    down: RoutedLinear,
    pool: WorkerPool,
    isa: str,
    x: int,
    num_tokens: int,
    experts: int,
    weights: int,
    per_token: int,
    out: int,
) -> None: ...
def choose_experts(
    isa: str,
    dtype: int,
    logits: int,
    num_rows: int,
    num_experts: int,
    per_token: int,
    normalises: bool,
    rounds: bool,
    experts: int,
    weights: int,
) -> None: ...

class RoutedMlp:
    def __init__(
        self,
        router: Linear,
        up: RoutedLinear,
        down: RoutedLinear,
        per_token: int,
        normalises: bool,
        rounds: bool,
    ) -> None: ...

class DecoderStep:
    def __init__(
        self,
        hidden: int,
        ropes: Sequence[int],
        qkv: int,
        attended: int,
        gate_up: int,
        added: int,
        kept_queries: int,
        query_scale: int,
        step: StepRows,
    ) -> None: ...

class DecoderLayers:
    def __init__(self, attention: DecodeAttention) -> None: ...
    def add(
        self,
        input_norm: tuple[int, float],
        qkv: Linear,
        q_norm: int,
        k_norm: int,
        v_norm: int,
        head_norms_eps: float,
        whole: bool,
        o_proj: Linear,
        mlp_norm: tuple[int, float],
        gate_up: Linear | None,
        down: Linear | None,
        routed: RoutedMlp | None,
        attention_out_norm: tuple[int, float],
        mlp_out_norm: tuple[int, float],
        rope_idx: int,
        sparse: bool,
        gate: int,
        out_scale: float,
    ) -> None: ...
    def run(self, step: DecoderStep) -> None: ...
    def project(self, layer_idx: int, step: DecoderStep) -> None: ...
    def finish(self, layer_idx: int, step: DecoderStep) -> None: ...
