"""What a model's rotary embedding says about its contexts; the tables are transformers' own."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Rotary = Callable[..., tuple[torch.Tensor, torch.Tensor]]

# rope_type of transformers -> whose multiple by "factor" the context is; None: of nothing, it is
# max_position_embeddings. Those that extend a context are documented to do so with the old
# max_position_embeddings left as it was, and are found with the new one too.
_EXTENDS = {
    "default": None,
    "llama3": None,
    "linear": "max_position_embeddings",
    "proportional": "max_position_embeddings",
    "dynamic": "max_position_embeddings",
    "yarn": "original_max_position_embeddings",
    "longrope": "original_max_position_embeddings",
}
_NUMBERS = ("rope_theta", "factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow")


def rope_context(config: Any) -> tuple[int, str]:
    """(tokens that the positions of a model allow, what bounds them).

    Raises:
        NotImplementedError: a rope_type that is not known to be computed as transformers does it.
        ValueError: a factor that is not a positive number.
    """
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    rope_type = rope.get("rope_type", "default")
    if rope_type not in _EXTENDS:
        available = ", ".join(sorted(_EXTENDS))
        raise NotImplementedError(
            f"rope_type={rope_type!r} is not supported yet; available: {available}"
        )
    for name, value in rope.items():
        if name in _NUMBERS and value is not None and not _is_positive(value):
            raise ValueError(
                f"the {name} of rope_type={rope_type!r} must be positive, got {value!r}"
            )
    if rope_type == "longrope":
        _check_factors(config, rope)
    positions = int(config.max_position_embeddings)
    reason = f"max_position_embeddings={positions}"
    extended, factor = _EXTENDS[rope_type], rope.get("factor")
    if extended is None or factor is None:
        return positions, reason
    base = (
        positions if extended == "max_position_embeddings" else int(rope.get(extended, positions))
    )
    if int(base * factor) <= positions:
        return positions, reason
    return int(base * factor), f"{extended}={base} times the {rope_type} rope factor {factor}"


def head_dim_of(config: Any) -> int:
    """Not every config says it."""
    return int(
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )


def layer_configs(config: Any) -> list[Any]:
    """What transformers says of each layer, where they differ; else of all."""
    if not getattr(config, "is_heterogeneous", False):
        return [config]
    return [config.per_layer_config[i] for i in range(config.num_hidden_layers)]


def follows_length(rope_type: str) -> bool:
    """Whether the frequencies change with the longest position."""
    return "dynamic" in rope_type or rope_type == "longrope"


def _is_positive(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < math.inf


def _check_factors(config: Any, rope: dict[str, Any]) -> None:
    """Longrope has a factor for each pair of a head's elements."""
    head_dim = head_dim_of(config)
    rotated = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    for name in ("short_factor", "long_factor"):
        factors = rope.get(name)
        if not (
            isinstance(factors, list)
            and len(factors) == rotated // 2
            and all(map(_is_positive, factors))
        ):
            what = f"a list of {len(factors)}" if isinstance(factors, list) else repr(factors)
            raise ValueError(
                f"rope_parameters: {name} must be a list of {rotated // 2} positive numbers, half "
                f"of the elements that are rotated of head_dim={head_dim}, got {what}"
            )


def rotary_view(stock: Any, head_dim: int, *, may_be_partial: bool = False) -> Any:
    """The rotary embedding of a stock model, as the lean model calls it.

    Raises:
        NotImplementedError: if it rotates a part of each head only, but where that `may_be`.
    """
    if isinstance(stock, NoRotation | RotaryOfType):
        return stock
    rotated = 2 * int(stock.inv_freq.numel())
    if rotated != head_dim and not may_be_partial:
        raise NotImplementedError(
            f"the rotary embedding rotates {rotated} of head_dim={head_dim} elements; partial "
            "rotary embeddings are not supported yet; take a model that rotates whole heads"
        )
    return DynamicRotary(stock) if "dynamic" in stock.rope_type else stock


@dataclass(frozen=True)
class RotaryOfType:
    """The tables of one kind of layers, of a rotary embedding that has several."""

    stock: Any
    layer_type: str
    rope_type: str = "default"  # of any that does not follow the length

    def __call__(
        self, x: torch.Tensor, position_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = self.stock(x, position_ids, self.layer_type)
        return cos, sin


@dataclass(frozen=True)
class RoundedRotary:
    """Tables in x's dtype, of a rotary embedding that returns them in float32."""

    stock: Any

    @property
    def rope_type(self) -> str:
        return str(self.stock.rope_type)

    def __call__(
        self, x: torch.Tensor, position_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = self.stock(x, position_ids)
        return cos.to(x.dtype), sin.to(x.dtype)


@dataclass(frozen=True)
class RotaryOfTexts(RoundedRotary):
    """Of a rotary embedding that takes positions in time, height and width, which a text has all
    the same."""

    def __call__(
        self, x: torch.Tensor, position_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return super().__call__(x, position_ids.expand(3, -1, -1))


@dataclass(frozen=True)
class RotaryOfHalves(RoundedRotary):
    """Tables of both halves of a head, of a rotary embedding that has those of one."""

    def __call__(
        self, x: torch.Tensor, position_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = (torch.cat((half, half), -1) for half in super().__call__(x, position_ids))
        return cos, sin


@dataclass(frozen=True)
class NoRotation:
    """The tables that leave heads as they are."""

    head_dim: int
    rope_type: str = "default"

    def __call__(
        self, x: torch.Tensor, position_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (*position_ids.shape, self.head_dim)
        return x.new_ones(shape), x.new_zeros(shape)


@dataclass(frozen=True)
class QueryScale:
    """What multiplies rotated queries: 1 + beta * log(1 + floor(position / period)), as of Llama 4
    (`get_llama_4_attn_scale` of transformers)."""

    beta: float
    period: int

    def __call__(self, x: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        """In x's dtype, of each position."""
        steps = torch.log(1 + torch.floor(position_ids / self.period))
        return (1 + self.beta * steps).to(x.dtype)


@dataclass(frozen=True)
class DynamicRotary:
    """Frequencies by the longest position of each call, and of no call before.

    transformers keeps those of the longest sequence so far, until a sequence is shorter than
    max_position_embeddings: another conversation with the same model would decide on this one's.
    """

    stock: Any

    @property
    def rope_type(self) -> str:
        return str(self.stock.rope_type)

    def __call__(
        self, x: torch.Tensor, position_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.stock.inv_freq = self.stock.original_inv_freq
        self.stock.max_seq_len_cached = self.stock.original_max_seq_len
        cos, sin = self.stock(x, position_ids)
        return cos, sin
