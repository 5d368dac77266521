"""DecoderLayers: all layers in one call, against float64 and against its own parts."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from cases import kernel_references as reference
from cases.attention_cases import relative_error
from cases.seeded import new_rng
from cases.slowly import combinations

from cpu_ops import native
from cpu_ops.decoder_layers import DecoderLayers, LayersStep, NativeLayer
from cpu_ops.linear import Linear
from cpu_ops.routed_linear import ExpertChoice, Gate, RoutedLinear, RoutedMlp
from cpu_ops.worker_pool import WorkerPool
from offload.decode.attention import DecodeAttention
from offload.kv.store import KVStore
from offload.policies import Policy
from offload.policies.registry import make_policy

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# Relative L2 after two layers that round where transformers does, against none of it rounded.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
NUM_LAYERS, HIDDEN, INTERMEDIATE, EPS = 2, 96, 160, 1e-5
NUM_QO_HEADS, NUM_KV_HEADS, HEAD_DIM = 6, 2, 16
NUM_EXPERTS = 3
WINDOW = 20
QUERY_FEATURES, KV_FEATURES = NUM_QO_HEADS * HEAD_DIM, NUM_KV_HEADS * HEAD_DIM


@dataclass
class Case:
    """Layers over a store that holds random keys and values, and the rows of one step."""

    layers: list[NativeLayer]
    weights: list[dict[str, torch.Tensor]]
    attention: DecodeAttention
    seqs: list[int]
    kv_lens: list[int]
    hidden: torch.Tensor
    rope: tuple[torch.Tensor, torch.Tensor]
    other_rope: tuple[torch.Tensor, torch.Tensor]
    past: list[tuple[np.ndarray, np.ndarray]]  # of each sequence: k, v [layers, heads, tokens, dim]
    query_scale: torch.Tensor | None = None

    def stack(self) -> DecoderLayers:
        return DecoderLayers(self.layers, self.attention)


def make_case(
    pool: WorkerPool,
    dtype: torch.dtype,
    *,
    rows: int = 2,
    policy: Policy | str = "full",
    kv_len: int = 37,
    kind: str = "llama",
    isa: str | None = None,
) -> Case:
    """`kind`: "llama"; "qwen3" with norms of heads; "olmo2" with norms of all heads and of sums;
    "smollm3" with layers that rotate otherwise; "gemma3" with a window in the first, and GELUs;
    "gpt_oss" with that window and sinks; "phi3" that rotates a part of each head, and has q, k and
    v in one matrix; "ministral3" whose queries are scaled by row; "moe" whose second MLP has
    experts, which are all chosen: the next best one in bfloat16 is another than in float64."""
    rng = new_rng()

    def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
        x = rng.standard_normal(shape, dtype=np.float32) * scale
        return torch.from_numpy(x.astype(np.float32)).to(dtype)

    store = KVStore(
        num_layers=NUM_LAYERS,
        num_kv_heads=NUM_KV_HEADS,
        head_dim=HEAD_DIM,
        dtype=dtype,
        page_tokens=16,
    )
    policy = make_policy(policy) if isinstance(policy, str) else policy
    sinks = [torch.linspace(-3, 3, NUM_QO_HEADS) + layer_idx for layer_idx in range(NUM_LAYERS)]
    attention = DecodeAttention(
        policy,
        store,
        num_qo_heads=NUM_QO_HEADS,
        pool=pool,
        windows=[
            WINDOW if kind in ("gemma3", "gpt_oss") and not i else 0 for i in range(NUM_LAYERS)
        ],
        sinks=sinks if kind == "gpt_oss" else None,
        isa=isa,
    )
    seqs, kv_lens, past = [], [], []
    for row in range(rows):
        n = kv_len + 5 * row
        seq = store.new_sequence()
        store.reserve([seq], [n])
        k, v = (random(NUM_LAYERS, NUM_KV_HEADS, n, HEAD_DIM) for _ in range(2))
        for layer_idx in range(NUM_LAYERS):
            store.append(seq, layer_idx, k[layer_idx].transpose(0, 1), v[layer_idx].transpose(0, 1))
        store.commit([seq], [n])
        store.reserve([seq], [1])
        seqs.append(seq)
        kv_lens.append(n + 1)
        past.append((k.double().numpy(), v.double().numpy()))
    layers, weights = [], []
    for layer_idx in range(NUM_LAYERS):
        w = {
            "input_norm": random(HIDDEN, scale=0.3) + 1,
            "q": random(QUERY_FEATURES, HIDDEN, scale=HIDDEN**-0.5),
            "k": random(KV_FEATURES, HIDDEN, scale=HIDDEN**-0.5),
            "v": random(KV_FEATURES, HIDDEN, scale=HIDDEN**-0.5),
            "o": random(HIDDEN, QUERY_FEATURES, scale=QUERY_FEATURES**-0.5),
            "mlp_norm": random(HIDDEN, scale=0.3) + 1,
            "gate": random(INTERMEDIATE, HIDDEN, scale=HIDDEN**-0.5),
            "up": random(INTERMEDIATE, HIDDEN, scale=HIDDEN**-0.5),
            "down": random(HIDDEN, INTERMEDIATE, scale=INTERMEDIATE**-0.5),
        }
        q_width, k_width = (QUERY_FEATURES, KV_FEATURES) if kind == "olmo2" else [HEAD_DIM] * 2
        if kind in ("qwen3", "olmo2"):
            w |= {"q_norm": random(q_width) + 1, "k_norm": random(k_width) + 1}
        routed = None
        if kind == "moe" and layer_idx == 1:
            w["router"] = random(NUM_EXPERTS, HIDDEN, scale=HIDDEN**-0.5)
            w["ups"] = random(NUM_EXPERTS, 2 * INTERMEDIATE, HIDDEN, scale=HIDDEN**-0.5)
            w["downs"] = random(NUM_EXPERTS, HIDDEN, INTERMEDIATE, scale=INTERMEDIATE**-0.5)
            routed = RoutedMlp(
                Linear([w["router"]]),
                RoutedLinear(w["ups"], dtype, NUM_EXPERTS, gate=Gate("silu")),
                RoutedLinear(w["downs"], dtype, NUM_EXPERTS),
                ExpertChoice(NUM_EXPERTS, normalises=True, rounds=True),
            )
        weights.append(w)
        qkv = [w["q"], w["k"], w["v"]]
        layers.append(
            NativeLayer(
                input_norm=None if kind == "olmo2" else (w["input_norm"], EPS),
                qkv=Linear(qkv if kind != "phi3" else [torch.cat(qkv)]),
                q_norm=w.get("q_norm"),
                k_norm=w.get("k_norm"),
                qk_norm_eps=EPS if "q_norm" in w else 0.0,
                o_proj=Linear([w["o"]]),
                mlp_norm=None if kind == "olmo2" else (w["mlp_norm"], EPS),
                gate_up=None if routed else Linear([w["gate"], w["up"]]),
                down=None if routed else Linear([w["down"]]),
                routed=routed,
                attention_out_norm=(w["input_norm"], EPS) if kind == "olmo2" else None,
                mlp_out_norm=(w["mlp_norm"], EPS) if kind == "olmo2" else None,
                rope_idx=layer_idx % 2 if kind == "smollm3" else 0,
                gate="gelu_tanh" if kind == "gemma3" else "silu",
            )
        )
    rotated = HEAD_DIM - 4 if kind == "phi3" else HEAD_DIM
    angles = np.outer(np.array(kv_lens) - 1, 10000.0 ** (-np.arange(rotated // 2) / 8))
    cos, sin = (torch.from_numpy(np.tile(f(angles), 2)).to(dtype) for f in (np.cos, np.sin))
    hidden = random(rows, HIDDEN)
    scale = torch.linspace(0.7, 2, rows).to(dtype) if kind == "ministral3" else None
    ropes = (cos, sin), (sin, cos)
    return Case(layers, weights, attention, seqs, kv_lens, hidden, *ropes, past, scale)


def gated(gate: np.ndarray, up: np.ndarray, kind: str = "silu") -> np.ndarray:
    if kind == "silu":
        return gate / (1 + np.exp(-gate)) * up
    return gate / 2 * (1 + np.tanh((2 / np.pi) ** 0.5 * (gate + 0.044715 * gate**3))) * up


def float64_layers(case: Case, rows: int) -> np.ndarray:
    """What full attention gives, with nothing rounded: [rows, hidden]."""
    out = []
    for row in range(rows):
        x = case.hidden[row].double().numpy()
        for layer_idx, weights in enumerate(case.weights):
            layer = case.layers[layer_idx]
            rope = case.other_rope if layer.rope_idx else case.rope
            cos, sin = (table[row].double().numpy() for table in rope)
            w = {name: weight.double().numpy() for name, weight in weights.items()}

            def norm(y, name, is_there=True, w=w):
                return reference.rms_norm(y, w[name], EPS) if is_there else y

            normed = norm(x, "input_norm", layer.input_norm)
            q, k, v = (w[name] @ normed for name in "qkv")
            if "q_norm" in w:
                q, k = (
                    norm(y.reshape(-1, len(w[n])), n) for y, n in ((q, "q_norm"), (k, "k_norm"))
                )
            q, k, v = (y.reshape(-1, HEAD_DIM) for y in (q, k, v))
            rotated = len(cos)
            q, k = (
                np.concatenate([reference.rope(y[:, :rotated], cos, sin), y[:, rotated:]], axis=1)
                for y in (q, k)
            )
            if case.query_scale is not None:
                q = q * float(case.query_scale[row])
            keys, values = (
                np.concatenate([past[layer_idx], new[:, None]], axis=1)
                for past, new in zip(case.past[row], (k, v), strict=True)
            )
            window = case.attention.windows[layer_idx]
            keys, values = keys[:, -window:], values[:, -window:]
            attended, sinks = [], case.attention.sinks[layer_idx]
            for head in range(NUM_QO_HEADS):
                kv_head = head * NUM_KV_HEADS // NUM_QO_HEADS
                scores = keys[kv_head] @ q[head] * HEAD_DIM**-0.5
                p = np.exp(scores - scores.max())
                of_sink = 0.0 if sinks is None else np.exp(float(sinks[head]) - scores.max())
                attended.append(p / (p.sum() + of_sink) @ values[kv_head])
            x = x + norm(w["o"] @ np.concatenate(attended), "input_norm", layer.attention_out_norm)
            normed = norm(x, "mlp_norm", layer.mlp_norm)
            if "router" in w:
                routes = np.exp(w["router"] @ normed)
                ups = [np.split(up @ normed, 2) for up in w["ups"]]
                each = [down @ gated(*up) for up, down in zip(ups, w["downs"], strict=True)]
                down = routes / routes.sum() @ np.stack(each)
            else:
                down = w["down"] @ gated(w["gate"] @ normed, w["up"] @ normed, layer.gate)
            x = x + norm(down, "mlp_norm", layer.mlp_out_norm)
        out.append(x)
    return np.stack(out)


def begin(case: Case, stack: DecoderLayers, **options):
    rows = case.attention.begin_step(case.seqs, case.kv_lens)
    others = [case.other_rope]
    options |= {"query_scale": case.query_scale}
    return LayersStep(stack, case.hidden.clone(), case.rope, rows, other_ropes=others, **options)


@pytest.mark.parametrize(
    ("isa", "dtype", "kind", "rows"),
    combinations(
        native.available_isas(),
        DTYPES,
        ["llama", "qwen3", "olmo2", "smollm3", "phi3", "gemma3", "gpt_oss", "ministral3", "moe"],
        [1, 3, 16],
    ),
)
def test_against_float64(pool, isa, dtype, kind, rows):
    case = make_case(pool, dtype, rows=rows, kind=kind, isa=isa)
    stack = case.stack()
    step = begin(case, stack)
    stack.run(step)
    assert (
        relative_error(step.hidden.double().numpy(), float64_layers(case, rows)) <= TOLERANCE[dtype]
    )


@pytest.mark.parametrize("name", ["full", "exact_topk", "quest", "streaming_llm"])
def test_one_call_is_its_parts(pool, name):
    """The same bits, and the queries it keeps are those of the layers with a policy."""
    options = {} if name == "full" else {"budget_tokens": 32, "sink_tokens": 4}
    if name in ("exact_topk", "quest"):
        options |= {"recent_tokens": 8, "dense_layers": 1}
    policy = make_policy(name, **options)
    case = make_case(pool, torch.bfloat16, rows=3, policy=policy, kv_len=150)
    stack = case.stack()
    whole = begin(case, stack, keeps_queries=True)
    stack.run(whole)

    parts = begin(case, stack)
    for layer_idx in range(NUM_LAYERS):
        stack.project(layer_idx, parts)
        if case.attention.sparse_layers[layer_idx]:
            assert torch.equal(whole.kept_queries[layer_idx], parts.qkv[:, :QUERY_FEATURES])
        case.attention.attend(layer_idx, parts.rows, parts.qkv, parts.attended)
        stack.finish(layer_idx, parts)
    assert torch.equal(whole.hidden, parts.hidden)
    assert not torch.equal(whole.hidden, case.hidden)


@pytest.mark.parametrize(
    "policy",
    [
        make_policy("full"),
        make_policy("exact_topk", budget_tokens=128, dense_layers=0, sink_tokens=4),
        make_policy("sketch", budget_tokens=128, dense_layers=0, estimate_clusters=16),
        make_policy("lfps", budget_tokens=128, dense_layers=0, bypass_threshold=1e-9),
    ],
    ids=lambda policy: policy.name,
)
def test_sinks_take_their_share_of_what_a_policy_chose(pool, policy):
    """Behind selections, estimates and answers of the policy itself; lse is without them."""
    case = make_case(pool, torch.float32, kind="gpt_oss", policy=policy, kv_len=300)
    beside = DecodeAttention(policy, case.attention.store, num_qo_heads=NUM_QO_HEADS, pool=pool)
    query, found = torch.randn(2, QUERY_FEATURES), []
    past_queries = torch.randn(NUM_QO_HEADS, 32, HEAD_DIM)
    for attention in (case.attention, beside):
        out, lse = torch.zeros_like(query), torch.zeros(2, NUM_QO_HEADS)
        for seq, kv_len in zip(case.seqs, case.kv_lens, strict=True):
            for layer_idx in range(NUM_LAYERS):
                attention.record_queries(seq, layer_idx, past_queries, kv_len - 1)
        rows = attention.begin_step(case.seqs, case.kv_lens)
        attention.attend(1, rows, query, out, lse)
        found.append((out.view(2, NUM_QO_HEADS, -1), lse))
    (out, lse), (without, expected) = found
    assert lse.equal(expected)
    share = torch.sigmoid(lse - case.attention.sinks[1])[..., None]
    torch.testing.assert_close(out, without * share, rtol=1e-5, atol=1e-6)
    case.attention.sinks[1][3] = torch.nan
    with pytest.raises(RuntimeError, match=r"layer 1, query row \d, KV head 1"):
        attend_again(case, query)


def attend_again(case: Case, query: torch.Tensor) -> None:
    rows = case.attention.begin_step(case.seqs, case.kv_lens)
    case.attention.attend(1, rows, query, torch.zeros_like(query))


def test_non_finite_numbers_name_their_layer(pool):
    case = make_case(pool, torch.float32)
    case.weights[1]["k"][0, 0] = float("nan")
    stack = case.stack()
    with pytest.raises(RuntimeError, match=r"layer 1, query row \d, KV head 0"):
        stack.run(begin(case, stack))


def test_layers_that_do_not_fit(pool):
    case = make_case(pool, torch.float32)
    first, second = case.layers
    half = Linear([torch.zeros(HIDDEN, QUERY_FEATURES, dtype=torch.float16)])
    for layers, message in (
        ([first], "expected 2 layers, got 1"),
        ([first, replace(second, down=second.o_proj)], r"down must be .*32 160 -> 96"),
        ([first, replace(second, down=None)], "must have gate_up and down, or a routed MLP"),
        ([first, replace(second, o_proj=half)], r"o_proj must be torch.float32"),
        (
            [first, replace(second, q_norm=torch.ones(3), k_norm=torch.ones(16))],
            r"q_norm .* \[96\]",
        ),
        (
            [first, replace(second, mlp_out_norm=(torch.ones(3), EPS))],
            r"mlp_out_norm must .* \[96\]",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            DecoderLayers(layers, case.attention)


def test_steps_that_do_not_fit(pool):
    case = make_case(pool, torch.float32)
    stack, rows = case.stack(), case.attention.begin_step(case.seqs, case.kv_lens)
    cos, sin = case.rope
    for hidden, rope, message in (
        (case.hidden[:1], case.rope, r"hidden must be .* \[2, 96\]"),
        (case.hidden.double(), case.rope, r"hidden must be torch.float32"),
        (case.hidden.t().contiguous().t(), case.rope, r"hidden must be .* \[2, 96\] .* contiguous"),
        (case.hidden, (cos, sin[:, :8]), r"sin must be .* \[2, 16\]"),
    ):
        with pytest.raises(ValueError, match=message):
            LayersStep(stack, hidden, rope, rows)
    with pytest.raises(ValueError, match=r"query_scale must be .* \[2\]"):
        LayersStep(stack, case.hidden, case.rope, rows, query_scale=cos[0])
    other = replace(case.layers[1], rope_idx=1)
    two_ropes = DecoderLayers([case.layers[0], other], case.attention)
    with pytest.raises(ValueError, match="take 2 ropes, got 1"):
        LayersStep(two_ropes, case.hidden, case.rope, rows)
    many = case.attention.begin_step(case.seqs[:1] * 17, case.kv_lens[:1] * 17)
    with pytest.raises(ValueError, match="1 to 16 rows, got 17"):
        LayersStep(stack, case.hidden, case.rope, many)


@pytest.mark.parametrize("prepares", [True, False])
@pytest.mark.parametrize("name", ["full", "exact_topk", "lychee_cluster"])
def test_timed_layers_attend_as_others_do(pool, name, prepares):
    options = {} if name == "full" else {"budget_tokens": 64, "sink_tokens": 4, "recent_tokens": 8}
    policy = make_policy(name, **options)
    case = make_case(pool, torch.float32, rows=2, policy=policy, kv_len=300)
    attention, rng = case.attention, new_rng()
    rows = attention.begin_step(case.seqs, case.kv_lens)
    shape = (NUM_LAYERS, 2, QUERY_FEATURES)
    queries = list(torch.from_numpy(rng.standard_normal(shape, dtype=np.float32)))
    out = torch.zeros(2, QUERY_FEATURES)
    timed = attention.time_layers(rows, queries, out, prepares=prepares)
    assert len(timed) == NUM_LAYERS
    for seconds, profile in timed:
        assert 0 < sum(profile["seconds"].values()) < 2 * pool.num_threads * seconds
        assert profile["attended_tokens"] >= 2 * NUM_KV_HEADS * (64 if options else 300)
    expected = torch.zeros_like(out)
    for layer_idx, query in enumerate(queries):
        attention.attend(layer_idx, rows, query, expected)
    assert torch.equal(out, expected)
    for _, profile in attention.time_layers(rows, queries, out, chooses_only=True):
        assert profile["attended_tokens"] == 0


def test_layers_that_cannot_be_timed(pool):
    lychee = make_policy("lychee_cluster", budget_tokens=64, sink_tokens=4, recent_tokens=8)
    case = make_case(pool, torch.float32, policy=lychee, kv_len=300)
    attention, out = case.attention, torch.zeros(2, QUERY_FEATURES)
    rows = attention.begin_step(case.seqs, case.kv_lens)
    with pytest.raises(ValueError, match="expected 2 queries, got 1"):
        attention.time_layers(rows, [out], out)
    with pytest.raises(ValueError, match=r"must be torch.float32 \[2, 96\] on the CPU"):
        attention.time_layers(rows, [out, out[:1]], out)
    same = attention.begin_step(case.seqs[:1] * 2, case.kv_lens[:1] * 2)
    with pytest.raises(ValueError, match="cannot be timed together"):
        attention.time_layers(same, [out, out], out)
