"""Gates of KV heads: between 0, a head that reuses, and 1, one that retrieves.

HardKuma is LycheeDecode's (arXiv 2602.04541; Bastings et al., ACL 2019): a Kumaraswamy variable,
stretched beyond [0, 1] and clamped, so that it is exactly 0 or 1 most of the time and learns all
the same. Hard Concrete (Louizos et al., ICLR 2018) does so with a logistic one. Direct optimisation
(DuoAttention, arXiv 2410.10819) has numbers in [0, 1] instead of random variables.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor, nn

# What variables are stretched to, and how far their parameters go. With the paper's (-0.1, 1.1) and
# no limit P(z > 0) loses its slope where a gate is open, and too many stay open. Within these every
# gate has a slope, and is shut or open in all but 1 % of the samples in the end.
LOW, HIGH = -1.0, 2.0
_LOG_LIMIT, _LOGIT_LIMIT = 1.5, 4.0
_EPS = 1e-6
_QUADRATURE = 512
_CONCRETE_TEMPERATURE = 2 / 3  # Louizos et al.


class Gates(nn.Module):
    """A gate for each KV head of the layers after layer 0, whose heads all retrieve.

    Args:
        shape: (num_layers - 1, num_kv_heads).
    """

    limits: ClassVar[tuple[float, float]]  # of parameters

    def sample(self, generator: torch.Generator) -> Tensor:
        """Gates in [0, 1] of `shape`, as training has them."""
        raise NotImplementedError

    def open_probability(self) -> Tensor:
        """P(z > 0) of each, whose sum is E|z|_0."""
        raise NotImplementedError

    def mean(self) -> Tensor:
        """E[z] of each; a head retrieves where it is above 0.5."""
        raise NotImplementedError

    @torch.no_grad()
    def limit(self) -> None:
        """Keep parameters where they learn; after each step."""
        for parameter in self.parameters():
            parameter.clamp_(*self.limits)


class HardKuma(Gates):
    """z = clamp(s' = LOW + (HIGH - LOW) s), s ~ Kumaraswamy(alpha, beta)."""

    limits = (-_LOG_LIMIT, _LOG_LIMIT)

    def __init__(self, shape: tuple[int, int]) -> None:
        super().__init__()
        self.log_alpha = nn.Parameter(torch.zeros(shape))
        self.log_beta = nn.Parameter(torch.zeros(shape))

    def sample(self, generator: torch.Generator) -> Tensor:
        u = _uniform(self.log_alpha, generator)
        # s = (1 - u ** (1 / beta)) ** (1 / alpha), in logarithms
        log_of = torch.log1p(-torch.exp(u.log() * torch.exp(-self.log_beta)).clamp(max=1 - _EPS))
        return _stretched(torch.exp(log_of * torch.exp(-self.log_alpha)))

    def open_probability(self) -> Tensor:
        return self._above(torch.zeros(1, device=self.log_alpha.device))[..., 0]

    def mean(self) -> Tensor:
        # E[z] is the integral of P(z > x) over [0, 1].
        middle = (torch.arange(_QUADRATURE, device=self.log_alpha.device) + 0.5) / _QUADRATURE
        return self._above(middle).mean(-1)

    def _above(self, x: Tensor) -> Tensor:
        """P(s' > x) [..., len(x)] for x in [0, 1)."""
        s = (x - LOW) / (HIGH - LOW)
        alpha, beta = self.log_alpha.exp()[..., None], self.log_beta.exp()[..., None]
        return torch.exp(beta * torch.log1p(-(s**alpha).clamp(max=1 - _EPS)))


class HardConcrete(Gates):
    """z = clamp(s' = LOW + (HIGH - LOW) s), s = sigmoid((logit(u) + log_alpha) / temperature)."""

    limits = (-_LOGIT_LIMIT, _LOGIT_LIMIT)

    def __init__(self, shape: tuple[int, int]) -> None:
        super().__init__()
        self.log_alpha = nn.Parameter(torch.zeros(shape))

    def sample(self, generator: torch.Generator) -> Tensor:
        noise = torch.logit(_uniform(self.log_alpha, generator))
        return _stretched(torch.sigmoid((noise + self.log_alpha) / _CONCRETE_TEMPERATURE))

    def open_probability(self) -> Tensor:
        return torch.sigmoid(self.log_alpha - _CONCRETE_TEMPERATURE * math.log(-LOW / HIGH))

    def mean(self) -> Tensor:
        """Not E[z], but what its paper decides by: the gate without noise."""
        return _stretched(torch.sigmoid(self.log_alpha))


class Direct(Gates):
    """z itself is learnt, kept in [0, 1]; its sum stands for the number of open gates."""

    limits = (0.0, 1.0)

    def __init__(self, shape: tuple[int, int]) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.ones(shape))

    def sample(self, generator: torch.Generator) -> Tensor:
        return self.value.clone()

    def open_probability(self) -> Tensor:
        return self.value

    def mean(self) -> Tensor:
        return self.value


METHODS: dict[str, type[Gates]] = {
    "hardkuma": HardKuma,
    "hard-concrete": HardConcrete,
    "direct": Direct,
}


def _uniform(like: Tensor, generator: torch.Generator) -> Tensor:
    """Drawn on the CPU: every device trains on the same numbers."""
    u = torch.rand(like.shape, generator=generator)
    return u.clamp(_EPS, 1 - _EPS).to(like.device)


def _stretched(s: Tensor) -> Tensor:
    return (LOW + (HIGH - LOW) * s).clamp(0.0, 1.0)
