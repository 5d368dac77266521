"""Gates: their expectations against samples and closed forms, and that none is stuck."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from cases.slowly import slow_but

from offload.training.gates import HIGH, LOW, HardKuma


def samples(gates: torch.nn.Module, count: int = 20_000) -> torch.Tensor:
    many = copy.deepcopy(gates)
    for parameter in many.parameters():
        parameter.data = parameter.data.expand(count, *parameter.shape)
    return many.sample(torch.Generator().manual_seed(5)).detach().double()


def test_expectations_of_hardkuma_are_those_of_its_samples() -> None:
    gates = HardKuma((2, 4))
    with torch.no_grad():
        gates.log_alpha.copy_(torch.linspace(-1.5, 1.5, 8).view(2, 4))
        gates.log_beta.copy_(torch.tensor([[0.4, -1.2, 1.2, 0.0], [1.0, -0.5, -1.2, 1.2]]))
    z = samples(gates)
    assert z.min() == 0
    assert z.max() == 1
    torch.testing.assert_close(gates.mean().double(), z.mean(0), atol=1.2e-2, rtol=0)
    opened = (z > 0).double().mean(0)
    torch.testing.assert_close(gates.open_probability().double(), opened, atol=1.2e-2, rtol=0)


@pytest.mark.parametrize("log_beta", [-1.0, 0.0, 0.7])
def test_hardkuma_in_closed_form(log_beta: float) -> None:
    """With alpha = 1, P(s > t) = (1 - t)^beta, and E[z] the integral of it over z."""
    gates = HardKuma((1, 1))
    gates.log_beta.data.fill_(log_beta)
    beta, width = math.exp(log_beta), HIGH - LOW
    shut, full = -LOW / width, (1 - LOW) / width
    assert gates.open_probability().item() == pytest.approx((1 - shut) ** beta, rel=1e-5)
    mean = width * ((1 - shut) ** (beta + 1) - (1 - full) ** (beta + 1)) / (beta + 1)
    assert gates.mean().item() == pytest.approx(mean, rel=1e-4)


@pytest.mark.parametrize("far", slow_but([-50.0, 50.0], -50.0))
def test_a_gate_is_never_stuck(far: float) -> None:
    """However far it was pushed, some samples are on the other side, and the constraint pulls."""
    gates = HardKuma((1, 1))
    for name, parameter in gates.named_parameters():
        parameter.data.fill_(-far if name == "log_beta" else far)
    gates.limit()
    z = samples(gates, 20_000)
    assert (z.mean() > 0.9) if far > 0 else (z.mean() < 0.1)
    assert 0 < float((z != (far > 0)).double().mean()) < 0.1
    assert 5e-4 < abs(gates.open_probability().item() - (far > 0)) < 0.1
    gates.open_probability().sum().backward()
    assert all(parameter.grad.abs().max() > 1e-4 for parameter in gates.parameters())
