"""A session's next request reads only what is new, wherever the session was meanwhile."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cases.answers import answers_of_step
from cases.inside import allow_host_bytes
from cases.slowly import combinations
from cases.tiny_models import random_tokens

from offload import Engine, OffloadedCache, OffloadedModel, RequestOutput, SamplingParams
from offload.engine.scheduler import _LEAST
from offload.engine.session_folder import SessionFolder
from offload.engine.sessions import SessionInUseError, Sessions
from offload.engine.steps import Steps
from offload.policies.registry import make_policy
from offload.runtime.saving import read_in_parts
from offload.selection.state import PolicyStates

FEW = {"budget_tokens": 32, "sink_tokens": 4, "recent_tokens": 8}
GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
PROMPT = random_tokens(1, 90)[0].tolist()
MORE = [random_tokens(1, 25, seed=seed)[0].tolist() for seed in (1, 2, 3)]
BAD_IDS = ("", ".", "..", ".x", "../x", "a/b", "a\0b", "a b", "é", "x\n", "x" * 129, 7, b"x")


def load(folder: Path, name: str = "full", **options: Any) -> Any:
    policy = make_policy(name)
    few = {key: few for key, few in FEW.items() if key in policy.option_names()}
    policy = make_policy(name, **few)
    return OffloadedModel.from_pretrained(folder, policy=policy, dtype="float32", **options)


@pytest.fixture(autouse=True)
def whole_prompts(short_slices: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bytes come of the same slices only."""
    monkeypatch.setattr("offload.engine.scheduler._LEAST", dict.fromkeys(_LEAST, 4096))


@pytest.fixture(scope="module")
def model(tiny_folders: dict[str, Path]) -> Any:
    return load(tiny_folders["llama"])


@pytest.fixture(autouse=True)
def nothing_left(model: Any) -> Iterator[None]:
    yield
    assert model.kv_store.num_sequences == 0
    assert model.kv_store.host_bytes_used == 0


def ask(
    engine: Engine, prompt: list[int], session_id: str | None = "s", params: SamplingParams = GREEDY
) -> tuple[list[int], RequestOutput]:
    """The answer, and the last output; the session is written then."""
    engine.add_request(prompt, params, session_id=session_id)
    answer, output = list[int](), None
    while engine.has_work or engine._saves:
        for output in engine.step():
            assert output.error is None, output
            answer += [chosen.token for chosen in output.tokens]
    assert output is not None
    return answer, output


def turns_alone(model: Any, prompt: list[int]) -> list[int]:
    """The answer of `generate()` without a past."""
    options = {"do_sample": False, "max_new_tokens": 10, "eos_token_id": None}
    return model.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist()


def turns(model: Any) -> list[list[int]]:
    """Answers to a conversation that `generate()` has with one cache."""
    cache, text, found = model.new_cache(), torch.tensor([PROMPT]), []
    for more in [[], *MORE]:
        text = torch.cat([text, torch.tensor([more], dtype=text.dtype)], dim=1)
        options = {"do_sample": False, "eos_token_id": None, "max_new_tokens": 10}
        mask = torch.ones_like(text)
        answer = model.generate(text, past_key_values=cache, attention_mask=mask, **options)
        found.append(answer[0, text.shape[1] :].tolist())
        text = answer
    return found


@pytest.mark.parametrize(
    ("name", "where"),
    combinations(
        ["full", "lychee_cluster", "lfps", "quest", "tidal_decode"],
        ["memory", "disk", "another process"],
    ),
)
def test_turns_are_those_of_one_cache(
    tiny_folders: dict[str, Path], tmp_path: Path, name: str, where: str
) -> None:
    model = load(tiny_folders["llama"], name)
    wanted = turns(model)
    limit = None if where == "memory" else 0
    engine = Engine(model, sessions=Sessions(tmp_path, host_limit_bytes=limit))
    text = list(PROMPT)
    for more, answer in zip([[], *MORE], wanted, strict=True):
        if where == "another process" and more:
            engine.stop()
            model = load(tiny_folders["llama"], name)
            engine = Engine(model, sessions=Sessions(tmp_path))
        text += more
        found, output = ask(engine, text)
        assert found == answer
        assert output.num_cached == (len(text) - len(more) - 1 if more else 0)
        text += answer
    assert engine.sessions is not None
    stats = engine.sessions.stats
    assert (stats.memory_hits > 0) == (where == "memory")
    assert (stats.disk_hits > 0) == (where != "memory")
    engine.stop()
    assert model.kv_store.num_sequences == 0
    assert os.listdir(tmp_path) == ["s.safetensors"]


@pytest.mark.parametrize("name", ["quest", "lychee_cluster", "lfps"])
@pytest.mark.parametrize("first_is_exact", [True, False])
def test_some_turns_are_exact(
    tiny_folders: dict[str, Path], tmp_path: Path, name: str, first_is_exact: bool
) -> None:
    """What the policy keeps is not told of their tokens, and built when it is needed again."""
    model, exact = load(tiny_folders["llama"], name), load(tiny_folders["llama"])
    engines = [
        Engine(model, sessions=Sessions(tmp_path)),
        Engine(model, sessions=Sessions(tmp_path / "disk")),
    ]
    prompt = PROMPT
    for more, is_exact in zip(MORE, (first_is_exact, True, False), strict=True):
        params = replace(GREEDY, exact=is_exact)
        answer, other = (ask(engine, prompt, params=params)[0] for engine in engines)
        assert answer == other
        if first_is_exact:  # all that was decoded is as if it was read
            assert answer == turns_alone(exact if is_exact else model, prompt)
        prompt = [*prompt, *answer, *more]
        engines[1].stop()
        engines[1] = Engine(model, sessions=Sessions(tmp_path / "disk"))
    for engine in engines:
        engine.stop()


def test_the_same_bytes_and_one_token_after_a_restart(model: Any, tmp_path: Path) -> None:
    engine = Engine(model, sessions=Sessions(tmp_path))
    answer, _ = ask(engine, PROMPT)
    engine.stop()
    saved = (tmp_path / "s.safetensors").read_bytes()
    engine = Engine(model, sessions=Sessions(tmp_path))
    _, output = ask(
        engine, [*PROMPT, answer[0]], params=SamplingParams(temperature=0.0, max_tokens=1)
    )
    assert output.num_cached == len(PROMPT)
    engine.stop()
    engine = Engine(model, sessions=Sessions(tmp_path / "b"))
    ask(engine, PROMPT)
    engine.stop()
    assert (tmp_path / "b" / "s.safetensors").read_bytes() == saved


def test_a_prompt_that_goes_another_way_keeps_what_is_the_same(model: Any, tmp_path: Path) -> None:
    engine = Engine(model, sessions=Sessions(tmp_path), prefix_caching=False)
    sessions = engine.sessions
    assert sessions is not None
    ask(engine, PROMPT)
    other = PROMPT[:50] + MORE[0]
    wanted, _ = ask(engine, other, None)
    assert ask(engine, other)[1].num_cached == 50
    sessions.spill()
    found, output = ask(engine, other)
    assert (found, output.num_cached) == (wanted, 74)
    assert ask(engine, MORE[1])[1].num_cached == 0
    assert "shares" in sessions.stats.last_miss
    engine.stop()


def test_a_session_in_memory_of_another_text_is_one_miss(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file is read only if it is another's, and later."""
    read = list[Path]()

    def reads(*args: Any) -> Any:
        read.append(args[1])
        return read_in_parts(*args)

    monkeypatch.setattr("offload.engine.sessions.read_in_parts", reads)
    engine = Engine(model, sessions=Sessions(tmp_path / "other"), prefix_caching=False)
    ask(engine, PROMPT)
    engine.stop()
    engine = Engine(model, sessions=Sessions(tmp_path), prefix_caching=False)
    assert engine.sessions is not None
    stats = engine.sessions.stats
    ask(engine, MORE[0])
    read.clear()
    for misses, prompt in enumerate([PROMPT, MORE[1], PROMPT], 2):
        assert ask(engine, prompt)[1].num_cached == 0
        assert (stats.misses, stats.memory_hits, stats.disk_hits, read) == (misses, 0, 0, [])
        assert stats.last_miss == "s: the prompt shares 0 tokens with it"
    ask(engine, MORE[1])
    shutil.copyfile(tmp_path / "other" / "s.safetensors", tmp_path / "s.safetensors")
    assert ask(engine, PROMPT)[1].num_cached == len(PROMPT) - 1
    assert (stats.misses, stats.disk_hits, len(read)) == (5, 1, 1)
    shutil.copyfile(tmp_path / "other" / "s.safetensors", tmp_path / "s.safetensors")
    assert ask(engine, MORE[2])[1].num_cached == 0  # nor does the file serve it
    assert (stats.misses, stats.disk_hits, len(read)) == (6, 1, 2)
    engine.stop()


def test_a_new_session_is_not_told_as_a_missing_file(
    model: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine(model, sessions=Sessions(tmp_path))
    with caplog.at_level("INFO", logger="offload"):
        ask(engine, PROMPT)
    assert [each.getMessage() for each in caplog.records if "session" in each.getMessage()] == [
        "session s: a new one"
    ]
    assert engine.sessions is not None
    assert engine.sessions.stats.misses == 1
    engine.stop()


def test_damage_is_a_miss_and_the_engine_lives(model: Any, tmp_path: Path) -> None:
    engine = Engine(model, sessions=Sessions(tmp_path, 0), prefix_caching=False)
    wanted, _ = ask(engine, PROMPT)
    path = tmp_path / "s.safetensors"
    good = path.read_bytes()
    absurd = (2**62).to_bytes(8, "little") + good[8:]
    version = good.replace(b"offload-session-2", b"offload-session-1")
    damaged = good[:3000] + b"\xff" + good[3001:]
    for bad in (b"", good[:-1], good[:5], damaged, b"\xff" * 100, absurd, version):
        path.write_bytes(bad)
        answer, output = ask(engine, PROMPT)
        assert (answer, output.num_cached) == (wanted, 0)
        assert engine.sessions is not None
        assert "s.safetensors" in engine.sessions.stats.last_miss
        assert path.read_bytes() == good
    cache = OffloadedCache.load(model, path)  # a cache has the same format
    cache.save(path)
    assert ask(engine, PROMPT)[1].num_cached == 0  # but no token ids
    engine.stop()


def test_memory_and_disk_have_limits_by_last_use(model: Any, tmp_path: Path) -> None:
    engine = Engine(model, sessions=Sessions(tmp_path), prefix_caching=False)
    sessions = engine.sessions
    assert sessions is not None
    ask(engine, PROMPT, "0")
    of_one = sessions.host_bytes
    engine.stop()
    size = (tmp_path / "0.safetensors").stat().st_size
    limits = {"host_limit_bytes": 2 * of_one, "disk_limit_bytes": 3 * size + 99}
    engine = Engine(model, sessions=Sessions(tmp_path, **limits), prefix_caching=False)
    sessions = engine.sessions
    assert sessions is not None
    for session_id in "abacd":
        ask(engine, PROMPT, session_id)
        assert sessions.host_bytes <= 2 * of_one
        time.sleep(0.01)
    assert sessions.stats.memory_hits == 1
    while sessions.has_work:
        engine.step()
    assert [each.session_id for each in sessions.folder.sessions()] == ["a", "c", "d"]
    assert ask(engine, PROMPT, "b")[1].num_cached == 0
    assert ask(engine, PROMPT, "d")[1].num_cached == len(PROMPT) - 1
    engine.stop()
    small = Sessions(tmp_path / "small", disk_limit_bytes=size // 2)
    engine = Engine(model, sessions=small, prefix_caching=False)
    ask(engine, PROMPT)
    assert not small.has_work
    assert small.folder.sessions() == []
    assert ask(engine, PROMPT)[1].num_cached == len(PROMPT) - 1  # from memory
    engine.stop()


def test_idle_sessions_give_way_to_requests(model: Any, tmp_path: Path) -> None:
    engine = Engine(model, sessions=Sessions(tmp_path), prefix_caching=False)
    sessions, budget = engine.sessions, model.kv_store.host_budget_bytes
    assert sessions is not None
    model.kv_store.trim()
    allow_host_bytes(model, 3 * model.kv_store.num_page_rows * model.kv_store.page_bytes)
    try:
        for session_id in "abcd":
            ask(engine, PROMPT, session_id)
        for session_id in "abcd":
            assert ask(engine, PROMPT, session_id)[1].num_cached == len(PROMPT) - 1
        assert sessions.stats.disk_hits > 0
    finally:
        allow_host_bytes(model, budget)
        engine.stop()


def test_a_session_comes_back_while_others_decode(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(model, sessions=Sessions(tmp_path, host_limit_bytes=0), prefix_caching=False)
    wanted = ask(engine, PROMPT)[0]
    monkeypatch.setattr("offload.system.checked_file._PIECE_BYTES", 4096)
    monkeypatch.setattr("offload.engine.steps._RESTORING_SECONDS", 0.0)
    engine.add_request(PROMPT[:40], replace(GREEDY, max_tokens=400), "long")
    engine.step()
    for cancels in (True, False):
        engine.add_request(PROMPT, GREEDY, "back", session_id="s")
        lengths, answer = dict.fromkeys(("long", "back"), 0), list[int]()
        while lengths["back"] < len(wanted):
            for output in engine.step():
                lengths[output.request_id] += len(output.tokens)
                if output.request_id == "back":
                    answer += [chosen.token for chosen in output.tokens]
            if cancels and lengths["long"] == 3:
                engine.cancel("back")
                engine.step()
                assert model.kv_store.num_sequences == 1
                break
        if not cancels:
            assert lengths["long"] > 20  # a part of the file in each step
            assert answer == wanted
    engine.stop()


def test_a_session_comes_back_between_the_layers_of_a_slice(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(model, sessions=Sessions(tmp_path, host_limit_bytes=0), prefix_caching=False)
    wanted, others = ask(engine, PROMPT)[0], random_tokens(1, 450, seed=5)[0].tolist()
    alone = ask(engine, others, None)[0]
    monkeypatch.setattr("offload.system.checked_file._PIECE_BYTES", 4096)
    monkeypatch.setattr("offload.engine.steps._RESTORING_SECONDS", 0.0)
    restore, pieces = Steps._restore, list[bool]()

    def restores(self: Steps, seconds: float) -> None:
        if self.scheduler.restoring:
            pieces.append(bool(self._in_slice))
        restore(self, seconds)

    monkeypatch.setattr(Steps, "_restore", restores)
    engine.add_request(PROMPT[:40], replace(GREEDY, max_tokens=100), "decodes")
    engine.step()
    engine.add_request(others, GREEDY, "read")
    engine.add_request(PROMPT, GREEDY, "back", session_id="s")
    found: dict[str, list[int]] = {"decodes": [], "read": [], "back": []}
    while engine.has_work:
        answers_of_step(engine, found)
    assert found["back"] == wanted
    assert found["read"] == alone
    assert any(pieces)
    engine.stop()


def test_ids_cannot_leave_the_folder(model: Any, tmp_path: Path) -> None:
    folder = SessionFolder(tmp_path / "sessions")
    engine = Engine(model, sessions=Sessions(tmp_path / "sessions"))
    for bad in BAD_IDS:
        with pytest.raises(ValueError, match="session id"):
            engine.add_request(PROMPT, GREEDY, session_id=bad)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="session id"):
            folder.path(bad)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="session id"):
        folder.path(None)  # type: ignore[arg-type]
    assert not engine.has_work
    ask(engine, PROMPT, "-A_z.9" + 122 * "x")
    ask(engine, PROMPT, None)
    engine.stop()
    assert len(folder.sessions()) == 1
    with pytest.raises(ValueError, match="needs Engine"):
        Engine(model).add_request(PROMPT, GREEDY, session_id="s")


def test_a_session_has_one_request_at_a_time(model: Any, tmp_path: Path) -> None:
    engine = Engine(model, sessions=Sessions(tmp_path), slice_seconds=1e-4)
    request_id = engine.add_request(PROMPT, GREEDY, session_id="s")
    engine.step()
    with pytest.raises(SessionInUseError, match="has a request"):
        engine.add_request(PROMPT, GREEDY, session_id="s")
    engine.cancel(request_id)
    while engine.has_work:
        engine.step()
    assert 0 < ask(engine, PROMPT)[1].num_cached < len(PROMPT)  # what was read is kept
    engine.stop()


KILLED = """
import sys, os, signal, time
from offload import Engine, OffloadedModel, SamplingParams
from offload.engine.sessions import Sessions
model = OffloadedModel.from_pretrained(sys.argv[1], policy="full", dtype="float32")
with Engine(model, sessions=Sessions(sys.argv[2])) as engine:
    params = SamplingParams(temperature=0, max_tokens=5)
    engine.add_request(list(range(100)), params, session_id="s")
    while not os.path.exists(os.path.join(sys.argv[2], "s.safetensors")):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_it_outlives_kill_9(tiny_folders: dict[str, Path], model: Any, tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(tiny_folders["llama"]), str(tmp_path)]
    assert subprocess.run(command, timeout=120, check=False).returncode == -9
    (tmp_path / ".t.safetensors.1.tmp").write_bytes(b"half")
    os.utime(tmp_path / ".t.safetensors.1.tmp", (0, 0))
    engine = Engine(model, sessions=Sessions(tmp_path))
    assert ask(engine, [*range(100)])[1].num_cached == 99
    engine.stop()
    assert os.listdir(tmp_path) == ["s.safetensors"]


def test_few_new_tokens_build_nothing_anew(
    tiny_folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a policy keeps of a long session takes them in; after many it is built again."""
    built = list[int]()
    install = PolicyStates.install

    def counted(self: Any, seq: int, layers: Any, kv_len: int, *more: Any) -> Any:
        built.append(kv_len)
        return install(self, seq, layers, kv_len, *more)

    monkeypatch.setattr(PolicyStates, "install", counted)
    model = load(tiny_folders["llama"], "sketch")
    engine = Engine(model, sessions=Sessions(tmp_path))
    text = random_tokens(1, 300)[0].tolist()
    for num_new, builds in ((0, True), (10, False), (7, False), (30, True), (10, False)):
        text += random_tokens(1, num_new, seed=num_new)[0].tolist()
        built.clear()
        answer, output = ask(engine, text)
        assert output.num_cached == (len(text) - num_new - 1 if num_new else 0)
        assert bool(built) is builds
        assert answer == turns_alone(model, text)  # which builds
        text += answer
    engine.stop()
