"""`perf.comparison` starts a server, asks it, counts its memory, and kills it beyond a limit."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from cases.tiny_models import byte_tokenizer, make_tiny_model
from transformers import AutoModelForCausalLM

from offload.loading.embedded_package import embedded_gguf
from offload.models.shape import MODEL_SHAPES
from perf import comparison
from perf.baselines import servers
from perf.baselines.random_checkpoint import write_checkpoint
from perf.comparison import Limit, Scenario, Texts, measure
from perf.tables.comparison_table import limit_table, many_table, one_client_table

TALK = Scenario("conversations", 96, 8, clients=2, turns=2)


@pytest.fixture(scope="module")
def texts() -> Texts:
    return Texts()


@pytest.fixture
def offload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> servers.Peer:
    """Our server of a tiny model."""
    make_tiny_model("llama", max_position_embeddings=4096).save_pretrained(tmp_path / "tiny")
    byte_tokenizer().save_pretrained(tmp_path / "tiny")
    monkeypatch.setattr(servers, "_model", lambda: str(tmp_path / "tiny"))
    return servers._as_offload("offload", "--policy", "full", model=servers._model)


@pytest.mark.slow
def test_a_run(offload: servers.Peer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "PEERS", (offload,))
    monkeypatch.setattr(comparison, "QUICK_SCENARIOS", [Scenario("one client", 64, 8), TALK])
    given = f"--quick --threads 1 --output {tmp_path} --commit none"
    comparison.main(given.split())
    result: Any = json.loads((tmp_path / "comparison.json").read_text("utf-8"))
    free = [row for row in result["rows"] if row["limit_bytes"] is None]
    assert [(row["outcome"], row["answered"]) for row in free] == [("answers", 1), ("answers", 4)]
    assert all(row["peak_rss_bytes"] >= row["peak_pss_bytes"] > 2**26 for row in free)
    limited = [row for row in result["rows"] if row["limit_bytes"] is not None]
    assert [row["told_bytes"] is not None for row in limited] == [True, True]
    assert "| offload |" in one_client_table(result)
    assert "| offload | 2 x 96 |" in many_table(result)
    assert "conversations, 96" in limit_table(result)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("raise SystemExit('error: 7 GiB are not enough')", "error: 7 GiB are not enough"),
        ("import time; held = b'x' * 2**27; time.sleep(60)", "killed: it held more than the limit"),
    ],
)
def test_a_server_that_does_not_start_says_why(texts: Texts, code: str, said: str) -> None:
    peer = servers.Peer("peer", lambda _: [sys.executable, "-c", code], "offload")
    limit = Limit(bytes=2**26, besides_bytes=0)
    row = measure(peer, TALK, texts, place=0, threads=1, limit=limit)
    assert (row["outcome"], row["said"]) == ("does not start", said)
    assert row["told_bytes"] is None


def test_what_is_left_is_told(offload: servers.Peer) -> None:
    row = {"idle_private_bytes": 500 << 20, "peak_private_bytes": 1000 << 20}
    limit = Limit.of(row, weights_bytes=200 << 20)
    assert limit.bytes == 600 << 20
    assert limit.told(offload) == 300 << 20


def test_servers_share_out_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a checkpoint with random weights, which `transformers` reads."""
    tiny = replace(MODEL_SHAPES["llama-3.2-1b"], num_layers=2, hidden_size=64, intermediate_size=64)
    monkeypatch.setitem(MODEL_SHAPES, "tiny", replace(tiny, num_qo_heads=4, num_kv_heads=2))
    byte_tokenizer().save_pretrained(tmp_path)
    write_checkpoint("tiny", tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.dtype == torch.bfloat16
    assert model.config.vocab_size == len(byte_tokenizer())
    monkeypatch.setattr(servers, "_chosen_model", [])
    servers.use_model(str(tmp_path))
    monkeypatch.setattr(servers, "gpu_memory", lambda what: 96 << 30)
    given = {"port": 1, "threads": 2, "context": 2**20, "folder": tmp_path, "gpu_bytes": 24 << 30}
    setting = servers.Setting(**given, sequences=2, kept=3)
    assert setting.kv_bytes == 3 * 2**20 * 2 * 2 * 2 * 64 * 2
    ours, vllm = (" ".join(x.command(setting)) for x in servers.named(["offload, auto", "vLLM"]))
    assert "--device cuda --max-memory 0=24576MiB --session-memory 3840MiB" in ours
    assert "--gpu-memory-utilization 0.2500 --kv-offloading-size 3" in vllm
    others = [peer.name for peer in servers.PEERS if not peer.reads_folder]
    assert len(others) == 5
    assert all("llama.cpp" in name or "Q4_1" in name for name in others)


@pytest.mark.slow
def test_the_gguf_has_the_folders_weights(tmp_path: Path) -> None:
    """As the embedded file and its converted folder show: the same rows, in llama.cpp's order."""
    from offload.loading.gguf import converted_folder
    from offload.loading.gguf_header import read_gguf_header
    from perf.baselines.long_gguf import long_gguf

    folder = tmp_path / "long"
    folder.mkdir()
    source = converted_folder(embedded_gguf())
    (folder / "model.safetensors").symlink_to(source / "model.safetensors")
    config = json.loads((source / "config.json").read_text("utf-8"))
    config["rope_parameters"] |= {"factor": 4.0, "original_max_position_embeddings": 8192}
    (folder / "config.json").write_text(json.dumps(config))
    written = read_gguf_header(long_gguf(folder, tmp_path / "long.gguf"))
    source_header = read_gguf_header(embedded_gguf())
    assert written.tensors.keys() == source_header.tensors.keys()
    for name in ("blk.3.attn_q.weight", "blk.3.attn_k.weight", "blk.0.ffn_down.weight"):
        difference = abs(written.float32(name) - source_header.float32(name)).max()
        assert difference <= 2**-8 * abs(source_header.float32(name)).max()
    assert written.metadata["llama.rope.scaling.factor"] == 4.0
    assert gguf.GGUFReader(tmp_path / "long.gguf").tensors[0].n_elements > 0
