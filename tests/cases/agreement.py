"""Random models, policies, prompts and placements whose decode steps must agree.

The native decoder is compared with the GPU's step on CPU tensors, with heads wherever a placement
may have them. All decoders are fed the same tokens, so that one of them is not lost for the rest
where an argmax differs. Selections differ where two tokens weigh the same but for rounding: steps
that noise of that size changes as much are told apart, and counted.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cases.device_cases import load
from cases.inside import decoder_of, runtime_of, split_steps
from cases.tiny_models import TINY_MODELS, make_tiny_model, random_tokens

from offload.decode.gpu.placement import (
    HeadPlacement,
    Place,
    kv_head_roles,
    may_be_gathered,
    may_stay_on_gpu,
)
from offload.policies import Policy
from offload.policies.registry import make_policy
from offload.selection.head_roles import HeadRoles
from offload.selection.policy import DENSE, SELECT

TOLERANCE = 2e-4  # of logits, relative to their largest
NOISE = 3e-6  # of embeddings: some roundings of float32
NOISY_RUNS = 6


def random_policy(name: str, rng: np.random.Generator, shape: dict[str, int]) -> Policy:
    """With options for contexts of some hundred tokens."""
    if name == "full":
        return make_policy("full")
    num_layers, num_kv_heads = shape["num_hidden_layers"], shape["num_key_value_heads"]
    options: dict[str, Any] = {
        "sink_tokens": int(rng.integers(0, 9)),
        "dense_layers": int(rng.integers(0, 3)),
        "recent_tokens": int(rng.integers(1, 33)),
    }
    fixed = options["sink_tokens"] + options["recent_tokens"]
    options["budget_tokens"] = fixed + int(rng.integers(0, 70))
    if name == "streaming_llm":
        options["recent_tokens"] = 0  # what the budget leaves
        options["budget_tokens"] = max(options["budget_tokens"], options["sink_tokens"] + 1)
    if name == "quest":
        options["page_tokens"] = int(rng.integers(1, 24))
    if name == "sketch":
        options["bits"] = int(rng.choice([1, 2]))
    if name == "lfps":
        options["granularity"] = str(rng.choice(["kv_head", "query_head"]))
        options["alpha"] = float(rng.choice([0.1, 0.2, 0.4]))
    if name == "lychee_cluster":
        options["buffer_tokens"] = int(rng.choice([0, 8, 40, 128]))
        options["min_chunk_tokens"] = int(rng.integers(1, 6))
    if name == "tidal_decode":
        options["inner"] = str(rng.choice(["exact_topk", "exact_topk", "quest"]))
        options["dense_layers"] = min(options["dense_layers"], num_layers - 1)
        free = np.arange(options["dense_layers"], num_layers)
        chosen = rng.random(len(free)) < 0.4
        chosen[0] = True
        options["select_layers"] = tuple(free[chosen].tolist())
    if name == "lychee_decode":
        retrieves = rng.random((num_layers, num_kv_heads)) < 0.3
        retrieves[0] = True
        options["head_roles"] = HeadRoles.of(retrieves, head_dim=shape["head_dim"])
        rule = str(rng.choice(["top_k", "top_k", "ratio", "top_p", "threshold"]))
        number = {"ratio": 0.2, "top_p": 0.8, "threshold": 0.01}
        options |= {"rule": rule, **({rule: number[rule]} if rule in number else {})}
    if name == "per_head":
        retrieves = rng.random((num_layers, num_kv_heads)) < 0.3
        retrieves[0] = True
        options["rest"] = str(rng.choice(["lfps", "lychee_cluster", "quest"]))
        options["retrieval"] = str(rng.choice(["full", "exact_topk"]))
        if options["rest"] == "lfps" and options["retrieval"] == "full":
            options["granularity"] = str(rng.choice(["kv_head", "query_head"]))
        policy = make_policy(name, **options)
        return replace(  # more than a sixth of so few heads
            policy, head_roles=HeadRoles.of(retrieves, head_dim=shape["head_dim"]), is_part=True
        )
    return make_policy(name, **options)


def random_placement(rng: np.random.Generator, decoder: Any) -> HeadPlacement:
    """Every head in some place that it may have."""
    policy, places = decoder.attention.policy, np.array(decoder.placement.places)
    num_qo_heads = decoder.model.shape.num_qo_heads
    roles = kv_head_roles(policy, len(places), num_qo_heads, places.shape[1])
    if roles is None:
        return HeadPlacement(rng.choice([Place.CPU, Place.GPU], places.shape))
    allowed = may_stay_on_gpu(policy, roles)
    for layer_idx, of_layer in enumerate(roles):
        if (of_layer == DENSE).all():
            continue
        on_gpu = rng.random(len(of_layer)) < 0.7
        if policy.shares_selection:
            on_gpu[:] = on_gpu[0]
        stays = allowed[layer_idx] & (of_layer != SELECT) & on_gpu  # which would attend to more
        places[layer_idx] = np.where(stays, Place.GPU, Place.CPU)
    gathered = may_be_gathered(policy, roles, places) & (rng.random(places.shape) < 0.6)
    places[gathered] = Place.GATHER
    return HeadPlacement(places)


def _that_selects(decoder: Any) -> HeadPlacement:
    """As the decoder has it, but for heads that would attend to more than on the CPU."""
    places = np.array(decoder.placement.places)
    num_qo_heads = decoder.model.shape.num_qo_heads
    roles = kv_head_roles(decoder.attention.policy, len(places), num_qo_heads, places.shape[1])
    if roles is not None:
        places[roles == SELECT] = Place.CPU
    return HeadPlacement(places)


@dataclass
class Outcome:
    """The outcome of one case: steps that agreed, ties and failures."""

    steps: int = 0
    ties: int = 0
    failures: list[str] = field(default_factory=list)


class Case:
    """A random model of every kind, and texts for it.

    Args:
        folder: where its checkpoint is written.
    """

    def __init__(self, folder: Path, policy_name: str, seed: int, num_threads: int) -> None:
        rng = self.rng = np.random.default_rng([seed, len(policy_name), ord(policy_name[1])])
        self.model_name = str(rng.choice(sorted(TINY_MODELS)))
        num_kv_heads, group_size = int(rng.integers(1, 4)), int(rng.integers(1, 5))
        self.shape = {
            "num_hidden_layers": int(rng.integers(2, 6)),
            "num_key_value_heads": num_kv_heads,
            "num_attention_heads": num_kv_heads * group_size,
            "hidden_size": 144 if num_kv_heads * group_size == 9 else 96,
            "head_dim": int(rng.choice([16, 32, 48])),
        }
        make_tiny_model(self.model_name, **self.shape).save_pretrained(folder)
        self.policy = random_policy(policy_name, rng, self.shape)
        options = {"page_tokens": int(rng.choice([16, 32, 64])), "num_threads": num_threads}
        self.native = load(folder, self.policy, ("cpu", None), **options)
        self.inline = load(folder, self.policy, ("cpu", "inline"), **options)
        decoder = decoder_of(self.inline)
        decoder.place(_that_selects(decoder))
        self.batch_size = int(rng.integers(1, 4))
        self.kv_lens = [int(rng.integers(1, 260)) for _ in range(self.batch_size)]
        self.num_steps = int(rng.integers(6, 14))
        self.text = random_tokens(
            self.batch_size, max(self.kv_lens) + self.num_steps, seed=int(rng.integers(1 << 30))
        )

    def __str__(self) -> str:
        placement = decoder_of(self.inline).placement.text().replace("\n", "/")
        return f"{self.model_name} {self.shape}, {self.policy}, {self.kv_lens}, {placement}"

    def place_anywhere(self) -> None:
        """Heads of the next comparison, and parts of its batches."""
        decoder = decoder_of(self.inline)
        decoder.place(random_placement(self.rng, decoder))
        split_steps(self.inline, int(self.rng.integers(1, 3)))

    @torch.no_grad()
    def compare(self, outcome: Outcome) -> None:
        """Steps of both decoders over the same tokens, as far as they can be compared."""
        expected = self._run(self.native)
        actual = self._run(self.inline, chooses=self.rng.random(self.num_steps) < 0.3)
        for step in range(self.num_steps):
            if _agree(actual[step], expected[step]):
                outcome.steps += 1
                continue
            if self._is_tie(expected, step):
                outcome.ties += 1
            else:
                outcome.failures.append(f"step {step} of {self}: {actual[step]}")
            return  # caches of what follows are of different selections

    def _is_tie(self, expected: list[torch.Tensor], step: int) -> bool:
        """Whether noise that is no larger than rounding changes this step, or one before it."""
        for run in range(NOISY_RUNS):
            noisy = self._run(self.native, noise=torch.Generator().manual_seed(run))
            if not all(_agree(noisy[i], expected[i]) for i in range(step + 1)):
                return True
        return False

    def _run(
        self, model: Any, *, chooses: Any = None, noise: torch.Generator | None = None
    ) -> list[torch.Tensor]:
        """Logits [batch_size, vocab_size] of each step, or the tokens that it chose."""
        longest = max(self.kv_lens)
        mask = torch.zeros(self.text.shape, dtype=torch.int64)
        for row, kv_len in enumerate(self.kv_lens):
            mask[row, longest - kv_len :] = 1
        positions = mask.cumsum(1) - 1
        cache, runtime = model.new_cache(), runtime_of(model)
        model(
            self.text[:, :longest],
            attention_mask=mask[:, :longest],
            position_ids=positions[:, :longest].clamp(min=0),
            past_key_values=cache,
        )
        decode = decoder_of(model).decode

        def decode_with_noise(hidden: torch.Tensor, *args: Any) -> torch.Tensor:
            factor = 1 + NOISE * torch.randn(hidden.shape, generator=noise)
            return decode(hidden * factor, *args)

        results = []
        for step in range(self.num_steps):
            end = longest + step + 1
            tokens = self.text[:, end - 1 : end]
            if chooses is not None and chooses[step]:
                last = tokens[:, 0], positions[:, end - 1]
                results.append(runtime.choose_tokens(cache, *last)[:, 0])
                continue
            if noise is not None:
                decoder_of(model).decode = decode_with_noise
            try:
                out = model(
                    tokens,
                    attention_mask=mask[:, :end],
                    position_ids=positions[:, end - 1 : end],
                    past_key_values=cache,
                )
            finally:
                if noise is not None:
                    del decoder_of(model).decode
            results.append(out.logits[:, -1])
        return results


def _agree(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether logits are the same but for rounding, or tokens are the likeliest but for that."""
    bound = TOLERANCE * float(expected.abs().max())
    if actual.dtype == torch.int64:
        chosen = expected.gather(1, actual[:, None])[:, 0]
        return bool((expected.amax(1) - chosen <= bound).all())
    return bool(((actual - expected).abs() <= bound).all())
