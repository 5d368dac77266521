"""Gates of KV heads: between 0, a head that reuses, and 1, one that retrieves.

HardKuma is LycheeDecode's (arXiv 2602.04541; Bastings et al., ACL 2019): a Kumaraswamy variable,
stretched beyond [0, 1] and clamped, so that it is exactly 0 or 1 most of the time and learns all
the same.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

# What variables are stretched to, and how far their parameters go. With the paper's (-0.1, 1.1) and
# no limit P(z > 0) loses its slope where a gate is open, and too many stay open. Within these every
# gate has a slope, and is shut or open in all but 1 % of the samples in the end.
LOW, HIGH = -1.0, 2.0
_LOG_LIMIT = 1.5
_EPS = 1e-6
_QUADRATURE = 512


class HardKuma(nn.Module):
    """A gate for each KV head of the layers after layer 0, whose heads all retrieve.

    z = clamp(s' = LOW + (HIGH - LOW) s), s ~ Kumaraswamy(alpha, beta).

    Args:
        shape: (num_layers - 1, num_kv_heads).
    """

    def __init__(self, shape: tuple[int, int]) -> None:
        super().__init__()
        self.log_alpha = nn.Parameter(torch.zeros(shape))
        self.log_beta = nn.Parameter(torch.zeros(shape))

    def sample(self, generator: torch.Generator) -> Tensor:
        """Gates in [0, 1] of `shape`, as training has them; drawn on the CPU, so that every device
        trains on the same numbers."""
        u = torch.rand(self.log_alpha.shape, generator=generator)
        u = u.clamp(_EPS, 1 - _EPS).to(self.log_alpha.device)
        # s = (1 - u ** (1 / beta)) ** (1 / alpha), in logarithms
        log_of = torch.log1p(-torch.exp(u.log() * torch.exp(-self.log_beta)).clamp(max=1 - _EPS))
        s = torch.exp(log_of * torch.exp(-self.log_alpha))
        return (LOW + (HIGH - LOW) * s).clamp(0.0, 1.0)

    def open_probability(self) -> Tensor:
        """P(z > 0) of each, whose sum is E|z|_0."""
        return self._above(torch.zeros(1, device=self.log_alpha.device))[..., 0]

    def mean(self) -> Tensor:
        """E[z] of each; a head retrieves where it is above 0.5."""
        # E[z] is the integral of P(z > x) over [0, 1].
        middle = (torch.arange(_QUADRATURE, device=self.log_alpha.device) + 0.5) / _QUADRATURE
        return self._above(middle).mean(-1)

    @torch.no_grad()
    def limit(self) -> None:
        """Keep parameters where they learn; after each step."""
        for parameter in self.parameters():
            parameter.clamp_(-_LOG_LIMIT, _LOG_LIMIT)

    def _above(self, x: Tensor) -> Tensor:
        """P(s' > x) [..., len(x)] for x in [0, 1)."""
        s = (x - LOW) / (HIGH - LOW)
        alpha, beta = self.log_alpha.exp()[..., None], self.log_beta.exp()[..., None]
        return torch.exp(beta * torch.log1p(-(s**alpha).clamp(max=1 - _EPS)))
