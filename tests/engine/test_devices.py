"""The engine beside a GPU, and the code of that on a CPU: rows join and leave there, too."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from cases.answers import answers, answers_of_step
from cases.device_cases import FLAGS, GRAPH, SLOW_INLINE, STREAM, load, small
from cases.inside import correct_in_background, split_steps, steps_of
from cases.slowly import slow_but
from cases.tiny_models import random_tokens

from offload.decode.gpu.prepared_steps import BurstLength
from offload.engine.engine import Engine
from offload.engine.request import Request, RequestOutput
from offload.engine.runner import _paced
from offload.engine.sampling_params import SamplingParams
from offload.engine.scheduler import Scheduler
from offload.runtime.correcting import RunningCorrection, SparseTokens
from offload.runtime.runner import Runner

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def alone(model: Any, prompts: list[list[int]], num_tokens: int) -> dict[str, list[int]]:
    """Answers of `generate`, by the number of the prompt."""
    answers, options = {}, {"do_sample": False, "eos_token_id": None}
    for number, prompt in enumerate(prompts):
        ids = torch.tensor([prompt], device=model.device)
        mask = torch.ones_like(ids)
        text = model.generate(ids, attention_mask=mask, max_new_tokens=num_tokens, **options)
        answers[str(number)] = text[0, len(prompt) :].tolist()
    return answers


@pytest.mark.parametrize("backend", [SLOW_INLINE, FLAGS, STREAM, GRAPH])
@pytest.mark.parametrize(
    "name",
    slow_but(
        ["full", "lychee_cluster", "lfps", "tidal_decode", "lychee_decode"],
        "lychee_cluster",
        "lychee_decode",
    ),
)
def test_rows_join_and_leave(
    tiny_folders: dict[str, Path], name: str, backend: tuple[str, str]
) -> None:
    policy = name if name == "full" else small(name)
    model = load(tiny_folders["llama"], policy, backend)
    prompts = [random_tokens(1, n, seed=n)[0].tolist() for n in (5, 100, 41, 230, 70, 150)]
    prompts.append(prompts[3][:150] + prompts[0])
    wanted = alone(model, prompts, 12)
    engine, chance = Engine(model, max_num_seqs=4, slice_seconds=1e-3), random.Random(2)
    found: dict[str, list[int]] = {request_id: [] for request_id in wanted}
    waiting = [*wanted]
    while waiting or engine.has_work:
        if waiting:
            request_id = waiting.pop(chance.randrange(len(waiting)))
            engine.add_request(prompts[int(request_id)], GREEDY, request_id)
        for _ in range(chance.randrange(5)):
            answers_of_step(engine, found)
    assert found == wanted
    links = steps_of(model).links
    engine.stop()
    assert {rows for rows, _ in links} <= {1, 2, 4}
    assert model.kv_store.num_sequences == 0


@pytest.mark.parametrize("backend", [SLOW_INLINE, FLAGS, STREAM, GRAPH])
@pytest.mark.parametrize("name", slow_but(["lychee_cluster", "tidal_decode"], "lychee_cluster"))
def test_corrections_in_slices(
    tiny_folders: dict[str, Path], name: str, backend: tuple[str, str]
) -> None:
    """Tokens are those of `generate` that corrects before steps, whoever decodes between slices."""
    model = load(tiny_folders["llama"], small(name), backend, cache_correction_every=16)
    correct_in_background(model, False)
    prompts = [random_tokens(1, n, seed=n)[0].tolist() for n in (150, 90, 120)]
    wanted = alone(model, prompts, 60)
    engine = Engine(model, slice_seconds=1e-4)
    for request_id in wanted:
        engine.add_request(prompts[int(request_id)], replace(GREEDY, max_tokens=60), request_id)
    assert answers(engine) == wanted
    assert engine.stats.corrected_tokens >= 3 * 2 * 16
    engine.stop()
    assert model.kv_store.num_sequences == 0


@pytest.mark.parametrize("backend", [SLOW_INLINE, FLAGS, GRAPH])
@pytest.mark.parametrize("policy", slow_but(["full", "lychee_cluster"], "lychee_cluster"))
def test_each_draws_by_itself(
    tiny_folders: dict[str, Path],
    policy: str,
    backend: tuple[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The tokens of a seed are those of `generate`, beside others, several steps at a time or one,
    and also where a request beside it wants the logits."""
    model = load(tiny_folders["llama"], policy if policy == "full" else small(policy), backend)
    monkeypatch.setattr(BurstLength, "num_steps", property(lambda self: 5))
    options = {"temperature": 1.4, "top_k": 30, "top_p": 0.95}
    prompts = [random_tokens(1, n, seed=n)[0].tolist() for n in (150, 90, 40)]
    params, wanted = dict[str, SamplingParams](), dict[str, list[int]]()
    seeds = dict[str, int]()  # that `generate` draws
    for seed, prompt in enumerate(prompts):
        ids = torch.tensor([prompt], device=model.device)
        torch.manual_seed(seed)
        seeds[str(seed)] = int(torch.randint(2**63 - 1, ()))
        torch.manual_seed(seed)
        text = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            eos_token_id=None,
            max_new_tokens=30 + seed,
            **options,
        )
        wanted[str(seed)] = text[0, len(prompt) :].tolist()
        params[str(seed)] = SamplingParams(max_tokens=30 + seed, seed=seeds[str(seed)], **options)
    assert len({*wanted["0"]}) > 5
    wanted["greedy"] = alone(model, prompts[:1], 8)["0"]
    params["greedy"] = SamplingParams(max_tokens=8, temperature=0.0)
    params["min_p"] = SamplingParams(max_tokens=12, seed=9, min_p=1.0)
    wanted["min_p"] = [*wanted["greedy"]]  # and four more
    engine = Engine(model, max_num_seqs=8, read_share=0.99)
    for name, of_request in params.items():
        prompt = prompts[int(name) if name.isdigit() else 0]
        engine.add_request(prompt, replace(of_request, ignore_eos=True), name)
    found = answers(engine)
    engine.stop()
    found["min_p"] = found["min_p"][:8]
    assert found == wanted


@pytest.mark.parametrize("backend", [SLOW_INLINE, FLAGS, STREAM, GRAPH])
def test_steps_in_turn(
    tiny_folders: dict[str, Path], backend: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nobody waits several come at a time, each told once; one ends in the middle, and of
    another the callback fails."""
    model = load(tiny_folders["llama"], small("lychee_cluster"), backend)
    split_steps(model, 1)
    monkeypatch.setattr(BurstLength, "num_steps", property(lambda self: 7))
    prompts = [random_tokens(1, n, seed=n)[0].tolist() for n in (150, 90, 120)]
    wanted = [*alone(model, prompts, 40).values()]
    place = next(i for i in range(6, 20) if wanted[1][i] not in wanted[1][:i])
    heard: list[int] = []

    def fails(output: RequestOutput) -> None:
        heard.extend(chosen.token for chosen in output.tokens)
        if len(heard) == 7:
            raise ValueError("for a test")

    engine = Engine(model, max_num_seqs=4, read_share=0.99)  # however long it takes
    many = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    ends = SamplingParams(temperature=0.0, max_tokens=40, stop_token_ids=[wanted[1][place]])
    engine.add_request(prompts[0], many, "0")
    engine.add_request(prompts[1], ends, "1")
    engine.add_request(prompts[2], many, "2", on_output=fails)
    found: dict[str, list[int]] = {"0": [], "1": [], "2": []}
    reasons, most = {}, 0
    while engine.has_work:
        outputs = engine.step()
        most = max(most, sum(output.request_id == "0" for output in outputs))
        for output in outputs:
            found[output.request_id] += [chosen.token for chosen in output.tokens]
            if output.finish_reason is not None:
                assert output.request_id not in reasons
                reasons[output.request_id] = output.finish_reason
    assert most == 4
    assert reasons == {"0": "length", "1": "stop", "2": "error"}
    assert found["0"] == wanted[0]
    assert found["1"] == wanted[1][: place + 1]
    assert heard == found["2"] == wanted[2][:7]
    assert engine.stats.failed == 1
    engine.stop()
    assert model.kv_store.num_sequences == 0


def test_requests_attend_alike_where_a_device_attends(tiny_folders: dict[str, Path]) -> None:
    engine = Engine(load(tiny_folders["llama"], small("quest"), ("cpu", "inline")))
    for params in (SamplingParams(exact=True), SamplingParams(budget_tokens=20)):
        with pytest.raises(ValueError, match="needs a model whose attention is all on the CPU"):
            engine.add_request([1, 2], params)
    engine.stop()


def test_sampled_tokens_of_steps_that_fail_and_answers_that_end(
    tiny_folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each random number is used for one token, also where several steps were asked for."""
    prompts = [random_tokens(1, n, seed=n)[0].tolist() for n in (60, 50, 40)]
    extend = Runner.extend

    def answered(num_steps: int, *, fails: bool = False, stop: int | None = None) -> Any:
        monkeypatch.setattr(BurstLength, "num_steps", property(lambda self: num_steps))
        model, calls = load(tiny_folders["llama"], "full", ("cpu", "inline")), [0]
        split_steps(model, 1)

        def extends(self: Runner, this: Any, *args: Any, prefill: bool, **options: Any) -> Any:
            calls[0] += not prefill
            if fails and not prefill and len(this.seqs) > 1 and calls[0] % 7 == 0:
                raise RuntimeError("for a test")
            return extend(self, this, *args, prefill=prefill, **options)

        monkeypatch.setattr(Runner, "extend", extends)
        engine = Engine(model, max_num_seqs=8, read_share=0.99)
        for seed, prompt in enumerate(prompts):
            stops = (stop,) if seed == 1 and stop is not None else ()
            options = {"temperature": 1.2, "top_p": 0.9, "ignore_eos": True}
            params = SamplingParams(
                seed=seed, max_tokens=30 + 5 * seed, stop_token_ids=stops, **options
            )
            engine.add_request(prompt, params, str(seed))
        found = answers(engine)
        engine.stop()
        return found

    wanted = answered(1)
    assert answered(4) == wanted
    assert answered(4, fails=True) == wanted
    place = next(i for i in range(9, 20) if wanted["1"][i] not in wanted["1"][:i])
    wanted["1"] = wanted["1"][: place + 1]
    assert answered(4, stop=wanted["1"][-1]) == wanted


class Event:
    """An event of a GPU that works when it is waited for."""

    log: ClassVar[list[str]] = []

    def record(self) -> None:
        self.log.append("launched")

    def synchronize(self) -> None:
        self.log.append("done")


def test_one_layer_is_queued_behind_the_one_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(Event, "log", [])
    paced = _paced(lambda: Event.log.append("told"))
    for _ in range(3):
        paced()
    assert Event.log == ["launched", "told", *["launched", "done", "told"] * 2]


def test_slices_on_a_gpu() -> None:
    """They have a share of what was read before; others decode in their middle, and get theirs."""
    options = {"max_num_seqs": 8, "slice_seconds": 0.1, "read_share": 0.25}
    scheduler = Scheduler(most_slice_tokens=8192, reads_on_gpu=True, **options)
    runs, *reads = (
        Request(str(n), [1] * 200_000, SamplingParams(), 10, frozenset(), None) for n in range(3)
    )
    scheduler.running.append(runs)
    scheduler.reading += reads
    for request in reads:
        request.seq = 0

    def size() -> int:
        return sum(n for _, n in scheduler.next_slice(lambda r: len(r.prompt) - r.num_read))

    assert size() == 512
    reads[1].num_read = 64_000
    assert size() == 4096  # of 64,000 a 16th, and a power of two
    reads[0].num_read = 190_000
    assert size() == 8192
    scheduler.was_read(8192, 1.0)  # says little of 512
    assert scheduler.decodes_first
    scheduler.was_decoded(3.0)
    assert not scheduler.decodes_first
    for request in reads:
        request.num_read = 0
    assert size() == 512
    assert not scheduler.owes(0.004)  # 12 ms of decoding
    assert scheduler.owes(0.005)
    scheduler.was_decoded(0.015)
    assert not scheduler.decodes_first
    scheduler.was_read(512, 0.05)
    scheduler.was_decoded(1.0)
    assert size() == 1024


def test_slices_of_corrections_grow_on_a_gpu() -> None:
    """By a quarter at a time, which is less than from one power of two to the next."""
    options = {"max_num_seqs": 8, "slice_seconds": 0.1, "read_share": 0.25}
    scheduler = Scheduler(most_slice_tokens=8192, reads_on_gpu=True, **options)
    runs, waits = (
        Request(str(n), [1] * 100, SamplingParams(), 10, frozenset(), None) for n in range(2)
    )
    waits.correction = RunningCorrection({0: SparseTokens(0, [1] * 8192, [0] * 8192)})
    scheduler.running.append(runs)
    scheduler.correcting.append(waits)
    sizes = list[int]()
    for _ in range(8):
        scheduler.waits_for_readers()
        ((_, size),) = scheduler.next_slice(lambda r: 0)
        scheduler.was_read(size, 0.001)
        sizes.append(size)
    assert sizes == sorted({*sizes})
    assert sizes[-1] > 4 * sizes[0]
