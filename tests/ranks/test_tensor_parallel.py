"""Ranks that split a model's heads give the tokens of one process, and none waits for a dead one.

Two ranks are started once; they run `rank_cases` on CPU tensors with gloo, and with NCCL where
there are two GPUs.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from cases.device_cases import greedy, load, small
from cases.rank_cases import bitwise
from cases.rank_processes import Ranks
from cases.slowly import slow_but
from cases.tiny_models import byte_tokenizer, make_tiny_model, random_tokens
from transformers import AutoModelForCausalLM

from offload import OffloadedModel
from offload.cli import app
from offload.decode.gpu.micro_batches import MicroBatchChoice
from offload.decode.gpu.placement import HeadPlacement
from offload.policies.lychee_decode.policy import LycheeDecode
from offload.policies.registry import make_policy
from offload.ranks.group import _share_of_cpus, check_environment
from offload.ranks.launch import rank_environment
from offload.ranks.shares import head_ranges, mlp_ranges
from offload.runtime.config import runtime_config
from offload.selection.head_roles import HeadRoles, evenly_spaced_heads

TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
DEVICES = [
    pytest.param({"device": "cpu"}, id="gloo"),
    pytest.param({"device": "cuda"}, id="nccl", marks=[pytest.mark.cuda, TWO_GPUS]),
    pytest.param(
        {"device": "cuda", "backend": "stream"},
        id="nccl-stream",
        marks=[pytest.mark.cuda, TWO_GPUS],
    ),
]


@pytest.fixture(scope="module")
def ranks():
    ranks = Ranks(2)
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def uneven_folder(tmp_path_factory):
    """3 KV heads for 2 ranks, as SmolLM2-135M has them; biases, and an MLP that 64 divides."""
    folder = tmp_path_factory.mktemp("uneven") / "llama"
    make_tiny_model(
        "llama-biases-rope", num_key_value_heads=3, intermediate_size=192
    ).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def tokens_of(
    ranks: Ranks, folder: Path, policy: str, tokens: torch.Tensor, **options: Any
) -> list[torch.Tensor]:
    """20 greedy tokens behind a text, by each rank."""
    sizes = {"input_ids": tokens, "max_new_tokens": 20}
    return ranks.call("tokens_of", folder=folder, policy=policy, **sizes, **options)


def all_equal(results: list[torch.Tensor], expected: torch.Tensor) -> bool:
    return all(torch.equal(result, expected) for result in results)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "name", slow_but(["llama", "llama-biases-rope", "qwen2", "qwen3"], "llama-biases-rope")
)
def test_full_attention_gives_the_stock_tokens(name, device, ranks, tiny_folders, stock_models):
    for prompt_tokens in (3, 150):
        tokens = random_tokens(1, prompt_tokens)
        expected = greedy(stock_models[name], tokens, 20)
        got = tokens_of(ranks, tiny_folders[name], "full", tokens, load_options=device)
        assert all_equal(got, expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("weights", ["q4", "q8"])
def test_packed_weights_are_cut(weights, device, ranks, tiny_folders):
    """A step rounds its rows to a grid, of each rank's own; slices of 64 and 32 do not."""
    tokens = random_tokens(1, 99)
    options = {"folder": tiny_folders["llama"], "input_ids": tokens, "dtype": "float32"}
    options |= {"load_options": {"weights": weights, **device}}
    prompt, *steps = bitwise(**options)
    for got_prompt, *got_steps in ranks.call("bitwise", **options):
        assert (got_prompt - prompt).norm() < 1e-3 * prompt.norm()
        for got, wanted in zip(got_steps, steps, strict=True):
            assert (got - wanted).norm() < 0.08 * wanted.norm()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("policy", ["full", "exact_topk"])
def test_int8_rows_of_ranks(policy, device, ranks, uneven_folder):
    """Each rank has the rows of its own heads, as one process has them: 2 and 1 of 3."""
    tokens = random_tokens(1, 220)
    chosen = policy if policy == "full" else small(policy)
    one = load(uneven_folder, chosen, ("cpu", None), kv_dtype="int8")
    got = tokens_of(
        ranks, uneven_folder, policy, tokens, load_options={"kv_dtype": "int8", **device}
    )
    assert all_equal(got, greedy(one, tokens, 20))
    facts = ranks.call("facts", folder=uneven_folder, kv_dtype="int8", **device)
    row_bytes = one.kv_store.format.row_bytes(one.kv_store.head_dim)
    for found, heads in zip(facts, (2, 1), strict=True):
        assert found["kv_heads"] == heads
        assert found["token_bytes"] == 3 * heads * 2 * row_bytes


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "policy",
    slow_but(["streaming_llm", "exact_topk", "quest", "lychee_decode"], "quest", "lychee_decode"),
)
def test_a_policy_gives_the_tokens_of_one_process(policy, device, ranks, tiny_folders):
    tokens = random_tokens(1, 220)
    one = load(tiny_folders["llama"], small(policy), ("cpu", None))
    got = tokens_of(ranks, tiny_folders["llama"], policy, tokens, load_options=device)
    assert all_equal(got, greedy(one, tokens, 20))


@pytest.mark.parametrize("device", DEVICES[1:])
@pytest.mark.parametrize("policy", ["lychee_cluster", "lfps", "per_head"])
def test_policies_that_build_on_the_device(policy, device, ranks, tiny_folders):
    """As above; compiling their callbacks takes too long to do it for gloo, too."""
    test_a_policy_gives_the_tokens_of_one_process(policy, device, ranks, tiny_folders)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("policy", ["full", "lychee_decode"])
def test_heads_that_do_not_divide(policy, device, ranks, uneven_folder):
    tokens, mask = random_tokens(3, 130), torch.ones(3, 130, dtype=torch.int64)
    mask[1, :90], mask[2, :3] = 0, 0
    one = load(uneven_folder, policy if policy == "full" else small(policy), ("cpu", None))
    expected = greedy(one, tokens, 20, attention_mask=mask)
    if policy == "full":
        stock = AutoModelForCausalLM.from_pretrained(uneven_folder)
        assert torch.equal(greedy(stock, tokens, 20, attention_mask=mask), expected)
    got = tokens_of(ranks, uneven_folder, policy, tokens, load_options=device, attention_mask=mask)
    assert all_equal(got, expected)


def test_beams_and_drafts(ranks, tiny_folders, stock_models):
    tokens = random_tokens(1, 60)
    for options in ({"num_beams": 3}, {"prompt_lookup_num_tokens": 4}):
        got = ranks.call(
            "tokens_of",
            folder=tiny_folders["llama"],
            policy="full",
            input_ids=tokens,
            max_new_tokens=16,
            **options,
        )
        assert all_equal(got, greedy(stock_models["llama"], tokens, 16, **options))


@pytest.mark.parametrize("options", [{}, {"top_p": 0.9, "repetition_penalty": 1.2}])
def test_ranks_draw_the_same_tokens(options, ranks, tiny_folders):
    """In the step and in the stock loop, with a seed and without one."""
    tokens, folder = random_tokens(2, 20), tiny_folders["llama"]
    first, second, third = (
        ranks.call(
            "sampled", folder=folder, input_ids=tokens, seed=seed, temperature=2.0, **options
        )
        for seed in (7, 7, None)
    )
    for drawn in (first, second, third):
        assert torch.equal(drawn[0], drawn[1])
    assert torch.equal(first[0], second[0])
    assert not torch.equal(first[0], third[0])


@pytest.mark.parametrize("dtype", slow_but(["float32", "bfloat16"], "bfloat16"))
def test_ranks_compute_the_same_bits(dtype, ranks, uneven_folder):
    tokens = random_tokens(2, 50)
    of_rank = ranks.call("bitwise", folder=uneven_folder, input_ids=tokens, dtype=dtype)
    assert all(torch.equal(a, b) for a, b in zip(*of_rank, strict=True))
    expected = AutoModelForCausalLM.from_pretrained(uneven_folder)(tokens).logits.detach()
    got = torch.cat(of_rank[0], dim=1)
    error = float((got - expected).norm() / expected.norm())
    assert error < (1e-5 if dtype == "float32" else 0.03)


def test_auto_is_resolved_once_for_all_ranks(ranks: Ranks, uneven_folder: Path) -> None:
    """Without a GPU to exact attention: what selects there cannot be exact up to the crossover."""
    reason = "exact: layers that run one by one on a CPU select from the budget on, too early"
    found = [facts["policy"] for facts in ranks.call("facts", folder=uneven_folder, policy="auto")]
    assert found == [("full", reason)] * 2


def test_each_rank_has_its_part(ranks, uneven_folder):
    whole = load(uneven_folder, "full", ("cpu", "inline"), max_memory={"cpu": "40MiB"})
    weights = sum(weight.nbytes for weight in whole.parameters())
    parts = ranks.call("facts", folder=uneven_folder, max_memory={"cpu": "40MiB"})
    assert [part["kv_heads"] for part in parts] == [2, 1]
    assert [part["q_rows"] for part in parts] == [4 * 32, 2 * 32]
    assert [part["gate_rows"] for part in parts] == [128, 64]
    assert [part["o_bias"] for part in parts] == [True, False]
    assert all(part["weight_bytes"] < weights for part in parts)
    # Each has room for as many tokens as the other, and together they keep to the limit.
    assert parts[0]["budget"] == 2 * parts[1]["budget"]
    total = sum(part["budget"] + part["weight_bytes"] for part in parts)
    assert 40 * 2**20 - 3 <= total <= 40 * 2**20


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["quest", "lfps"])
def test_each_rank_keeps_the_hot_rows_of_its_heads(policy, ranks, tiny_folders, tmp_path):
    """Requests that come ahead, and the CPU's fetch lists, are each rank's own."""
    path = tmp_path / "placement.json"
    HeadPlacement.from_text("GG\nhh\nhh").save(path)
    tokens, folder = random_tokens(1, 200), tiny_folders["llama"]
    one = load(folder, small(policy), ("cpu", "inline"), placement=str(path))
    got = tokens_of(
        ranks, folder, policy, tokens, load_options={"backend": "inline", "placement": str(path)}
    )
    assert all_equal(got, greedy(one, tokens, 20))


def test_one_rank_makes_room_for_a_prompt(ranks: Ranks, tiny_folders: dict[str, Path]) -> None:
    """The sequence has one slot on all, or a step would sum rows of different sequences."""
    tokens, folder = random_tokens(1, 90, seed=4), tiny_folders["llama"]
    got = ranks.call("makes_room_alone", folder=folder, input_ids=tokens, rank=1)
    text = torch.cat([tokens, tokens[:, :10]], dim=1)
    one = load(folder, small("exact_topk"), ("cpu", None))
    cache = one.new_cache()
    with torch.no_grad():
        for x in (text[:, :89], text[:, 89:90], text[:, 90:99]):
            one(x, past_key_values=cache)
        expected = one(text[:, 99:], past_key_values=cache).logits
    for logits, taken in got:
        assert taken == got[0][1]
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("policy", "rank"),
    [
        ("lychee_decode", 0),
        pytest.param("lychee_decode", 1, marks=pytest.mark.slow),
        pytest.param("sketch", 1, marks=pytest.mark.slow),
    ],
)
def test_all_ranks_fall_back_where_one_has_no_room(policy, rank, ranks, tiny_folders, caplog):
    """Steps are captured anew by both: a rank that did so alone would sum what does not belong
    together."""
    tokens = random_tokens(1, 200)
    one = load(tiny_folders["llama"], small(policy), ("cpu", None))
    expected = greedy(one, tokens, 60)
    results = ranks.call(
        "no_room",
        folder=tiny_folders["llama"],
        policy=policy,
        input_ids=tokens,
        max_new_tokens=60,
        rank=rank,
    )
    for number, (got, placement, warnings) in enumerate(results):
        assert torch.equal(got, expected)
        # What comes back comes back to both ranks, too.
        letter = "G" if policy == "lychee_decode" else "c"
        assert [letter in text for text in placement] == [False, True]
        assert len(warnings) == 1
        reason = "need" if number == rank else "the GPU of another rank has no room"
        assert reason in warnings[0]
        assert "only dense layers stay there" in warnings[0]
    if policy == "sketch":  # with room for its codes each rank lists for its own heads
        options = {"folder": tiny_folders["llama"], "policy": policy, "input_ids": tokens}
        for got, placement, warnings in ranks.call("no_room", **options, max_new_tokens=60, rank=2):
            assert torch.equal(got, expected)
            assert "c" in placement[0]
            assert not warnings
    # Neither does one capture anew for itself as its context grows.
    assert ranks.call("room_for_scores", folder=tiny_folders["llama"]) == [512, 512]


def test_more_ranks_than_heads(ranks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("one head")
    make_tiny_model("llama", num_key_value_heads=1).save_pretrained(folder)
    for name, message in ranks.call("raises", folder=folder, what="load"):
        assert name == "ValueError"
        assert "this model has 1 KV heads" in message
    with pytest.raises(ValueError, match="tensor_parallel_size=9: this model has 8 KV heads"):
        head_ranges(8, 9)


def test_what_does_not_work_with_ranks(ranks, tiny_folders):
    folder = tiny_folders["llama"]
    for name, message in ranks.call("raises", folder=folder, what="load", policy="tidal_decode"):
        assert name == "NotImplementedError"
        assert "shares one selection among all heads" in message
    for name, message in ranks.call("raises", folder=folder, what="save"):
        assert name == "NotImplementedError"
        assert "load the model without it" in message
    for name, message in ranks.call("raises", folder=folder, what="generate", max_time=3.0):
        assert name == "NotImplementedError"
        assert "max_new_tokens" in message
    missing = folder / "missing"
    for name, message in ranks.call("raises", folder=missing, what="load"):
        assert name == "FileNotFoundError"
        assert "missing" in message
    # Errors that all ranks raise leave them as they were.
    for name, message in ranks.call("other_inputs", folder=folder):
        assert name == "ValueError"
        assert "the input of rank 1 (7 tokens) is not that of rank 0" in message
    assert ranks.call("raises", folder=folder, what="generate") == [("", ""), ("", "")]


def test_wrong_environments(monkeypatch, tiny_folders):
    for name in rank_environment(0, 2, 1):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match=r"RANK.* is not set; start .*torchrun --nproc-per-node 2"):
        OffloadedModel.from_pretrained(tiny_folders["llama"], tensor_parallel_size=2)
    for name, value in rank_environment(0, 3, 1).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=r"tensor_parallel_size=2, but WORLD_SIZE=3 .*torchrun"):
        OffloadedModel.from_pretrained(tiny_folders["llama"], tensor_parallel_size=2)
    with pytest.raises(ValueError, match="device='cuda:1' with tensor_parallel_size=3: rank i"):
        check_environment(3, "cuda:1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match="needs 3 GPUs, but torch finds 1"):
        check_environment(3, "cuda")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="GPUs of one host"):
        check_environment(3, "cpu")
    with pytest.raises(ValueError, match="tensor_parallel_size must be an integer of at least 1"):
        runtime_config(tensor_parallel_size=0)


def test_parts_of_ranks():
    assert head_ranges(3, 2) == [range(2), range(2, 3)]
    assert head_ranges(8, 2) == [range(4), range(4, 8)]
    assert mlp_ranges(1536, 2) == [range(768), range(768, 1536)]
    assert mlp_ranges(14336, 3)[0] == range(4800)
    assert mlp_ranges(96, 2) == [range(64), range(64, 96)]
    assert mlp_ranges(7, 2) == [range(4), range(4, 7)]
    # Four CPUs for both, or two each; a quota counts once.
    own, other = frozenset({0, 1}), frozenset({2, 3})
    assert _share_of_cpus([(own | other, 4), (own | other, 4)], 1) == 2
    assert _share_of_cpus([(own, 2), (other, 2)], 1) == 2
    assert _share_of_cpus([(own, 1), (own, 1)], 0) == 1


def test_roles_of_some_heads():
    roles = HeadRoles.of(evenly_spaced_heads(6, 3, 4), head_dim=64)
    policy = LycheeDecode(head_roles=roles)
    shape = {"num_layers": 6, "num_kv_heads": 3, "head_dim": 64}
    parts = [policy.of_heads(heads, **shape) for heads in head_ranges(3, 2)]
    joined = [(*a, *b) for a, b in zip(*(part.head_roles.retrieval for part in parts), strict=True)]
    assert tuple(joined) == roles.retrieval
    parts[1].check_model(num_layers=6, num_qo_heads=3, num_kv_heads=1, head_dim=64)
    # Without roles: those of the whole model, not evenly spaced ones of each part.
    spaced = [
        LycheeDecode(retrieval_heads=4).of_heads(heads, **shape) for heads in head_ranges(3, 2)
    ]
    assert [part.head_roles.retrieval for part in spaced] == [
        part.head_roles.retrieval for part in parts
    ]


def test_select_layers_of_tidal_decode_are_the_whole_models():
    policy = make_policy("tidal_decode", inner="quest")
    part = policy.of_heads(range(1), num_layers=30, num_kv_heads=3, head_dim=64)
    assert part.select_layers == (2, 6, 17, 21)


def test_parts_are_agreed_on():
    asked = []

    def agree(mine: int) -> int:
        asked.append(mine)
        return 2

    choice = MicroBatchChoice((1, 2), agree)
    for _ in range(16 + 10):
        choice.record(choice.num_micro_batches, 1.0 if choice.num_micro_batches == 1 else 2.0)
    assert asked == [1]
    assert choice.num_micro_batches == 2


@pytest.mark.slow
def test_the_command_starts_its_ranks(tiny_folders, tmp_path, capfd, monkeypatch) -> None:
    folder = shutil.copytree(tiny_folders["llama"], tmp_path / "model")
    path = folder / "generation_config.json"  # ranks have a clock each: it is left out
    path.write_text(json.dumps(json.loads(path.read_text()) | {"max_time": 600.0}))
    codes, outputs = zip(
        *(
            _command(monkeypatch, capfd, folder, "-n", "12", "--json", *options)
            for options in ([], ["--tensor-parallel-size", "2"])
        ),
        strict=True,
    )
    assert codes == (0, 0), outputs
    runs = [json.loads(output)["runs"][0] for output, _ in outputs]
    assert runs[0]["answer"] == runs[1]["answer"]
    # Each rank has half of the heads; the figures are of all.
    assert runs[0]["kv_host_bytes"] == runs[1]["kv_host_bytes"]


@pytest.mark.slow
def test_the_command_fails_as_its_ranks_do(tmp_path, capfd, monkeypatch) -> None:
    make_tiny_model("llama", num_key_value_heads=1).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    code, (out, err) = _command(monkeypatch, capfd, tmp_path, "--tensor-parallel-size", "2")
    assert code == 1
    assert out == ""
    assert err.count("this model has 1 KV heads") == 1


def _command(
    monkeypatch: pytest.MonkeyPatch, capfd: Any, folder: Path, *arguments: str
) -> tuple[int, tuple[str, str]]:
    """Exit code, stdout and stderr of `offload generate`; ranks are processes of their own."""
    command = ["generate", str(folder), "-p", "the quick brown fox", "--threads", "1"]
    monkeypatch.setattr("sys.argv", ["offload", *command, *arguments])
    capfd.readouterr()
    with pytest.raises(SystemExit) as ended:
        app()
    return int(ended.value.code or 0), capfd.readouterr()
