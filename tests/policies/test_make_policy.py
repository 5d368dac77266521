"""make_policy and the options every policy shares: what is refused, and how the message reads."""

from __future__ import annotations

import inspect
import pickle
import subprocess
import sys

import pytest
from cases.tiny_models import make_tiny_model

import offload.policies
from offload.policies import Auto, ExactTopK, Full, StreamingLLM
from offload.policies.registry import available_policies, make_policy
from offload.selection.policy import Policy
from offload.selection.selection import Selection

PLAIN = ("exact_topk", "quest", "sketch", "lfps", "lychee_cluster", "streaming_llm")


def public(cls: type) -> set[str]:
    """Attributes and methods that a class has, or says that it has."""
    names = {*dir(cls), *inspect.get_annotations(cls)} - set(dir(object))
    return {name for name in names if not name.startswith("_")}


def test_an_author_needs_few_names() -> None:
    """What plain policies override is of `Selection`, but for the options that they take."""
    assert len(public(Selection)) <= 13
    asked = public(Policy) - public(Selection) - {"members"}
    for name in PLAIN:
        assert not asked & set(vars(type(make_policy(name)))), name


def test_names_make_their_policies():
    assert {"exact_topk", "full", "streaming_llm"} < set(available_policies())
    assert make_policy("full") == Full()
    assert make_policy("exact_topk", budget_tokens=256) == ExactTopK(budget_tokens=256)
    assert make_policy("streaming_llm", sink_tokens=8) == StreamingLLM(sink_tokens=8)
    for name in available_policies():
        assert make_policy(name).name == name


def test_a_policy_object_is_returned_as_it_is():
    policy = ExactTopK(budget_tokens=512)
    assert make_policy(policy) is policy
    with pytest.raises(ValueError, match=r"options \['budget_tokens'\] given beside a policy"):
        make_policy(policy, budget_tokens=256)


def test_auto():
    assert make_policy("auto", budget_tokens=320) == Auto(320)
    assert not Auto().selects
    assert pickle.loads(pickle.dumps(Auto(320))) == Auto(320)
    message = "policy 'auto' has no option 'dense_layers'; its options: budget_tokens"
    with pytest.raises(ValueError, match=message):
        make_policy("auto", dense_layers=1)
    # The least that it takes is the least of all that it may come to.
    for budget in (0, 64, 79):
        with pytest.raises(ValueError, match=f"={budget} is too few .*; give at least 80"):
            Auto(budget)
    for name in ("lychee_cluster", "tidal_decode", "lychee_decode"):
        make_policy(name, budget_tokens=Auto(80).budget_tokens)
    with pytest.raises(ValueError, match="budget_tokens=79 cannot hold sink_tokens=16"):
        make_policy("lychee_cluster", budget_tokens=79)
    with pytest.raises(ValueError, match=r"budget_tokens must be less than 2\*\*63, got 9223"):
        make_policy("exact_topk", budget_tokens=2**63)
    with pytest.raises(ValueError, match="which auto has none of"):
        make_policy("hard_kv", inner="auto")


def test_unknown_name():
    message = "unknown policy 'qest'; available: auto, exact_topk, full, hard_kv, lfps, .*, quest"
    with pytest.raises(ValueError, match=message):
        make_policy("qest")
    with pytest.raises(AttributeError, match="has no attribute 'Qest'"):
        _ = offload.policies.Qest


def test_unknown_option():
    message = (
        "policy 'exact_topk' has no option 'budget'; its options:"
        " budget_tokens, sink_tokens, recent_tokens, dense_layers"
    )
    with pytest.raises(ValueError, match=message):
        make_policy("exact_topk", budget=256)
    message = "policy 'full' has no option 'budget_tokens'; its options: none"
    with pytest.raises(ValueError, match=message):
        make_policy("full", budget_tokens=256)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget_tokens": "1024"}, "budget_tokens must be an int, got '1024'"),
        ({"budget_tokens": True}, "budget_tokens must be an int, got True"),
        ({"sink_tokens": 4.0}, r"sink_tokens must be an int, got 4\.0"),
        ({"sink_tokens": "4"}, "sink_tokens must be an int, got '4'"),
        ({"dense_layers": None}, "dense_layers must be an int, got None"),
        ({"sink_tokens": -1}, "sink_tokens and dense_layers must not be negative, got -1 and 2"),
        ({"dense_layers": -3}, "sink_tokens and dense_layers must not be negative, got 4 and -3"),
        ({"recent_tokens": -1}, r"recent_tokens must be at least 1 \(the newest token\), got -1"),
    ],
)
@pytest.mark.parametrize("name", ["exact_topk", "streaming_llm"])
def test_options_out_of_range(name, options, message):
    with pytest.raises(ValueError, match=message):
        make_policy(name, **options)


def test_a_budget_below_its_parts():
    message = (
        r"budget_tokens=67 cannot hold sink_tokens=4 \+ recent_tokens=64;"
        " raise budget_tokens or lower the others"
    )
    with pytest.raises(ValueError, match=message):
        ExactTopK(budget_tokens=67)
    assert ExactTopK(budget_tokens=68).budget_tokens == 68
    with pytest.raises(ValueError, match="recent_tokens must be at least 1"):
        ExactTopK(recent_tokens=0)


def test_streaming_llm_derives_its_window():
    assert StreamingLLM(budget_tokens=100, sink_tokens=10).recent_tokens == 90
    assert StreamingLLM(budget_tokens=100, sink_tokens=10, recent_tokens=90).recent_tokens == 90
    message = "recent_tokens must be budget_tokens - sink_tokens = 90, got 50"
    with pytest.raises(ValueError, match=message):
        StreamingLLM(budget_tokens=100, sink_tokens=10, recent_tokens=50)


def test_full_never_loads_numba(tmp_path):
    make_tiny_model("llama").save_pretrained(tmp_path)
    script = (
        "import sys, torch, offload, offload.engine.engine;"
        f"model = offload.OffloadedModel.from_pretrained({str(tmp_path)!r}, policy='full');"
        "model.generate(torch.arange(9)[None], max_new_tokens=3, do_sample=False);"
        "assert 'numba' not in sys.modules; offload.make_policy('exact_topk');"
        "assert 'numba' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


@pytest.mark.parametrize("name", available_policies())
def test_a_policy_can_be_sent_to_another_process(name: str) -> None:
    options = {} if name == "full" else {"budget_tokens": 96}
    policy = make_policy(name, **options)
    sent = pickle.loads(pickle.dumps(policy))
    assert sent == policy
    assert sent.select is policy.select  # callbacks are the process's own
