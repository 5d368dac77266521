"""One GPU against two: `python -m perf.bench_tp --grow-memory 56GiB` on a host with two.

The same batch decodes on one GPU with half of the CPUs, then split over two GPUs with all of them:
a model of known shape with random weights, and caches that are made, not prefilled. Beside that:
the time of an all-reduce in a graph, and whether a small float32 model chooses the same tokens.
`--device cpu --shape tiny --kv-len 1500 --steps 8` runs it with gloo, for tests.
"""

from __future__ import annotations

import argparse
import itertools
import json
import mmap
import os
import sys
import tempfile
import time
from contextlib import closing, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cpu_ops.worker_pool import WorkerPool
from offload.bench.decode.models import lean_model, release, synchronize
from offload.bench.made.model_cache import structured_model_cache
from offload.bench.made.random_model import random_model
from offload.bench.pipeline.device_session import DecoderSession
from offload.bench.pipeline.measure import measure_pipeline
from offload.decode.gpu.decoder import DeviceDecoder
from offload.models.rank_part import keep_own_weights, rank_view
from offload.models.shape import MODEL_SHAPES
from offload.policies import Policy
from offload.policies.registry import make_policy
from offload.ranks.group import TensorParallel, connect
from offload.ranks.launch import is_rank, run_ranks
from offload.runtime.opening import rank_policy
from offload.system.memory import available_cpus, parse_size, worker_threads
from perf.results_file import Run, script_options
from perf.tables.placement_tables import gpu_tp_table, same_tokens, two_gpu_ratios

COMMAND = (sys.executable, "-m", "perf.bench_tp")
TOKEN_POLICIES = ("full", "exact_topk", "lychee_decode")
NEW_TOKENS = 48


def main(arguments: list[str] | None = None) -> int:
    """All parts, or what one rank does of them; 1 if the tokens differ."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = _parser().parse_args(arguments)
    if is_rank():
        _run_rank(options)
        return 0
    run = Run(options)
    _grow_memory(parse_size(options.grow_memory))
    with tempfile.TemporaryDirectory() as folder:
        _save_small_model(Path(folder) / "model")
        of_size = {}
        for world_size in (1, 2):
            _start_ranks(world_size, [*arguments, "--work", folder])
            of_size[world_size] = json.loads((Path(folder) / f"{world_size}.json").read_text())
            run.say(f"{world_size} rank(s) done")
    rows = [row for part in of_size.values() for row in part["decode"]]
    rows += [
        {"part": "ratio", "policy": policy, "ratio": ratio}
        for policy, ratio in two_gpu_ratios({"rows": rows}).items()
    ]
    rows += of_size[2]["all_reduce"]
    rows += [
        {"part": "tokens", "policy": policy, "equal": tokens == of_size[2]["tokens"][policy]}
        for policy, tokens in of_size[1]["tokens"].items()
    ]
    settings = {name: value for name, value in vars(options).items() if name != "output"}
    result = run.write(settings, rows)
    print(gpu_tp_table(result))
    return 0 if all(same_tokens(result)) else 1


def _start_ranks(world_size: int, arguments: list[str]) -> None:
    """One rank gets half of the CPUs, as each of two does."""
    allowed = sorted(os.sched_getaffinity(0))
    try:
        if world_size == 1:
            os.sched_setaffinity(0, allowed[: max(1, len(allowed) // 2)])
        code = run_ranks(world_size, arguments, command=COMMAND)
    finally:
        os.sched_setaffinity(0, allowed)
    if code:
        raise SystemExit(code)


def _run_rank(options: argparse.Namespace) -> None:
    """Everything that one rank of one size does; rank 0 writes the figures."""
    world_size = int(os.environ["WORLD_SIZE"])
    ranks = connect(world_size, options.device)
    with nullcontext() if ranks is None else ranks.together():
        result = {
            "tokens": _tokens(options, world_size),
            "all_reduce": [] if ranks is None else _all_reduce_rows(options, ranks),
            "decode": _decode_rows(options, ranks),
        }
    if os.environ["RANK"] == "0":
        path = Path(options.work) / f"{world_size}.json"
        path.write_text(json.dumps(result), encoding="utf-8")


def _decode_rows(options: argparse.Namespace, ranks: TensorParallel | None) -> list[dict[str, Any]]:
    """Tokens/s of the batch under each policy, in one part and in two."""
    rank, world_size = (0, 1) if ranks is None else (ranks.rank, ranks.world_size)
    device, whole_shape = _device(options, rank), MODEL_SHAPES[options.shape]
    is_cuda = device.type == "cuda"
    dtype = torch.bfloat16 if is_cuda else torch.float32
    stock = random_model(whole_shape, device=device, dtype=dtype)
    whole = lean_model(stock)
    policies = [_policy(name) for name in options.policies]
    if ranks is not None:
        keep_own_weights(whole, ranks)
        policies = [rank_policy(policy, ranks, whole_shape) for policy in policies]
    lean = rank_view(whole, ranks)
    release(device)
    with closing(WorkerPool(available_cpus())) as pool:
        cache = structured_model_cache(
            lean.shape,
            kv_len=options.kv_len,
            num_steps=options.steps,
            rotary_emb=stock.model.rotary_emb,
            device=device,
            dtype=dtype,
            pool=pool,
            policies=policies,
            batch_size=options.batch_size,
            distinct_layers=options.distinct_layers,
            seed=1000 * rank,
        )
    rows = []
    for policy, parts in itertools.product(policies, options.parts):
        decoder = DeviceDecoder(
            lean,
            cache.store,
            policy,
            device=device,
            backend="graph" if is_cuda else "inline",
            num_threads=worker_threads(None, with_gpu=is_cuda),
            num_parts=parts,
            deadline_seconds=30.0,
        )
        with closing(DecoderSession(decoder, cache)) as session:
            session.rewind()
            measured, _ = measure_pipeline(session, repeats=options.repeats, traced_steps=0)
        rows.append(
            {
                "part": "decode",
                "world_size": world_size,
                "policy": policy.name,
                "kv_len": options.kv_len,
                "num_parts": parts,
                "cpus_of_rank": available_cpus(),
                "weight_bytes_of_rank": sum(weight.nbytes for weight in stock.parameters()),
                **asdict(measured),
            }
        )
        if rank == 0:
            name = f"{world_size} rank(s), {policy.name}, {parts} part(s)"
            print(f"{name}: {measured.milliseconds:.2f} ms", flush=True)
    cache.close()
    return rows


def _all_reduce_rows(options: argparse.Namespace, ranks: TensorParallel) -> list[dict[str, Any]]:
    """Microseconds of an all-reduce, in a graph of as many as a step has."""
    shape, device = MODEL_SHAPES[options.shape], _device(options, ranks.rank)
    rows = []
    for x in (
        torch.zeros(1, shape.hidden_size, device=device),
        torch.zeros(options.batch_size, shape.hidden_size, dtype=torch.bfloat16, device=device),
    ):
        seconds = _all_reduce_seconds(x, ranks, 2 * shape.num_layers)
        rows.append({"part": "all_reduce", "bytes": x.nbytes, "microseconds": 1e6 * seconds})
    return rows


def _all_reduce_seconds(x: Tensor, ranks: TensorParallel, count: int) -> float:
    """Median over replays."""

    def reduce_all() -> None:
        for _ in range(count):
            ranks.all_reduce(x)

    run = reduce_all
    if x.is_cuda:
        reduce_all()
        synchronize(x.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            reduce_all()
        run = graph.replay
    times = []
    for _ in range(20 if x.is_cuda else 1):
        start = time.perf_counter()
        run()
        synchronize(x.device)
        times.append((time.perf_counter() - start) / count)
    return float(np.median(times))


@torch.inference_mode()
def _tokens(options: argparse.Namespace, world_size: int) -> dict[str, list[list[int]]]:
    """Greedy tokens of the small model under some policies: two prompts, one of them padded."""
    from offload import OffloadedModel

    prompt = torch.randint(0, 500, (2, 300), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(prompt)
    mask[1, :120] = 0
    found = {}
    for name in TOKEN_POLICIES:
        sizes = {} if name == "full" else {"budget_tokens": 96, "recent_tokens": 16}
        model = OffloadedModel.from_pretrained(
            Path(options.work) / "model",
            policy=make_policy(name, **sizes),
            dtype="float32",
            device=options.device,
            tensor_parallel_size=world_size,
        )
        out = model.generate(
            prompt.to(model.device),
            attention_mask=mask.to(model.device),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            eos_token_id=None,
        )
        found[name] = out[:, prompt.shape[1] :].tolist()
    return found


def _save_small_model(folder: Path) -> None:
    """A random llama whose attention and logits are peaked, and a tokenizer to calibrate with."""
    stock = random_model(
        replace(MODEL_SHAPES["tiny"], num_qo_heads=8, num_kv_heads=4),
        device=torch.device("cpu"),
        dtype=torch.float32,
    )
    generator = torch.Generator().manual_seed(1)
    for name, weight in stock.named_parameters():
        if "norm" not in name:
            weight.normal_(0.0, 0.15, generator=generator)
    stock.save_pretrained(folder)
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={s: i for i, s in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast: Any = PreTrainedTokenizerFast  # its constructor is untyped
    fast(tokenizer_object=backend).save_pretrained(folder)


def _policy(name: str) -> Policy:
    options = {"budget_tokens": 1024} if name == "lychee_cluster" else {}
    return make_policy(name, **options)


def _device(options: argparse.Namespace, rank: int) -> torch.device:
    return torch.device("cuda", rank) if options.device == "cuda" else torch.device("cpu")


def _grow_memory(num_bytes: int) -> None:
    """Touch and give back so much memory: some virtual machines show only what was once used."""
    if not num_bytes:
        return
    with mmap.mmap(-1, num_bytes) as memory:
        pages = np.frombuffer(memory, np.uint8)[:: mmap.PAGESIZE]
        pages[:] = 1
        del pages


def _parser() -> argparse.ArgumentParser:
    parser = script_options(__doc__, "gpu-tp")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--shape", choices=list(MODEL_SHAPES), default="llama-3.1-8b")
    parser.add_argument("--policies", nargs="+", default=["lychee_cluster", "lychee_decode"])
    parser.add_argument("--kv-len", type=int, default=65536)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--distinct-layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--parts", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--grow-memory", default="0", help="host memory to touch beforehand")
    parser.add_argument("--work", help=argparse.SUPPRESS)  # the folder of a run's ranks
    return parser


if __name__ == "__main__":
    sys.exit(main())
