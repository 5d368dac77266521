"""The shape of a model, and of those that benches and plans know by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class ModelShape:
    """What decides the work of a Llama-like model.

    Attributes:
        max_context: tokens a sequence may have.
        windows: tokens that each layer sees, 0: all; (): of all of them.
        num_experts, experts_per_token, expert_size: of MLPs that have some, in the place of
            `intermediate_size`.
        latent_dim: values are the first so many elements of keys, as of latent attention; 0: not.
        rope_theta, ties_embeddings: of models that are made from a shape; they decide no work.
    """

    num_layers: int
    hidden_size: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_context: int
    rope_theta: float = 0.0
    ties_embeddings: bool = False
    windows: tuple[int, ...] = ()
    num_experts: int = 0
    experts_per_token: int = 0
    expert_size: int = 0
    latent_dim: int = 0

    @classmethod
    def of_config(cls, config: Mapping[str, Any], max_context: int) -> ModelShape:
        """The shape that a config.json describes."""
        num_qo_heads = config["num_attention_heads"]
        num_experts = config.get("num_experts") or config.get("num_local_experts") or 0
        inner = config["intermediate_size"]
        return cls(
            num_layers=config["num_hidden_layers"],
            hidden_size=config["hidden_size"],
            num_qo_heads=num_qo_heads,
            num_kv_heads=config.get("num_key_value_heads") or num_qo_heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // num_qo_heads,
            intermediate_size=inner,
            vocab_size=config["vocab_size"],
            max_context=max_context,
            num_experts=num_experts,
            experts_per_token=config["num_experts_per_tok"] if num_experts else 0,
            expert_size=(config.get("moe_intermediate_size") or inner) if num_experts else 0,
        )

    def with_layers(self, num_layers: int) -> ModelShape:
        """That of its first layers."""
        return replace(self, num_layers=num_layers, windows=self.windows[:num_layers])

    @property
    def of_a_token(self) -> ModelShape:
        """That of a model without experts and windows which takes as much work for a token, but
        for attention."""
        if not self.num_experts:
            return replace(self, windows=())
        inner = self.experts_per_token * self.expert_size
        return replace(
            self,
            intermediate_size=inner,
            num_experts=0,
            experts_per_token=0,
            expert_size=0,
            windows=(),
        )

    @property
    def kv_heads(self) -> dict[str, Any]:
        """What `KVStore` and `Policy.of_heads` take."""
        return {name: size for name, size in self.heads.items() if name != "num_qo_heads"}

    @property
    def heads(self) -> dict[str, int]:
        """What `Policy.check_model` takes."""
        names = ("num_layers", "num_qo_heads", "num_kv_heads", "head_dim")
        return {name: getattr(self, name) for name in names}

    @property
    def group_size(self) -> int:
        """Query heads that share a KV head."""
        return self.num_qo_heads // self.num_kv_heads

    @property
    def kv_token_bytes(self) -> int:
        """Bytes of one token's keys and values in all layers, in a dtype of two bytes."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * 2

    @property
    def query_width(self) -> int:
        """Elements of a token's queries."""
        return self.num_qo_heads * self.head_dim

    @property
    def qkv_width(self) -> int:
        """Elements that a layer projects for one token: queries, keys and values."""
        return (self.num_qo_heads + 2 * self.num_kv_heads) * self.head_dim


MODEL_SHAPES = {
    "llama-3.1-8b": ModelShape(32, 4096, 32, 8, 128, 14336, 128256, 131072, 500000.0),
    "llama-3.2-1b": ModelShape(16, 2048, 32, 8, 64, 8192, 128256, 131072, 500000.0, True),
    "qwen3-30b-a3b": ModelShape(
        48,
        2048,
        32,
        4,
        128,
        6144,
        151936,
        40960,
        1000000.0,
        num_experts=128,
        experts_per_token=8,
        expert_size=768,
    ),
    "gemma-3-12b": ModelShape(
        48,
        3840,
        16,
        8,
        256,
        15360,
        262208,
        131072,
        1000000.0,
        True,
        windows=(*(1024,) * 5, 0) * 8,
    ),
    "gpt-oss-20b": ModelShape(
        24,
        2880,
        64,
        8,
        64,
        2880,
        201088,
        131072,
        150000.0,
        windows=(128, 0) * 12,
        num_experts=32,
        experts_per_token=4,
        expert_size=2880,
    ),
    "smollm2-135m": ModelShape(30, 576, 9, 3, 64, 1536, 49152, 8192, 100000.0, True),
    "tiny": ModelShape(4, 128, 4, 2, 32, 256, 512, 8192, 10000.0),
}

# Of those that are not Llama-like, transformers' type.
SHAPE_TYPES = {"gemma-3-12b": "gemma3_text", "gpt-oss-20b": "gpt_oss"}


def weight_elements(shape: ModelShape) -> int:
    """Parameters of a Llama-like model of this shape without biases; tied ones count once."""
    rows = shape.vocab_size * (1 if shape.ties_embeddings else 2) + 1  # the last norm
    others = shape.num_experts - shape.experts_per_token
    unread = 3 * shape.hidden_size * shape.expert_size * others * shape.num_layers
    return rows * shape.hidden_size + layer_elements(shape) * shape.num_layers + unread


def layer_elements(shape: ModelShape) -> int:
    """Elements of one layer's weights that a token meets."""
    attention = shape.qkv_width + shape.query_width
    inner = shape.intermediate_size
    if shape.num_experts:
        inner = shape.experts_per_token * shape.expert_size
    return shape.hidden_size * (attention + 3 * inner + shape.num_experts + 2)


def matrix_sizes(
    shape: ModelShape, *, fuses: bool = False
) -> Iterator[tuple[str, str, tuple[int, int]]]:
    """(name, fields of config.json, [out, in]) of each matrix that a model allocates but lm_head,
    by its name in a checkpoint.

    Args:
        fuses: as of `ModelFamily`.
    """
    hidden, vocab, inner = "hidden_size", "vocab_size", "intermediate_size"
    queries, keys = "num_attention_heads * head_dim", "num_key_value_heads * head_dim"
    size_of = {
        hidden: shape.hidden_size,
        vocab: shape.vocab_size,
        inner: shape.intermediate_size,
        queries: shape.num_qo_heads * shape.head_dim,
        keys: shape.num_kv_heads * shape.head_dim,
    }
    if fuses:
        queries_to_values, gate_up = f"{queries} + 2 * {keys}", f"2 * {inner}"
        size_of |= {queries_to_values: shape.qkv_width, gate_up: 2 * shape.intermediate_size}

    def matrix(name: str, rows: str, columns: str) -> tuple[str, str, tuple[int, int]]:
        return f"model.{name}.weight", f"{rows}, {columns}", (size_of[rows], size_of[columns])

    yield matrix("embed_tokens", vocab, hidden)
    for layer_idx in range(shape.num_layers):
        layer = f"layers.{layer_idx}"
        if fuses:
            yield matrix(f"{layer}.self_attn.qkv_proj", queries_to_values, hidden)
            yield matrix(f"{layer}.mlp.gate_up_proj", gate_up, hidden)
        else:
            yield matrix(f"{layer}.self_attn.q_proj", queries, hidden)
            yield matrix(f"{layer}.self_attn.k_proj", keys, hidden)
            yield matrix(f"{layer}.self_attn.v_proj", keys, hidden)
            yield matrix(f"{layer}.mlp.gate_proj", inner, hidden)
            yield matrix(f"{layer}.mlp.up_proj", inner, hidden)
        yield matrix(f"{layer}.self_attn.o_proj", hidden, queries)
        yield matrix(f"{layer}.mlp.down_proj", hidden, inner)
