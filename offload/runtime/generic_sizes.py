"""What a model without lean layers takes: told of a model that is loaded, or of an empty one."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from cpu_ops.worker_pool import WorkerPool
from offload.decode.attention import DecodeAttention, needs_alike_layers
from offload.decode.latents import latent_modules, transposed_bytes
from offload.decode.stock_attention import AttentionSpec, attention_specs
from offload.kv.store import KVStore
from offload.loading.generic_packing import parameter_bytes
from offload.models.missing_features import has_alibi, unsupported_generic
from offload.models.shape import ModelShape
from offload.planning.profile import MachineProfile
from offload.planning.workload import Workload
from offload.policies import Policy
from offload.policies.auto import Auto
from offload.policies.base import SparsePolicy
from offload.policies.full import Full
from offload.runtime.auto_policy import Room, resolve_auto
from offload.runtime.config import RuntimeConfig
from offload.runtime.generic_cache import LayerStates
from offload.selection.state_bytes import StateBytes

POLICIES = ("full", "exact_topk", "lfps", "lychee_cluster", "quest", "sketch", "streaming_llm")
# Without a layer in the store it still counts the tokens of sequences.
_NO_LAYER = AttentionSpec(1, 1, 16, 16, 1.0)
_WINDOWS_ONLY = "exact: no layer attends to all tokens"
# How many experts a token meets, by the names that configs give it.
_ACTIVE = (
    *("num_experts_per_tok", "num_experts_per_token", "top_k_experts"),
    *("moe_topk", "moe_top_k", "moe_k"),
)


# What `auto` comes to with ALiBi, and why.
EXACT_ALIBI: tuple[Policy, str] = (
    Full(),
    "exact: codes of keys, by which sketch selects, do not tell positions of ALiBi",
)


def check_policy(config: RuntimeConfig, model_config: Mapping[str, Any]) -> None:
    """Refuse a policy that needs lean layers; with ALiBi also one whose codes of keys would round
    positions, and rows that would.

    Args:
        model_config: the content of config.json.

    Raises:
        NotImplementedError: names those that do not.
    """
    policy, model_type = config.policy, str(model_config["model_type"])
    if not isinstance(policy, Auto) and policy.name not in POLICIES:
        raise NotImplementedError(
            f"policy {policy.name!r} with type {model_type!r}, which has no lean layers; "
            f"available: {', '.join(('auto', *POLICIES))}"
        )
    if has_alibi(model_config):
        if config.kv_dtype == "int8":
            raise NotImplementedError(
                f"kv_dtype='int8' with type {model_type!r}: keys have their positions for ALiBi, "
                "which int8 would round; give kv_dtype='auto'"
            )
        if policy.name == "sketch":
            available = ", ".join(("auto", *(name for name in POLICIES if name != "sketch")))
            raise NotImplementedError(
                f"policy 'sketch' with type {model_type!r}: keys have their positions for ALiBi, "
                f"which codes of keys would round; available: {available}"
            )


def shape_of(specs: Iterable[AttentionSpec], max_context: int = 0) -> ModelShape:
    """Layers that attend to everything; of heads the most, and 0 of what decides on no policy."""
    layers = [*specs] or [_NO_LAYER]
    latent_dims = {spec.v_dim if spec.has_latents else 0 for spec in layers}
    return ModelShape(
        num_layers=len(layers),
        hidden_size=0,
        num_qo_heads=max(spec.num_qo_heads for spec in layers),
        num_kv_heads=max(spec.num_kv_heads for spec in layers),
        head_dim=max(spec.head_dim for spec in layers),
        intermediate_size=0,
        vocab_size=0,
        max_context=max_context,
        latent_dim=latent_dims.pop() if len(latent_dims) == 1 else 0,
    )


def _heads_differ(layers: Collection[AttentionSpec]) -> bool:
    return len({(spec.num_qo_heads, spec.num_kv_heads, spec.head_dim) for spec in layers}) > 1


def resolve_generic(
    auto: Auto,
    specs: Mapping[int, AttentionSpec],
    work: Workload | None,
    profile: MachineProfile | None,
    *,
    on_gpu: bool,
) -> tuple[Policy, str]:
    """What `auto` comes to, and why: where the CPU attends, as of lean layers on a CPU.

    Args:
        specs: of the layers that attend to everything.
        work: with the longest context; None: there are no such layers.
        profile: of the machine; None: it was never measured.
        on_gpu: the modules are on a GPU, which attends to all that fits it.
    """
    if work is None:
        return Full(), _WINDOWS_ONLY
    policy, reason = resolve_auto(auto, work, Room(on_gpu=False, profile=profile))
    shape = work.shape
    needs = needs_alike_layers(policy, shape.num_layers, shape.num_kv_heads)
    if needs and _heads_differ(specs.values()):
        return Full(), f"exact: {policy.name} {needs}, and heads of layers differ"
    if on_gpu and isinstance(policy, SparsePolicy):
        policy = replace(policy, dense_until=None)  # which decoding with a GPU does not take
        reason = f"exact where all KV of a generation fits the GPU; else, on the CPU, {reason}"
    return policy, reason


def store_and_attention(
    specs: Mapping[int, AttentionSpec], config: RuntimeConfig, pool: WorkerPool, **of_store: Any
) -> tuple[KVStore, DecodeAttention]:
    """The host store of the layers that attend to everything, and what decodes from it.

    Args:
        config: `Auto` is resolved.
        of_store: arguments of `KVStore` beside the layers and what `config` has.

    Raises:
        NotImplementedError: the policy selects, and there is no such layer, or it needs layers
            whose heads are alike.
    """
    layers = [*specs.values()] or [_NO_LAYER]
    policy = config.policy
    if not specs and policy.selects:
        raise NotImplementedError(
            f"policy {policy.name!r} has nothing to select: no layer attends to all tokens; "
            "available: 'auto' and 'full'"
        )
    needs = needs_alike_layers(policy, len(layers), shape_of(layers).num_kv_heads)
    if needs and _heads_differ(layers):
        raise NotImplementedError(
            f"policy {policy.name!r} {needs}, and heads of layers differ in this model; give "
            "estimate_clusters=0, or another policy"
        )
    store = KVStore(
        num_layers=len(layers),
        num_kv_heads=[spec.num_kv_heads for spec in layers],
        head_dim=[spec.head_dim for spec in layers],
        kv_dtype=config.kv_dtype,
        keys_only=shape_of(layers).latent_dim > 0,
        page_tokens=config.page_tokens,
        **of_store,
    )
    attention = DecodeAttention(
        policy,
        store,
        num_qo_heads=[spec.num_qo_heads for spec in layers],
        pool=pool,
        sm_scale=[spec.sm_scale for spec in layers],
        softcap=[spec.softcap for spec in layers],
        sinks=[None if spec.sinks is None else spec.sinks.cpu() for spec in layers],
    )
    return store, attention


def row_bytes(store: KVStore) -> int:
    """Bytes of a token's keys and values in the model's dtype, the most that one layer has."""
    heads = map(store.heads_of, range(store.num_layers))
    most = max(num_kv_heads * head_dim for num_kv_heads, head_dim in heads)
    return store.format.num_parts * most * store.dtype.itemsize


def num_pages(store: KVStore, ends: Iterable[int]) -> int:
    """Pages of sequences that come to so many tokens."""
    return store.num_page_rows * sum(-(-end // store.page_tokens) for end in ends)


def policy_bytes(states: StateBytes, ends: Iterable[int]) -> int:
    """What a policy keeps of such sequences, at the peak: arrays that grow are there twice."""
    return sum(2 * states.at(end) + states.of_queries for end in ends)


@dataclass(frozen=True)
class GenericSizes:
    """What is told of a model that is not loaded.

    Attributes:
        specs: of the layers that attend to everything, by their number.
        states: of the other layers, and what these layers have beside keys and values.
        all_states: with their keys and values, too.
        weight_bytes: of all weights, packed as they are kept.
        active_bytes: of those that any decode step reads: of experts as many as one token meets.
    """

    specs: dict[int, AttentionSpec]
    states: LayerStates
    all_states: LayerStates
    weight_bytes: int
    active_bytes: int

    @classmethod
    def of(cls, empty: Any, kept: Mapping[str, str], *, on_gpu: bool) -> GenericSizes:
        """Args: as `parameter_bytes` has them; and whether decode steps are a GPU's.

        Raises:
            ValueError: its modules do not run, or ask for what is not there; says why.
        """
        dense = {f"{name}.kv_b_proj.weight" for name in latent_modules(empty)}
        kept = {name: format for name, format in kept.items() if name not in dense}
        more = 0 if on_gpu else transposed_bytes(empty)
        weights = parameter_bytes(empty, kept)
        experts = empty.config._experts_implementation
        empty.config._experts_implementation = "batched_mm"  # needs no values
        try:
            specs, layers = attention_specs(empty.eval())
        except Exception as error:  # of any kind: 150 model types
            reason = f"its sizes cannot be told without its weights: {error}"
            raise ValueError(unsupported_generic(empty.config.model_type, reason)) from error
        finally:
            empty.config._experts_implementation = experts
        specs = {i: replace(spec, sinks=None) for i, spec in specs.items()}  # without values here
        states, all_states = LayerStates(), LayerStates()
        states.count(layers, 2, specs)
        all_states.count(layers, 2, ())
        active = sum(map(int, _active(empty, weights)))
        return cls(specs, states, all_states, sum(weights.values()) + more, active)


def _active(empty: Any, weights: Mapping[str, int]) -> Iterable[float]:
    config = empty.config.get_text_config()
    told = (getattr(config, name, None) for name in _ACTIVE)
    per_token = next((count for count in told if isinstance(count, int)), 1)
    head = empty.get_output_embeddings()
    for name, num_bytes in weights.items():
        owner = empty.get_submodule(name.rpartition(".")[0])
        weight = empty.get_parameter(name)
        if isinstance(owner, torch.nn.Embedding) and (head is None or head.weight is not weight):
            continue  # a row of each token
        share, of_one = 1.0, re.search(r"\.experts\.(\d+)\.", name)
        if of_one is not None:
            share = float(int(of_one[1]) < per_token)
        elif ".experts." in name:  # of all of them
            share = min(1.0, per_token / weight.shape[0])
        yield num_bytes * share
