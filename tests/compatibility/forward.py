"""Forward passes, caches and what is done to a model."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from cases.tiny_models import make_tiny_model, random_tokens
from compatibility.table import SINGLE, Feature, Side, padded
from transformers import DynamicCache, StaticCache

from offload import available_policies


def forward(*args: Any, **options: Any) -> Callable[[Side], torch.Tensor]:
    """The logits of one forward pass."""

    def run(side: Side) -> torch.Tensor:
        return side.logits(*args, **options)

    return run


def attended_logits(inputs: dict[str, torch.Tensor]) -> Callable[[Side], torch.Tensor]:
    """Those of padding mean nothing."""

    def run(side: Side) -> torch.Tensor:
        return side.logits(**inputs)[inputs["attention_mask"] == 1]

    return run


def with_cache(change: Callable[[Any], Any], num_rows: int = 3) -> Callable[[Side], torch.Tensor]:
    """A prompt of three rows, a change of its cache, and a step after it."""

    def run(side: Side) -> torch.Tensor:
        cache = side.new_cache()
        side.logits(random_tokens(3, 30), past_key_values=cache)
        cache = change(cache) or cache
        return side.logits(torch.full((num_rows, 1), 65), past_key_values=cache)

    return run


def fed_in_pieces(side: Side) -> torch.Tensor:
    tokens, cache = random_tokens(2, 60), side.new_cache()
    pieces = tokens.split([20, 1, 7, 30, 1, 1], dim=1)
    return torch.cat([side.logits(piece, past_key_values=cache) for piece in pieces], dim=1)


def row_without_token(side: Side) -> torch.Tensor:
    """A second turn in which one row is padding only."""
    cache, mask = side.new_cache(), torch.ones(2, 24, dtype=torch.long)
    side.logits(random_tokens(2, 20), past_key_values=cache)
    mask[1, 20:] = 0
    return side.logits(random_tokens(2, 4), attention_mask=mask, past_key_values=cache)[0]


def hidden_later(side: Side) -> torch.Tensor:
    """A mask that hides a token which is cached already."""
    cache, mask = side.new_cache(), torch.ones(1, 21, dtype=torch.long)
    side.logits(random_tokens(1, 20), past_key_values=cache)
    mask[0, 5] = 0
    return side.logits(random_tokens(1, 1), attention_mask=mask, past_key_values=cache)


def other_columns_hidden(side: Side) -> torch.Tensor:
    """A mask that hides as many cached tokens as before, but others."""
    cache, mask = side.new_cache(), torch.ones(1, 21, dtype=torch.long)
    mask[0, :3] = 0
    side.logits(random_tokens(1, 20), attention_mask=mask[:, :20], past_key_values=cache)
    return side.logits(random_tokens(1, 1), attention_mask=mask.roll(3, 1), past_key_values=cache)


def four_dimensional(side: Side) -> torch.Tensor:
    mask = torch.ones(12, 12, dtype=torch.bool).tril()[None, None]
    return side.logits(random_tokens(1, 12), attention_mask=mask)


def loss(side: Side) -> float:
    labels = random_tokens(2, 30)
    labels[0, :9] = -100
    with torch.no_grad():
        return float(side.model(random_tokens(2, 30), labels=labels).loss)


def read_cache(side: Side) -> torch.Tensor:
    cache = side.new_cache()
    side.logits(random_tokens(1, 20), past_key_values=cache)
    keys: torch.Tensor = cache.layers[1].keys
    return keys


def foreign_cache(make: Callable[[Any], Any]) -> Callable[[Side], torch.Tensor]:
    """The caller makes a cache of another class, as transformers' documents do."""

    def run(side: Side) -> torch.Tensor:
        return side.logits(**SINGLE, past_key_values=make(side.model.config))

    return run


def turns(policy: str, num_new: int) -> Callable[[Side], Any]:
    """A prompt, and a question over its cache."""
    prompt, question = random_tokens(1, 150), random_tokens(1, num_new, seed=3)

    def run(side: Side) -> Any:
        model = load_with_policy(side, policy)
        cache = model.new_cache()
        side.logits(prompt, model=model, past_key_values=cache)
        whole = torch.cat([prompt, question], dim=1)
        return [side.generate(whole, model=model, past_key_values=cache, max_new_tokens=16)]

    return run


def fresh(policy: str, num_new: int) -> Callable[[Side], Any]:
    """The same as one prompt."""
    whole = torch.cat([random_tokens(1, 150), random_tokens(1, num_new, seed=3)], dim=1)

    def run(side: Side) -> Any:
        model = load_with_policy(side, policy)
        return [side.generate(whole, model=model, max_new_tokens=16)]

    return run


def load_with_policy(side: Side, name: str) -> Any:
    """With a budget that makes the policy choose."""
    from offload.policies.registry import make_policy

    options = {} if name == "full" else {"budget_tokens": 96}
    return side.load(policy=make_policy(name, **options))


# What is done to a model.


def changed(change: Callable[[Any], Any]) -> Callable[[Side], Any]:
    """A second model is changed and then generates."""

    def run(side: Side) -> None:
        model = side.load()
        result = change(model)
        side.generate(**SINGLE, model=model if result is None else result)

    return run


def hook_on(select: Callable[[Any], Any]) -> Callable[[Side], int]:
    """How often a forward hook runs in eight tokens."""

    def run(side: Side) -> int:
        runs: list[int] = []
        handle = select(side.model).register_forward_hook(lambda *args: runs.append(1))
        try:
            side.generate(**SINGLE, min_new_tokens=8)
        finally:
            handle.remove()
        return len(runs)

    return run


def after_a_prompt(change: Callable[[Any], Any]) -> Callable[[Side], Any]:
    """A model is changed between two steps, on one cache."""

    def run(side: Side) -> torch.Tensor:
        model = side.load()
        cache = model.new_cache() if side.is_ours else DynamicCache()
        side.logits(**SINGLE, model=model, past_key_values=cache)
        change(model)
        return side.logits(random_tokens(1, 1), model=model, past_key_values=cache)

    return run


def other_weights(model: Any, *, assign: bool) -> None:
    weights = make_tiny_model("llama").state_dict()
    model.load_state_dict({name: x * 1.1 for name, x in weights.items()}, assign=assign)


def new_parameter(model: Any) -> None:
    projection = model.model.layers[1].self_attn.q_proj
    projection.weight = torch.nn.Parameter(projection.weight.detach() * 1.5)


def new_data(model: Any) -> None:
    projection = model.model.layers[1].mlp.down_proj
    projection.weight.data = projection.weight.detach() * 1.5


def in_place(model: Any) -> None:
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.mul_(1.5)


def adapter(model: Any) -> None:
    """What peft does: a projection becomes another module."""

    class LoraLinear(torch.nn.Linear):
        pass

    attention = model.model.layers[1].self_attn
    weight = attention.v_proj.weight
    attention.v_proj = LoraLinear(96, 64, bias=False)
    attention.v_proj.weight = weight


def with_adapter(model: Any) -> None:
    model.add_adapter({"peft_type": "LORA"})


def resize(model: Any) -> None:
    model.resize_token_embeddings(400)


def pickled(model: Any) -> Any:
    return pickle.loads(pickle.dumps(model))


def saved_whole(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def backward(side: Side) -> bool:
    tokens = random_tokens(1, 10)
    side.model(tokens, labels=tokens).loss.backward()
    return True


def inference_mode_first(side: Side) -> None:
    """The first call of a model, and one after it, by both steps that a CPU has."""
    for backend in (None, "inline"):
        first_in_inference_mode(side, side.load(**({"backend": backend} if side.is_ours else {})))


def first_in_inference_mode(side: Side, model: Any) -> None:
    with torch.inference_mode():
        side.generate(**SINGLE, model=model)
    side.generate(**SINGLE, model=model)


def prompt_and_step(side: Side) -> list[torch.Tensor]:
    cache = side.new_cache()
    return [
        side.logits(x, past_key_values=cache) for x in (random_tokens(1, 40), random_tokens(1, 1))
    ]


def autocast(side: Side) -> list[torch.Tensor]:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return prompt_and_step(side)


def with_accelerate(model: Any) -> Any:
    import accelerate

    return accelerate.cpu_offload(model, execution_device=torch.device("cpu"))


_PACKED = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4]])
_POSITIONS = torch.arange(30)[None] * 2 + 7
_LEFT, _RIGHT = padded(30, 11), padded(30, 11, side="right")

PASSES = [
    Feature("logits of a prompt", forward(random_tokens(2, 30))),
    Feature("left padding", attended_logits(_LEFT)),
    Feature("right padding", attended_logits(_RIGHT)),
    Feature("several prompts, turns and steps over one cache", fed_in_pieces),
    Feature("a turn without a token for some rows", row_without_token),
    Feature("`labels`, and the loss", loss),
    Feature("`position_ids` that ascend", forward(random_tokens(2, 30), position_ids=_POSITIONS)),
    Feature("`logits_to_keep`", forward(random_tokens(2, 30), logits_to_keep=3)),
    Feature("`use_cache=False`", forward(random_tokens(2, 30), use_cache=False)),
    Feature(
        "`return_dict=False`",
        lambda side: [side.model(random_tokens(1, 9), return_dict=False)[0].detach()],
    ),
    Feature("`token_type_ids`", forward(**SINGLE, token_type_ids=torch.zeros(1, 40).long())),
    Feature("`cache_position`", forward(**SINGLE, cache_position=torch.arange(40))),
    Feature("`torch.inference_mode`, first and not", inference_mode_first),
    Feature(
        "`torch.autocast`, as without it",
        autocast,
        "computed in the model's dtype",
        reference=prompt_and_step,
    ),
    Feature("`output_attentions`", forward(**SINGLE, output_attentions=True)),
    Feature("`output_hidden_states`", forward(**SINGLE, output_hidden_states=True)),
    Feature("a 4D attention mask", four_dimensional, "attention is causal, but for padding"),
    Feature(
        "packed sequences (`position_ids` that start over)",
        forward(random_tokens(1, 10), position_ids=_PACKED),
        "attention is causal, but for padding",
    ),
    Feature(
        "a mask that hides a cached token later", hidden_later, "padding is not in the cache at all"
    ),
    Feature(
        "a mask that hides other cached tokens than before",
        other_columns_hidden,
        "padding is not in the cache at all",
    ),
    Feature(
        "gradients (`loss.backward()`)", backward, "nothing has gradients", refused_by_torch=True
    ),
]

CACHES = [
    Feature("`crop`", with_cache(lambda cache: cache.crop(-11))),
    Feature(
        "`reorder_cache`", with_cache(lambda cache: cache.reorder_cache(torch.tensor([2, 2, 0])))
    ),
    Feature(
        "`batch_select_indices`",
        with_cache(lambda cache: cache.batch_select_indices(torch.tensor([2, -3])), 2),
    ),
    Feature(
        "`batch_repeat_interleave`", with_cache(lambda cache: cache.batch_repeat_interleave(2), 6)
    ),
    Feature("`copy.deepcopy`", with_cache(copy.deepcopy)),
    Feature("`reset`", with_cache(lambda cache: cache.reset(), 5)),
    Feature("a `DynamicCache` of the caller's", foreign_cache(lambda config: DynamicCache())),
    Feature(
        "a `StaticCache` of the caller's",
        foreign_cache(lambda config: StaticCache(config=config, max_cache_len=64)),
    ),
    Feature("keys and values as tensors (`cache.layers[1].keys`)", read_cache),
    *(
        Feature(
            f"`{policy}`: a turn of {num_new} tokens over a cache, as in one prompt",
            turns(policy, num_new),
            reference=fresh(policy, num_new),
        )
        for policy in available_policies()
        for num_new in (9, 40)
    ),
]

CHANGES = [
    Feature(
        '`eval()`, `requires_grad_(False)`, `to("cpu")`',
        changed(lambda model: model.eval().requires_grad_(False).to("cpu")),
    ),
    Feature("a forward hook on the model", hook_on(lambda model: model)),
    Feature(
        "a forward hook on a layer",
        hook_on(lambda model: model.model.layers[1]),
        "decoding does not call the modules",
    ),
    Feature("weights changed in place, between two steps too", after_a_prompt(in_place)),
    Feature("`load_state_dict`", changed(partial(other_weights, assign=False))),
    Feature(
        "`load_state_dict(assign=True)` before the first call",
        changed(partial(other_weights, assign=True)),
    ),
    Feature(
        "`load_state_dict(assign=True)` between two steps",
        after_a_prompt(partial(other_weights, assign=True)),
    ),
    Feature("`.weight = Parameter(…)` between two steps", after_a_prompt(new_parameter)),
    Feature("`.weight.data = …` between two steps", after_a_prompt(new_data)),
    Feature("replaced modules (adapters)", changed(adapter), "as peft does it"),
    Feature(
        "`add_adapter`",
        changed(with_adapter),
        reference=lambda side: None,  # the stock model needs peft
    ),
    Feature("training (`train()`)", changed(lambda model: model.train())),
    Feature(
        "`gradient_checkpointing_enable()`",
        changed(lambda model: model.gradient_checkpointing_enable()),
    ),
    Feature("`resize_token_embeddings`", changed(resize)),
    Feature("another dtype (`to(torch.float64)`)", changed(lambda model: model.to(torch.float64))),
    Feature("`half()`", changed(lambda model: model.half()), tolerance=0.1),
    Feature("`copy.deepcopy(model)`", changed(copy.deepcopy)),
    Feature("`pickle`", changed(pickled)),
    Feature("`torch.save(model)`", changed(saved_whole)),
    Feature("`torch.compile(model)`", changed(lambda model: torch.compile(model, backend="eager"))),
    Feature("`accelerate.cpu_offload`", changed(with_accelerate), "what is offloaded is the cache"),
]
