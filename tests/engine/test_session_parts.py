"""A long session's turn writes what is new: parts stay as they are, and any trouble is a miss."""

from __future__ import annotations

import errno
import itertools
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cases.tiny_models import random_tokens
from engine.test_sessions import GREEDY, MORE, PROMPT, ask, load, turns
from typer.testing import CliRunner

from offload import Engine, OffloadedCache, SessionMiss
from offload.cli import app
from offload.engine.scheduler import _LEAST
from offload.engine.session_folder import SessionFolder
from offload.engine.sessions import Sessions
from offload.runtime.saving import read_in_parts, session_files
from offload.system.checked_file import CheckedReader

LONG = random_tokens(1, 300)[0].tolist()
SHORT = replace(GREEDY, max_tokens=3)


@pytest.fixture(autouse=True)
def short_parts(short_slices: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of a few tokens."""
    monkeypatch.setattr("offload.engine.scheduler._LEAST", dict.fromkeys(_LEAST, 4096))
    monkeypatch.setattr("offload.runtime.saving._LEAST_PART_BYTES", 16 * 2048)


@pytest.fixture(scope="module")
def model(tiny_folders: dict[str, Path]) -> Any:
    return load(tiny_folders["llama"])


@pytest.fixture(autouse=True)
def nothing_left(model: Any) -> Iterator[None]:
    yield
    assert model.kv_store.num_sequences == 0
    assert not model._offload.sequences.on_disk._noted


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.part"))


def start(model: Any, folder: Path, **options: Any) -> Engine:
    return Engine(model, sessions=Sessions(folder, **options), prefix_caching=False)


def conversation(model: Any, folder: Path) -> tuple[Engine, list[int]]:
    """An engine with a session of three turns, and all its text."""
    engine, text = start(model, folder), list(LONG)
    for more in MORE:
        text += ask(engine, text)[0] + more
    text += ask(engine, text)[0]
    return engine, text


@pytest.mark.parametrize("name", ["full", "lychee_cluster", "quest", "tidal_decode"])
@pytest.mark.parametrize("where", ["memory", "disk"])
def test_turns_are_those_of_one_cache(
    tiny_folders: dict[str, Path], tmp_path: Path, name: str, where: str
) -> None:
    model = load(tiny_folders["llama"], name)
    wanted, text = turns(model), list(PROMPT)
    engine = start(model, tmp_path, host_limit_bytes=None if where == "memory" else 0)
    found = list[list[str]]()
    for more, answer in zip([[], *MORE], wanted, strict=True):
        text += more
        assert ask(engine, text)[0] == answer
        text += answer
        found.append(names(tmp_path))
    assert len(found[-1]) > 1
    assert all({*old} <= {*new} for old, new in itertools.pairwise(found))
    engine.stop()


def test_corrected_tokens_are_written_anew(tiny_folders: dict[str, Path], tmp_path: Path) -> None:
    """Those that waited, or were corrected while they were in a part, are read as they are now."""
    options = {"cache_correction_every": 8}
    model = load(tiny_folders["llama"], "quest", **options)
    engines = [start(model, tmp_path / "a"), start(model, tmp_path / "b", host_limit_bytes=0)]
    text = list(PROMPT)
    for more in MORE:
        answers = [
            ask(engine, text, params=replace(GREEDY, max_tokens=13))[0] for engine in engines
        ]
        assert answers[0] == answers[1]
        text += answers[0] + more
    for engine in engines:
        engine.stop()
    for folder in ("a", "b"):
        assert len(names(tmp_path / folder)) > 1
    files = [tmp_path / folder / "whole" for folder in ("a", "b")]
    for file in files:
        SessionFolder(file.parent).export("s", file)
    first, second = (CheckedReader(file) for file in files)
    assert all(first.read(name).tolist() == second.read(name).tolist() for name in first.tensors)
    first.close()
    second.close()


def test_windows_are_in_the_file_and_other_layers_in_parts(
    tiny_folders: dict[str, Path], tmp_path: Path
) -> None:
    model = load(tiny_folders["gemma3_text"], page_tokens=16)
    engines = [start(model, tmp_path / "a"), start(model, tmp_path / "b", host_limit_bytes=0)]
    text = list(LONG)
    for more in MORE:
        answers = [ask(engine, text)[0] for engine in engines]
        assert answers[0] == answers[1]
        text += answers[0] + more
    assert names(tmp_path / "b")
    assert model.kv_store.has_window(0)
    with CheckedReader(tmp_path / "b" / names(tmp_path / "b")[0]) as reader:
        assert 0 < len(reader.tensors) < model.kv_store.num_layers
        assert "0.kv.0" not in reader.tensors
    for engine in engines:
        engine.stop()


def test_a_turn_writes_a_small_part(model: Any, tmp_path: Path) -> None:
    engine, text = start(model, tmp_path), list(LONG)
    sizes, before = list[int](), dict[str, int]()
    for _ in range(12):
        text += ask(engine, text, params=SHORT)[0] + MORE[0][:1]
        now = {path.name: path.stat().st_ino for path in tmp_path.iterdir()}
        new = [name for name in now if now[name] != before.get(name)]
        sizes.append(sum((tmp_path / name).stat().st_size for name in new))
        before = now
    (saved,) = engine.sessions.folder.sessions()  # type: ignore[union-attr]
    assert saved.num_bytes == sum(path.stat().st_size for path in tmp_path.iterdir())
    assert max(sizes[1:]) < sizes[0] / 5
    assert 2 <= len(names(tmp_path)) <= 6  # of 16 tokens or more
    engine.stop()
    engine = start(model, tmp_path)
    found, output = ask(engine, text)
    assert output.num_cached == len(text) - 2
    assert ask(engine, text, None)[0] == found
    engine.stop()


def test_a_cut_keeps_what_is_before_it(model: Any, tmp_path: Path) -> None:
    engine, text = conversation(model, tmp_path)
    before = names(tmp_path)
    with CheckedReader(tmp_path / "s.safetensors") as reader:
        used = [part["name"] for part in json.loads(reader.metadata["parts"])]
    assert sorted(used) == before
    for length, num_kept in ((len(text) - 2, len(used)), (200, 1), (60, 0)):
        prompt = text[:length] + MORE[2]
        found, output = ask(engine, prompt)
        assert output.num_cached == length
        assert [name for name in used if name in names(tmp_path)] == used[:num_kept]
        engine.stop()
        engine = start(model, tmp_path)
        assert ask(engine, prompt)[0] == found == ask(engine, prompt, None)[0]
        assert engine.sessions is not None
        assert engine.sessions.stats.disk_hits == 1
    engine.stop()


@pytest.mark.parametrize("trouble", ["gone", "flipped", "another", "truncated"])
def test_a_bad_part_is_a_miss(model: Any, tmp_path: Path, trouble: str) -> None:
    engine, text = conversation(model, tmp_path)
    engine.stop()
    first, second, *_ = (tmp_path / name for name in names(tmp_path))
    good = first.read_bytes()
    if trouble == "gone":
        first.unlink()
    elif trouble == "another":
        first.write_bytes(second.read_bytes())
    else:
        flipped = good[:-900] + bytes([good[-900] ^ 1]) + good[-899:]
        first.write_bytes(flipped if trouble == "flipped" else good[:-1])
    with pytest.raises(SessionMiss, match=first.name):
        OffloadedCache.load(model, tmp_path / "s.safetensors")
    with pytest.raises(SessionMiss, match=first.name):
        SessionFolder(tmp_path).export("s", tmp_path / "whole")
    assert not (tmp_path / "whole").exists()
    engine = start(model, tmp_path)
    found, output = ask(engine, text)
    assert output.num_cached == 0
    assert engine.sessions is not None
    assert first.name in engine.sessions.stats.last_miss
    engine.stop()
    engine = start(model, tmp_path)
    assert ask(engine, text)[0] == found
    assert engine.sessions.stats.disk_hits == 1  # type: ignore[union-attr]
    assert first not in tmp_path.iterdir()
    engine.stop()


def test_a_file_that_is_replaced_meanwhile_is_read_again(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, text = conversation(model, tmp_path / "new")
    wanted = ask(engine, text)[0]
    engine.stop()
    engine, _ = conversation(model, tmp_path)
    engine.stop()
    from offload.runtime import saving

    part_reader, calls = saving._part_reader, list[str]()

    def replaces(path: Path, part: Any) -> CheckedReader:
        calls.append(part.name)
        if len(calls) == 2:
            for name in names(tmp_path):
                (tmp_path / name).unlink()
            for new in (tmp_path / "new").iterdir():
                os.replace(new, tmp_path / new.name)
        return part_reader(path, part)

    monkeypatch.setattr(saving, "_part_reader", replaces)
    engine = start(model, tmp_path)
    assert ask(engine, text)[0] == wanted
    assert engine.sessions.stats.disk_hits == 1  # type: ignore[union-attr]
    engine.stop()


@pytest.mark.parametrize("steps", [0, 1, 3, 5, 7])
def test_writing_that_is_given_up_leaves_the_session(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    monkeypatch.setattr("offload.system.checked_file._PIECE_BYTES", 1 << 15)
    engine, text = conversation(model, tmp_path)
    sessions = engine.sessions
    assert sessions is not None
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    (session,) = sessions._in_memory.values()
    folder, sequences = sessions.folder, model._offload.sequences
    kept = folder.part_names("s")[:1]
    more = session_files(sequences, session.seq, session.tokens, "s", kept, sessions._fingerprint)
    assert more.new is not None
    writing = folder.write("s", more)
    for _ in range(steps):
        next(writing)
    writing.close()  # type: ignore[attr-defined]
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    engine.stop()
    engine = start(model, tmp_path)
    assert ask(engine, [*text, 1])[1].num_cached == len(text) - 1
    engine.stop()


def test_what_nobody_names_goes(model: Any, tmp_path: Path) -> None:
    engine, _ = conversation(model, tmp_path)
    engine.stop()
    named = names(tmp_path)
    orphans = [f"{of}.0123456789abcdef.part" for of in ("s", "gone", "s.t")]
    aside = f".{orphans[0]}.1-2.tmp"
    kept = [f"s.{'f' * 16}.part", "notes.part"]  # a young one, and another's
    for name in [*orphans, aside, *kept, *named]:
        with (tmp_path / name).open("ab"):
            pass
        if name != kept[0]:
            os.utime(tmp_path / name, (0, 0))
    folder = SessionFolder(tmp_path)
    assert names(tmp_path) == sorted([*named, *kept])
    assert not (tmp_path / aside).exists()
    good = (tmp_path / "s.safetensors").read_bytes()
    (tmp_path / "s.safetensors").write_bytes(b"of another version, perhaps")
    SessionFolder(tmp_path)
    assert names(tmp_path) == sorted([*named, *kept])
    (tmp_path / "s.safetensors").write_bytes(good)
    folder.remove("s")
    assert os.listdir(tmp_path) == ["notes.part"]


def test_what_is_left_of_a_session_goes_with_it(model: Any, tmp_path: Path) -> None:
    """As when a process was killed between its file and its parts."""
    engine, _ = conversation(model, tmp_path)
    engine.stop()
    (tmp_path / "s.safetensors").unlink()
    assert names(tmp_path)
    with pytest.raises(FileNotFoundError, match="no session 's'"):
        SessionFolder(tmp_path).remove("s")
    assert names(tmp_path) == []


def test_a_file_whose_name_is_too_long_for_a_part(tmp_path: Path) -> None:
    other = tmp_path / f"{'x' * 150}.0123456789abcdef.part"
    other.touch()
    os.utime(other, (0, 0))
    assert SessionFolder(tmp_path).sessions() == []
    assert other.exists()


def test_a_part_that_cannot_be_looked_at(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a network's disk that is away for a moment: the engine goes on."""
    monkeypatch.setattr("offload.engine.sessions._RETRY_SECONDS", 0.0)
    engine, text = conversation(model, tmp_path)
    stat = os.stat

    def fails(path: Any, *args: Any, **options: Any) -> os.stat_result:
        if str(path).endswith(".part"):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return stat(path, *args, **options)

    sessions = engine.sessions
    assert sessions is not None
    (session,) = sessions._in_memory.values()
    session.is_saved = False
    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", fails)
        for _ in range(20):
            sessions.work(0.01)
    engine.stop()
    engine = start(model, tmp_path)
    assert ask(engine, [*text, 1])[1].num_cached == len(text) - 1
    engine.stop()


def test_two_engines_of_one_folder(tiny_folders: dict[str, Path], tmp_path: Path) -> None:
    """Each has the session in memory, and the other's parts are not there any more."""
    models = [load(tiny_folders["llama"]) for _ in range(2)]
    engines, text = [start(model, tmp_path) for model in models], list(LONG)
    for turn, more in enumerate([*MORE, *MORE]):
        found = ask(engines[turn % 2], text)[0]
        assert len(SessionFolder(tmp_path).part_names("s")) == len(names(tmp_path))
        if turn == 3:
            text = text[:250]
            continue
        text += found + more
    for engine in engines:
        engine.stop()
    engine = start(models[0], tmp_path)
    assert ask(engine, text)[0] == ask(engine, text, None)[0]
    assert engine.sessions.stats.disk_hits == 1  # type: ignore[union-attr]
    engine.stop()


def test_a_part_that_others_remove_is_written_again(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offload.engine.sessions._RETRY_SECONDS", 0.0)
    monkeypatch.setattr("offload.system.checked_file._PIECE_BYTES", 1 << 13)
    engine, text = conversation(model, tmp_path)
    sessions = engine.sessions
    assert sessions is not None
    (session,) = sessions._in_memory.values()
    session.is_saved = False
    sessions._write_some("s", session)
    SessionFolder(tmp_path).remove("s")
    while sessions.has_work:
        sessions.work(1.0)
    assert len(sessions.folder.part_names("s")) == len(names(tmp_path)) == 1
    engine.stop()
    engine = start(model, tmp_path)
    assert ask(engine, [*text, 1])[1].num_cached == len(text) - 1
    engine.stop()


def test_a_limit_counts_parts_and_takes_whole_sessions(model: Any, tmp_path: Path) -> None:
    engine = start(model, tmp_path)
    ask(engine, LONG, "a")
    sessions = engine.sessions
    assert sessions is not None
    (saved,) = sessions.folder.sessions()
    assert saved.num_bytes > 1.5 * (tmp_path / "a.safetensors").stat().st_size
    folder = SessionFolder(tmp_path, limit_bytes=int(2.5 * saved.num_bytes))
    sessions.folder = folder
    for session_id in "bc":
        ask(engine, LONG, session_id)
    assert [each.session_id for each in folder.sessions()] == ["b", "c"]
    assert [name[0] for name in names(tmp_path)] == ["b", "c"]
    sessions.folder = SessionFolder(tmp_path, limit_bytes=saved.num_bytes // 2)
    ask(engine, LONG, "d")
    assert [name[0] for name in names(tmp_path)] == ["b", "c"]
    engine.stop()


def test_room_is_made_in_one_look_at_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, looks = SessionFolder(tmp_path, limit_bytes=100), list[str]()
    for session_id in "abcd":
        (tmp_path / f"{session_id}.safetensors").write_bytes(b"x" * 10)
        (tmp_path / f"{session_id}.0123456789abcdef.part").write_bytes(b"x" * 15)
        folder.touch(session_id)
    glob = Path.glob

    def counted(path: Path, pattern: str) -> Any:
        looks.append(pattern)
        return glob(path, pattern)

    monkeypatch.setattr(Path, "glob", counted)
    folder._make_room("e", 60)
    assert len(looks) == 1
    assert sorted(os.listdir(tmp_path)) == ["d.0123456789abcdef.part", "d.safetensors"]


def test_a_session_that_comes_back_is_not_the_next_to_go(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start(model, tmp_path)
    text = LONG + ask(engine, LONG, "a")[0]
    ask(engine, LONG, "b")
    engine.stop()
    engine = start(model, tmp_path)
    assert engine.sessions is not None
    folder, latest = engine.sessions.folder, list[str]()
    assert [each.session_id for each in folder.sessions()] == ["a", "b"]

    def watched(*args: Any) -> Any:
        latest.append(folder.sessions()[-1].session_id)
        return (yield from read_in_parts(*args))

    monkeypatch.setattr("offload.engine.sessions.read_in_parts", watched)
    assert ask(engine, text, "a")[1].num_cached == len(text) - 1
    assert latest == ["a"]
    engine.stop()


def test_list_export_import_rm(model: Any, tmp_path: Path) -> None:
    engine, text = conversation(model, tmp_path / "parts")
    engine.stop()

    def run(*args: object) -> str:
        result = CliRunner().invoke(app, ["sessions", *map(str, args)])
        assert result.exit_code == 0, result.output
        return result.output

    folder, copy = tmp_path / "parts", tmp_path / "copy"
    run("export", folder, "s", copy)
    (listed,) = json.loads(run("list", folder, "--json"))["sessions"]
    assert listed["tokens"] == len(text) - 1
    assert listed["bytes"] == sum(path.stat().st_size for path in folder.iterdir())
    run("import", folder, copy, "t")
    run("import", folder, folder / "s.safetensors", "u")
    assert (folder / "t.safetensors").read_bytes() == copy.read_bytes()
    assert (folder / "u.safetensors").read_bytes() == copy.read_bytes()
    assert all(name.startswith("s.") for name in names(folder))
    caches = [OffloadedCache.load(model, path) for path in (copy, folder / "s.safetensors")]
    for number, cache in enumerate(caches):  # a cache of parts is saved as one file
        cache.save(tmp_path / f"cache{number}")
    assert (tmp_path / "cache0").read_bytes() == (tmp_path / "cache1").read_bytes()
    logits = [model(torch.tensor([[7]]), past_key_values=cache).logits for cache in caches]
    assert torch.equal(*logits)
    del cache, caches
    model._offload.sequences.collect()
    run("import", folder, copy, "s")
    assert names(folder) == []
    engine = start(model, folder)
    for session_id in "stu":
        assert ask(engine, [*text, 1], session_id)[1].num_cached == len(text) - 1
    engine.stop()
    assert len({name[0] for name in names(folder)}) == 3
    run("rm", folder, "s", "t", "u")
    assert os.listdir(folder) == []
