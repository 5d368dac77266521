"""Train the adapter: tasks at 2K to 32K, text, and a divergence from the stock model on short text.

The learning rate follows the elapsed time, so that a run of any length ends annealed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import signal
import time
from collections import defaultdict
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from perf.long_context.attention import attention_backend
from perf.long_context.batches import PLAN, MicroBatch, steps
from perf.long_context.lora import AdaptedModel, rope_parameters
from perf.long_context.tasks import TaskMaker
from perf.long_context.text import read_corpus

BASE = "smollm2-135m-instruct"
_CHUNK_ROWS = 4096  # of logits at a time: float32 over 49,152 words are 800 MB
_CHECKPOINT_SECONDS = 60.0
_CHAT_TOKENS = 1024  # rows of text that are longer stay text


@dataclass(frozen=True)
class Settings:
    """What a run is made of; `scale` divides lengths, for trying things out."""

    minutes: float = 8.0
    rank: int = 24
    alpha: float = 48.0
    learning_rate: float = 1e-3
    warmup_steps: int = 10
    text_weight: float = 0.5
    keep_weight: float = 1.0
    max_grad_norm: float = 1.0
    replies: int = 192
    reply_tokens: int = 200
    seed: int = 13
    scale: int = 1
    recompute: bool = False
    attention: str = "auto"


class _Stop:
    """While it is open, SIGTERM and SIGINT only ask: the run saves what it has, and ends."""

    def __init__(self) -> None:
        self.asked = False

    def __enter__(self) -> _Stop:
        signals = (signal.SIGTERM, signal.SIGINT)
        self._before = {number: signal.signal(number, self._ask) for number in signals}
        return self

    def __exit__(self, *exc_info: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: Any) -> None:
        self.asked = True


class Training:
    """One run: model, optimiser, log. `folder` gets its checkpoint and, at the end, the adapter."""

    def __init__(
        self, model_folder: Path, corpus: Path, folder: Path, settings: Settings, device: str,
        workers: int,
    ) -> None:  # fmt: skip
        from transformers import AutoModelForCausalLM

        self.settings, self.folder, self.device = settings, folder, torch.device(device)
        self._model_folder, self._corpus, self._workers = model_folder, corpus, workers
        self._checkpoint = folder / "checkpoint.pt"
        folder.mkdir(parents=True, exist_ok=True)
        torch.manual_seed(settings.seed)
        model: Any = AutoModelForCausalLM
        stock = model.from_pretrained(
            model_folder,
            dtype=torch.bfloat16,
            attn_implementation="sdpa",
            trust_remote_code=False,
        ).to(self.device)
        stock.eval()
        length = 32_768 // settings.scale
        self._attention = attention_backend(settings.attention, stock.config, self.device, length)
        self.gguf_sha256: str | None = None
        self.log: list[dict[str, Any]] = []
        self._log_before: list[dict[str, Any]] = []  # of the run that this one starts from
        self.step, self.elapsed_s = 0, 0.0
        state = self._read_checkpoint()
        replies = state["replies"] if state else self._replies(stock)
        self._keep_lines = [tokens for tokens in replies if len(tokens) > 8]
        self.adapted = AdaptedModel(stock, settings.rank, settings.alpha)
        if settings.recompute:
            stock.train()  # transformers recomputes in training alone; there is no dropout
            stock.gradient_checkpointing_enable({"use_reentrant": False})
        self._optimizer = torch.optim.AdamW(
            self.adapted.parameters(),
            lr=settings.learning_rate, betas=(0.9, 0.98), weight_decay=0.0,
            fused=self.device.type == "cuda",
        )  # fmt: skip
        if state:
            self.adapted.load_state(state["adapter"])
            self._optimizer.load_state_dict(state["optimizer"])
            self.step, self.elapsed_s, self.log = state["step"], state["elapsed_s"], state["log"]
            self._log_before = state["log_before"]
            print(f"resumed at step {self.step} after {self.elapsed_s:.0f} s", flush=True)

    def run(self) -> None:
        """Train until the time is over or a signal comes; then the adapter is written."""
        with _Stop() as stop:
            self._run(stop)

    def _run(self, stop: _Stop) -> None:
        budget_s = self.settings.minutes * 60
        source = steps(self.step, self.settings.seed, self._model_folder, self._corpus,
                       self.settings.scale, self._workers)  # fmt: skip
        batch = next(source)  # before the clock starts
        before, saved, last_s = time.monotonic() - self.elapsed_s, self.elapsed_s, 0.0
        while not stop.asked and self.elapsed_s + last_s < budget_s:
            started = time.monotonic()
            rate = self._rate(self.elapsed_s / budget_s)
            row = self._train_step(batch, rate)
            self.step += 1
            if not stop.asked:
                batch = next(source)
            now = time.monotonic()
            self.elapsed_s, last_s = now - before, now - started
            row |= {"step": self.step, "elapsed_s": round(self.elapsed_s, 1), "rate": rate,
                    "tokens_per_s": round(row["tokens"] / last_s)}  # fmt: skip
            self.log.append(row)
            self._say(row, budget_s)
            if self.elapsed_s - saved > _CHECKPOINT_SECONDS:
                saved = self.elapsed_s
                self._save_checkpoint()
        source.close()
        self._save_checkpoint()
        self.save(finished=not stop.asked)

    def start_from(self, folder: Path) -> None:
        """Take the weights of an adapter that another run made; its log comes before this one's."""
        self.adapted.load_state(load_file(folder / "adapter_model.safetensors"))
        self._log_before = json.loads((folder / "log.json").read_text())

    def save(self, finished: bool) -> None:
        """The adapter, its settings and its log."""
        self.adapted.save(self.folder, BASE)
        theta = self.adapted.config.rope_parameters["rope_theta"]
        original = self.adapted.config.max_position_embeddings
        log = _joined(self._log_before, self.log)
        settings = {
            "base_model": BASE,
            "gguf_sha256": self.gguf_sha256,
            "max_position_embeddings": self.adapted.long_config.max_position_embeddings,
            "rope_parameters": rope_parameters(theta, original),
            "training": asdict(self.settings)
            | {"plan": [[purpose, list(lengths)] for purpose, lengths in PLAN]},
            "steps": len(log),
            "elapsed_s": log[-1]["elapsed_s"],
            "finished": finished,
            "tokens": sum(row["tokens"] for row in log),
            "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
            "device": torch.cuda.get_device_name() if self.device.type == "cuda" else "cpu",
            "torch": torch.__version__,
            "transformers": __import__("transformers").__version__,
        }
        (self.folder / "settings.json").write_text(json.dumps(settings, indent=1) + "\n")
        lines = ",\n".join(json.dumps(row) for row in log)
        (self.folder / "log.json").write_text(f"[\n{lines}\n]\n")
        size = (self.folder / "adapter_model.safetensors").stat().st_size
        print(f"adapter of {size:,} bytes in {self.folder}", flush=True)

    def warm_up(self) -> None:
        """The longest document forwards and backwards once: memory that is missing shows here."""
        length = 32_768 // self.settings.scale
        tokens = torch.zeros(1, length, dtype=torch.int64, device=self.device)
        weights = torch.ones(1, length, device=self.device)
        weights[:, 0] = 0.0
        started = time.monotonic()
        for _ in range(2):
            loss, _ = self._losses(tokens, weights)
            torch.autograd.backward(loss)
            self._optimizer.zero_grad()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            print(f"peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB", flush=True)
        print(f"warm-up: 2 x {length} tokens in {time.monotonic() - started:.1f} s", flush=True)

    def _train_step(self, batch: list[MicroBatch], rate: float) -> dict[str, Any]:
        settings, row = self.settings, defaultdict[str, Any](int)
        shares = {"tasks": 1.0, "text": settings.text_weight, "keep": settings.keep_weight}
        count = {purpose: sum(part.purpose == purpose for part in batch) for purpose in shares}
        found: dict[str, list[tuple[Tensor, Tensor]]] = defaultdict(list)
        sums: dict[str, list[Tensor]] = defaultdict(list)
        for part in batch:
            tokens = torch.from_numpy(part.tokens).to(self.device)
            weights = torch.from_numpy(part.weights).to(self.device)
            if part.purpose == "keep":
                loss = self._divergence(*self._with_replies(tokens))
            else:
                loss, details = self._losses(tokens, weights)
                for number, kind in enumerate(part.kinds):
                    found[f"{kind}@{tokens.shape[1]}"].append(
                        (details[0][number], details[1][number])
                    )
            torch.autograd.backward(loss * (shares[part.purpose] / count[part.purpose]))
            sums[part.purpose].append(loss.detach())
            row["tokens"] += tokens.numel()
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        norm = torch.nn.utils.clip_grad_norm_(self.adapted.parameters(), settings.max_grad_norm)
        if not bool(torch.isfinite(norm)):
            raise FloatingPointError(f"the gradient's norm is {norm} at step {self.step}")
        self._optimizer.step()
        self._optimizer.zero_grad()
        row["grad_norm"] = round(float(norm), 4)
        for purpose, losses in sums.items():
            row[purpose] = round(float(torch.stack(losses).mean()), 4)
        # Of each kind and length: nll of its tokens, and the share of documents answered wholly.
        row["kinds"] = {
            kind: [round(float(torch.stack([nll for nll, _ in of]).mean()), 4),
                   round(float(torch.stack([right for _, right in of]).float().mean()), 3), len(of)]
            for kind, of in sorted(found.items())
        }  # fmt: skip
        return dict(row)

    def _losses(self, tokens: Tensor, weights: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """The weighted mean nll, and of each document its nll [batch] and if every token that
        counts fully is the likeliest [batch]. Rows without a weight never meet the vocabulary.
        """
        batch = tokens.shape[0]
        with self._only_attention():
            states = self.adapted.hidden(tokens)[:, :-1]
        document = torch.arange(batch, device=tokens.device)[:, None].expand(-1, states.shape[1])
        chosen = weights[:, 1:] > 0
        states, targets = states[chosen], tokens[:, 1:][chosen]
        weight, document = weights[:, 1:][chosen], document[chosen]
        nll, right = [], []
        for first in range(0, len(targets), _CHUNK_ROWS):
            part = slice(first, first + _CHUNK_ROWS)
            got = checkpoint(self._nll, states[part], targets[part], use_reentrant=False)
            nll.append(got[0])
            right.append(got[1])
        all_nll, all_right = torch.cat(nll), torch.cat(right)
        zeros = torch.zeros(batch, device=tokens.device)
        with torch.no_grad():
            total = zeros.index_add(0, document, weight)
            mean = zeros.index_add(0, document, all_nll * weight) / total.clamp_min(1e-6)
            wrong = zeros.index_add(0, document, ((weight >= 1) & ~all_right).float())
        return (all_nll * weight).sum() / weight.sum(), (mean, wrong == 0)

    def _only_attention(self) -> AbstractContextManager[None]:
        """No other kernels: one that needs a mask, or all scores at once, is an error here."""
        if self._attention is None:
            return nullcontext()
        return sdpa_kernel([self._attention, SDPBackend.FLASH_ATTENTION], set_priority=True)

    def _nll(self, states: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = self._logits(states)
        return functional.cross_entropy(logits, targets, reduction="none"), (
            logits.argmax(-1) == targets
        )

    def _logits(self, states: Tensor) -> Tensor:
        return functional.linear(states, self.adapted.model.lm_head.weight).float()

    def _divergence(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """KL(stock, adapted) in nats per token where mask [batch, length] is True."""
        with self._only_attention():
            with torch.no_grad(), self.adapted.as_stock():
                wanted = self.adapted.hidden(tokens)[mask]
            states = self.adapted.hidden(tokens)[mask]
        total = torch.zeros((), device=tokens.device)
        for first in range(0, len(states), _CHUNK_ROWS):
            part = slice(first, first + _CHUNK_ROWS)
            total = total + checkpoint(self._kl, states[part], wanted[part], use_reentrant=False)
        return total / len(states)

    def _kl(self, states: Tensor, wanted: Tensor) -> Tensor:
        log_p = functional.log_softmax(self._logits(wanted), -1)
        log_q = functional.log_softmax(self._logits(states), -1)
        return functional.kl_div(log_q, log_p, reduction="sum", log_target=True)

    def _with_replies(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Half of the rows of short text become chats that the stock model answered."""
        mask = torch.ones_like(tokens, dtype=torch.bool)
        if tokens.shape[1] > _CHAT_TOKENS:
            return tokens, mask
        for row in range(0, len(tokens), 2):
            place = self.step * len(tokens) + row
            chat = self._keep_lines[place % len(self._keep_lines)][: tokens.shape[1]]
            tokens[row, : len(chat)] = torch.tensor(chat, device=tokens.device)
            mask[row, len(chat) :] = False
        return tokens, mask

    @torch.no_grad()
    def _replies(self, stock: Any) -> list[list[int]]:
        """Chats with what the stock model says: sampled once, at temperature 0.7."""
        import random

        maker = TaskMaker(self._model_folder, read_corpus(self._corpus)["train"])
        rng, started = random.Random(self.settings.seed), time.monotonic()
        prompts = [maker.chat(rng) for _ in range(self.settings.replies)]
        length = max(map(len, prompts))
        tokens = torch.full((len(prompts), length), maker.end)
        mask = torch.zeros_like(tokens)
        for row, prompt in enumerate(prompts):
            tokens[row, length - len(prompt) :] = torch.tensor(prompt)
            mask[row, length - len(prompt) :] = 1
        said = stock.generate(
            tokens.to(self.device), attention_mask=mask.to(self.device), do_sample=True,
            temperature=0.7, top_p=0.95, max_new_tokens=self.settings.reply_tokens,
            pad_token_id=maker.end,
        )[:, length:].tolist()  # fmt: skip
        print(f"{len(said)} replies of the stock model in {time.monotonic() - started:.1f} s",
              flush=True)  # fmt: skip
        lines = []
        for prompt, answer in zip(prompts, said, strict=True):
            stop = answer.index(maker.end) + 1 if maker.end in answer else len(answer)
            lines.append(prompt + answer[:stop])
        return lines

    def _rate(self, progress: float) -> float:
        """Warm-up by steps, then half a cosine of the elapsed time."""
        warm = min(1.0, (self.step + 1) / self.settings.warmup_steps)
        return (
            self.settings.learning_rate
            * warm
            * (0.5 + 0.5 * math.cos(math.pi * min(1.0, progress)))
        )

    def _say(self, row: dict[str, Any], budget_s: float) -> None:
        of = [values for kind, values in row["kinds"].items() if not kind.startswith("text")]
        right = sum(values[1] * values[2] for values in of) / sum(values[2] for values in of)
        print(
            f"{row['elapsed_s']:6.1f}/{budget_s:.0f} s  step {row['step']:3d}  tasks "
            f"{row['tasks']:.3f} ({right:.0%} right)  text {row['text']:.3f}  keep "
            f"{row['keep']:.4f}  grad {row['grad_norm']:.2f}  rate {row['rate']:.1e}  "
            f"{row['tokens_per_s']:,} tokens/s",
            flush=True,
        )

    def _save_checkpoint(self) -> None:
        temporary = self._checkpoint.with_suffix(".new")
        state = {
            "settings": asdict(self.settings), "adapter": self.adapted.state(),
            "optimizer": self._optimizer.state_dict(), "step": self.step,
            "elapsed_s": self.elapsed_s, "log": self.log, "log_before": self._log_before,
            "replies": self._keep_lines,
        }  # fmt: skip
        torch.save(state, temporary)
        os.replace(temporary, self._checkpoint)

    def _read_checkpoint(self) -> dict[str, Any] | None:
        if not self._checkpoint.is_file():
            return None
        state: dict[str, Any] = torch.load(
            self._checkpoint, map_location=self.device, weights_only=True
        )
        # More minutes or recomputed layers may follow; the rest made the weights what they are.
        free = {"minutes", "recompute", "attention"}
        for name, value in asdict(self.settings).items():
            if name not in free and state["settings"][name] != value:
                raise ValueError(
                    f"{self._checkpoint} was made with {name}={state['settings'][name]}, not "
                    f"{value}: give that, or another --out"
                )
        return state


def _joined(before: list[dict[str, Any]], log: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of two runs, the second one's steps and seconds counted on."""
    if not before:
        return log
    steps, seconds = before[-1]["step"], before[-1]["elapsed_s"]
    return before + [
        row | {"step": row["step"] + steps, "elapsed_s": round(row["elapsed_s"] + seconds, 1)}
        for row in log
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="folder of the stock model")
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--gguf", type=Path, help="what --model was made of; its digest is kept")
    parser.add_argument("--start", type=Path, help="folder of an adapter to begin with")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--workers", type=int, default=8)
    for name, value in asdict(Settings()).items():
        option = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            parser.add_argument(option, action="store_true")
        else:
            parser.add_argument(option, type=type(value), default=value)
    arguments = vars(parser.parse_args())
    settings = Settings(**{name: arguments[name] for name in asdict(Settings())})
    training = _started(arguments, settings)
    if arguments["gguf"]:
        training.gguf_sha256 = hashlib.sha256(arguments["gguf"].read_bytes()).hexdigest()
    if arguments["start"] and training.step == 0:
        training.start_from(arguments["start"])
    training.run()


def _started(arguments: dict[str, Any], settings: Settings) -> Training:
    """A run whose longest document fits in memory, with layers recomputed if need be."""
    paths = (arguments["model"], arguments["corpus"], arguments["out"])
    training = Training(*paths, settings, arguments["device"], arguments["workers"])
    try:
        training.warm_up()
    except torch.OutOfMemoryError:
        if settings.recompute:
            raise
        print("out of memory: layers are computed again on the way back", flush=True)
        del training
        torch.cuda.empty_cache()
        settings = Settings(**(asdict(settings) | {"recompute": True}))
        training = Training(*paths, settings, arguments["device"], arguments["workers"])
        training.warm_up()
    return training
