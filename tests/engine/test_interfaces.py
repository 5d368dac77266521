"""The engine behind `async for`, and behind transformers' continuous batching."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from cases.answers import alone
from cases.tiny_models import random_tokens
from transformers import ContinuousBatchingConfig, GenerationConfig

from offload import AsyncEngine, Engine, OffloadedModel, SamplingParams
from offload.engine.request import RequestOutput

GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
PROMPTS = [random_tokens(1, n, seed=n)[0].tolist() for n in (20, 90, 33)]


@pytest.fixture(scope="module")
def model(tiny_folders: dict[str, Path]) -> Any:
    return OffloadedModel.from_pretrained(tiny_folders["llama"], dtype="float32")


@pytest.fixture(scope="module")
def wanted(model: Any) -> list[list[int]]:
    return [alone(model, prompt, 10) for prompt in PROMPTS]


def test_async_for(model: Any, wanted: list[list[int]]) -> None:
    async def answer(engine: AsyncEngine, prompt: list[int]) -> list[int]:
        tokens = []
        async for output in engine.generate(prompt, GREEDY):
            tokens += [chosen.token for chosen in output.tokens]
        return tokens

    async def main() -> list[list[int]]:
        async with AsyncEngine(Engine(model)) as engine:
            found = await asyncio.gather(*(answer(engine, prompt) for prompt in PROMPTS))
            with pytest.raises(ValueError, match="empty"):
                await answer(engine, [])
            accepted = await anext(engine.generate(PROMPTS[1], GREEDY))
            assert (accepted.num_prompt_tokens, accepted.num_read) == (90, 0)
            async for output in engine.generate(PROMPTS[1], GREEDY):  # who leaves is not served on
                if output.tokens:
                    break
            return found

    assert asyncio.run(main()) == wanted
    assert model.kv_store.num_sequences == 0


def test_a_reader_who_is_behind_is_waited_for(model: Any) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=300, ignore_eos=True)

    async def main() -> int:
        async with AsyncEngine(Engine(model)) as engine:
            outputs = engine.generate(PROMPTS[0], params)
            await anext(outputs)
            chosen, before = 0, -1
            while chosen == 0 or chosen > before:
                before = chosen
                await asyncio.sleep(0.3)
                chosen = engine.engine.stats.answer_tokens
            await outputs.aclose()
            return chosen

    assert 0 < asyncio.run(main()) <= 66


def test_a_reader_who_does_not_read_keeps_nobody_from_stopping(model: Any) -> None:
    async def main() -> list[RequestOutput]:
        async with AsyncEngine(Engine(model)) as engine:
            params = SamplingParams(temperature=0.0, max_tokens=300, ignore_eos=True)
            outputs = engine.generate(PROMPTS[0], params)
            await anext(outputs)
        return [output async for output in outputs]

    found = asyncio.run(asyncio.wait_for(main(), 60))
    assert sum(len(output.tokens) for output in found) == 300


def test_an_engine_that_nobody_started_keeps_nobody_waiting(model: Any) -> None:
    async def first(engine: AsyncEngine) -> None:
        await anext(engine.generate(PROMPTS[0], GREEDY))

    engine = AsyncEngine(Engine(model))
    with pytest.raises(RuntimeError, match="was not started: use `async with"):
        asyncio.run(first(engine))
    engine.engine.start().stop()
    with pytest.raises(RuntimeError, match="was stopped"):
        asyncio.run(first(engine))


def test_an_error_ends_the_loop(model: Any) -> None:
    def fails(ids: Any, logits: torch.Tensor) -> torch.Tensor:
        raise KeyError("in a processor")

    async def main() -> None:
        async with AsyncEngine(Engine(model)) as engine:
            params = SamplingParams(logits_processors=(fails,))
            with pytest.raises(KeyError, match="in a processor"):
                async for _ in engine.generate(PROMPTS[0], params):
                    pass

    asyncio.run(main())


def test_a_step_that_fails_ends_all_requests_and_the_engine(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: Engine) -> None:
        raise OSError("the device is gone")

    async def main() -> None:
        engine = Engine(model)
        async with AsyncEngine(engine) as served:
            outputs = served.generate(PROMPTS[0], GREEDY)
            monkeypatch.setattr(Engine, "step", fails)
            with pytest.raises(OSError, match="is gone"):
                _ = [output async for output in outputs]
            assert isinstance(engine.failure, OSError)
            with pytest.raises(RuntimeError, match="the engine failed: the device is gone"):
                await anext(served.generate(PROMPTS[1], GREEDY))

    asyncio.run(main())


def config(**options: Any) -> GenerationConfig:
    return GenerationConfig(do_sample=False, eos_token_id=-1, **options)


def test_generate_batch(model: Any, wanted: list[list[int]]) -> None:
    results = model.generate_batch(PROMPTS, config(max_new_tokens=10), record_timestamps=True)
    assert [result.generated_tokens for result in results.values()] == wanted
    assert all(result.error is None and result.is_finished() for result in results.values())
    assert [len(result.timestamps) for result in results.values()] == [10] * 3
    assert model.generate_batch([]) == {}
    penalised = config(max_new_tokens=10, repetition_penalty=1.5, no_repeat_ngram_size=2)
    ids = torch.tensor(PROMPTS[:1])
    alike = model.generate(ids, penalised, attention_mask=torch.ones_like(ids))
    (result,) = model.generate_batch(PROMPTS[:1], penalised).values()
    assert result.generated_tokens == alike[0, ids.shape[1] :].tolist()


def test_a_prompt_that_is_refused_fails_alone(model: Any, wanted: list[list[int]]) -> None:
    prompts = [PROMPTS[0], [1] * 600, PROMPTS[2]]
    first, refused, last = model.generate_batch(prompts, config(max_new_tokens=10)).values()
    assert [first.generated_tokens, last.generated_tokens] == [wanted[0], wanted[2]]
    assert "exceeds the 512 tokens" in refused.error


def test_the_manager(model: Any, wanted: list[list[int]]) -> None:
    manager = model.init_continuous_batching(config(max_new_tokens=10))
    assert not manager.is_running()
    manager.start()
    request_id = manager.add_request(PROMPTS[0], streaming=True)
    streamed = [len(r.generated_tokens) for r in manager.request_id_iter(request_id)]
    assert streamed == [*range(1, 11)]
    long = manager.add_request(PROMPTS[1], max_new_tokens=400)
    manager.cancel_request(long)
    result = manager.get_result(long, timeout=5)
    assert result.is_finished()
    assert len(result.generated_tokens) < 400
    with pytest.raises(ValueError, match="unknown option 'stop'"):
        manager.add_request(PROMPTS[0], stop="x")
    manager.add_request(PROMPTS[2], "mine", temperature=0.5)
    assert manager.background_thread_status.is_running
    assert manager.background_thread_status.can_accept_new_requests() is None
    manager.stop()
    assert "not running" in manager.background_thread_status.can_accept_new_requests()
    assert manager.get_result("mine").generated_tokens == wanted[2]  # do_sample=False
    assert manager.get_result() is None

    async def main() -> RequestOutput:
        handled, loop = asyncio.Queue(), model.init_continuous_batching(config(max_new_tokens=3))
        loop.start()
        loop.register_result_handler("a", handled.put_nowait)
        loop.add_request(PROMPTS[0], "a")
        result = await asyncio.wait_for(handled.get(), 20)
        loop.stop()
        return result

    assert asyncio.run(main()).generated_tokens == wanted[0][:3]


def test_logprobs_are_of_what_tokens_are_chosen_by(model: Any) -> None:
    options = {"do_sample": True, "temperature": 0.7, "top_k": 5, "repetition_penalty": 1.3}
    sampled = GenerationConfig(**options, eos_token_id=-1, max_new_tokens=6)
    logs = ContinuousBatchingConfig(return_logprobs=True, seed=3)
    (result,) = model.generate_batch(PROMPTS[:1], sampled, logs).values()
    prompt, answer = torch.tensor(PROMPTS[0]), torch.tensor(result.generated_tokens)
    ids = torch.cat([prompt, answer])
    processors = model._get_logits_processor(sampled, input_ids_seq_length=len(prompt))
    with torch.no_grad():
        logits = model(ids[None]).logits[0, len(prompt) - 1 : -1]
    wanted = [
        processors(ids[None, : len(prompt) + i], row[None])[0].log_softmax(-1)[answer[i]]
        for i, row in enumerate(logits)
    ]
    assert result.logprobs == pytest.approx([float(logprob) for logprob in wanted], abs=1e-3)


def test_sampled_answers_come_again_with_their_seed(model: Any) -> None:
    sampled = GenerationConfig(
        do_sample=True, num_return_sequences=3, eos_token_id=-1, max_new_tokens=8
    )

    def tokens(config: ContinuousBatchingConfig | None = None) -> list[list[int]]:
        results = model.generate_batch(PROMPTS, sampled, config)
        return [result.generated_tokens for result in results.values()]

    options = {"max_requests_per_batch": 2, "max_queue_size": 1, "allow_block_sharing": False}
    seeded = ContinuousBatchingConfig(seed=5, **options)
    assert tokens(seeded) == tokens(ContinuousBatchingConfig(seed=5))
    torch.manual_seed(7)
    first = tokens()
    torch.manual_seed(7)
    assert tokens() == first
    assert len({tuple(answer) for answer in first}) == 9


def test_no_end_of_sequence_is_no_token(model: Any, caplog: pytest.LogCaptureFixture) -> None:
    """-1 would be the vocabulary's last one, for processors that keep it from being chosen."""
    longer = config(max_new_tokens=4, min_new_tokens=4)
    manager = model.init_continuous_batching(longer)
    manager.start()
    chosen = manager.add_request(PROMPTS[0], max_new_tokens=4)
    found = manager.get_result(chosen, timeout=20)
    ends = manager.add_request(PROMPTS[0], eos_token_id=found.generated_tokens[0])
    without = manager.get_result(ends, timeout=20).generated_tokens
    manager.stop()
    assert len(without) == 4
    assert found.generated_tokens[0] not in without  # the request's own is kept from it
    assert "eos_token_id" not in caplog.text


def test_who_does_not_wait_has_all_answered(model: Any, wanted: list[list[int]]) -> None:
    options = config(max_new_tokens=10)
    with model.continuous_batching_context_manager(options, block=False) as manager:
        ids = manager.add_requests(PROMPTS)
    found = {result.request_id: result for result in iter(manager.get_result, None)}
    assert [found[request_id].generated_tokens for request_id in ids] == wanted


def test_what_was_stopped_has_failed(model: Any) -> None:
    manager = model.init_continuous_batching(config(max_new_tokens=400))
    stopped, cancelled = manager.add_requests(PROMPTS[:2])
    manager.cancel_request(cancelled)
    manager.stop(hard_stop=True)
    found = {result.request_id: result for result in iter(manager.get_result, None)}
    assert (found[cancelled].status.name, found[cancelled].error) == ("FINISHED", None)
    assert found[stopped].status.name == "FAILED"
    assert "stopped" in found[stopped].error


def test_a_manager_whose_thread_has_failed_says_so(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: Engine) -> None:
        raise OSError("the device is gone")

    manager = model.init_continuous_batching(config(max_new_tokens=10))
    first, second, third = manager.add_requests(PROMPTS)
    monkeypatch.setattr(Engine, "step", fails)
    manager.start()
    assert manager.get_result(first, timeout=20).error == "the device is gone"
    assert [result.error for result in manager.request_id_iter(third)] == ["the device is gone"]
    assert [result.request_id for result in manager] == [second]
    assert not manager.is_running()
    assert manager.get_result() is None
    assert isinstance(manager.background_thread_status.fatal_error, OSError)
    manager.stop()
