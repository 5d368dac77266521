"""The engine behind `async for`, and behind transformers' continuous batching."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from cases.tiny_models import random_tokens
from transformers import GenerationConfig

from offload import AsyncEngine, Engine, OffloadedModel, SamplingParams
from offload.engine.request import RequestOutput

GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
PROMPTS = [random_tokens(1, n, seed=n)[0].tolist() for n in (20, 90, 33)]


@pytest.fixture(scope="module")
def model(tiny_folders: dict[str, Path]) -> Any:
    return OffloadedModel.from_pretrained(tiny_folders["llama"], dtype="float32")


@pytest.fixture(scope="module")
def wanted(model: Any) -> list[list[int]]:
    return [alone(model, prompt) for prompt in PROMPTS]


def alone(model: Any, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    options = {"do_sample": False, "eos_token_id": None, "attention_mask": torch.ones_like(ids)}
    return model.generate(ids, max_new_tokens=10, **options)[0, len(prompt) :].tolist()


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
    assert manager.background_thread_status == "running"
    manager.stop()
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
