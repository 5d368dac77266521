r"""Does the 32K model find what the stock model finds, and as far as its positions reach?

    python -m perf.long_context.evaluate --model STOCK --adapter FOLDER --corpus corpus.xz \
        --out FILE

Stock transformers, greedy, one prompt at a time: one needle at 8K, 16K and 32K, four keys at 8K
beside the stock model, and the nll of the last 512 tokens of text that was held out of training.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from offload.loading.adapter import merge_adapter, read_adapter
from perf.long_context.tasks import TaskMaker
from perf.long_context.text import Corpus, read_corpus

_NLL_TOKENS = 512
_NEW_TOKENS = 16


def _words(text: str) -> list[str]:
    return text.split()


# Other words than those of training.
_ADJECTIVES = _words("""
abrasive bashful cautious dapper elated frantic grumpy hypnotic immense jumpy
knotty lopsided mysterious nostalgic obedient pretty quaint ragged spiteful torpid uneven vague
wistful xenial yielding zany""")
_NOUNS = _words("""
asteroid biscuit cathedral dumpling escalator fisherman gymnast hurdle igloo jellyfish
kingdom librarian mandolin nightfall opossum pancake quicksand rhubarb sausage tambourine umbrella
vestment waterwheel xylophone yardstick zeppelin""")
# (needle, question, beginning of the answer): RULER's wording and one that training has not.
_WORDINGS = (
    ("One of the special magic numbers for {key} is: {value}.",
     "What is the special magic number for {key} mentioned in the provided text?",
     " The special magic number for {key} mentioned in the provided text is"),
    ("The harbour master painted {value} on the crate of the {key}.",
     "Which number was painted on the crate of the {key}?",
     " The number painted on the crate of the {key} was"),
)  # fmt: skip
_INTRODUCTIONS = (
    "Some special magic numbers are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the numbers afterwards.\n",
    "Somewhere in these pages a number matters.\n\n",
)


class Judge:
    """Prompts from held-out text, and what a model says to them."""

    def __init__(self, folder: Path, corpus: Corpus, device: str, limit: int) -> None:
        self.maker, self.corpus = TaskMaker(folder, corpus), corpus
        self.device, self.limit = device, limit

    def load(self, folder: Path) -> Any:
        from transformers import AutoModelForCausalLM

        auto: Any = AutoModelForCausalLM
        model = auto.from_pretrained(
            folder, dtype=torch.bfloat16, attn_implementation="sdpa", trust_remote_code=False
        )
        return model.to(self.device).eval()

    def retrieval(
        self, model: Any, length: int, count: int, num_keys: int, chat: bool = False
    ) -> dict[str, Any]:
        """The share of `count` prompts of `length` tokens whose answer has the number."""
        right, by_wording, depths = 0, [0, 0], []
        started = time.monotonic()
        for number in range(count):
            rng = random.Random(f"{length}-{num_keys}-{number}")
            depth = (number + 0.5) / count
            prompt, answer = self._prompt(rng, length, num_keys, number % 2, depth, chat)
            said = self._said(model, prompt)
            if answer in said:
                right += 1
                by_wording[number % 2] += 1
            else:
                depths.append(round(depth, 2))
        row = {
            "task": "four_keys" if num_keys > 1 else "needle", "length": length, "prompts": count,
            "right": right, "right_by_wording": by_wording, "missed_depths": depths, "chat": chat,
            "seconds": round(time.monotonic() - started, 1),
        }  # fmt: skip
        print(json.dumps(row), flush=True)
        return row

    @torch.no_grad()
    def nll(self, model: Any, lengths: list[int], count: int) -> list[dict[str, Any]]:
        """Of the last 512 tokens of the same held-out spans, read from 1 to `lengths` before."""
        spans, longest = self._spans(count), max(lengths)
        rows = []
        for length in lengths:
            found = []
            for place, stop in spans:
                first = max(place, stop - length)
                tokens = self.corpus.tokens[first:stop].astype(np.int64)
                ids = torch.from_numpy(tokens)[None].to(self.device)
                kept = min(_NLL_TOKENS, len(tokens) - 1)
                logits = model(ids, use_cache=False, logits_to_keep=kept + 1).logits[0, :-1]
                loss = functional.cross_entropy(logits.float(), ids[0, -kept:])
                found.append(float(loss))
            row = {"task": "nll", "length": length, "spans": len(found), "longest": longest,
                   "nll": round(float(np.mean(found)), 4),
                   "nll_by_span": [round(nll, 4) for nll in found]}  # fmt: skip
            print(json.dumps(row | {"nll_by_span": "..."}), flush=True)
            rows.append(row)
        return rows

    def _spans(self, count: int) -> list[tuple[int, int]]:
        """(first, last) tokens of spans over the held-out documents, as long as the model reads."""
        starts = self.corpus.starts.tolist()
        spans = []
        for first, stop in pairwise(starts):
            share = max(1, round(count * (stop - first) / starts[-1]))
            room = stop - first - self.limit
            for number in range(share):
                begin = first + max(0, room) * number // max(1, share - 1)
                spans.append((begin, min(stop, begin + self.limit)))
        return spans

    def _prompt(
        self, rng: random.Random, length: int, num_keys: int, wording: int, depth: float, chat: bool
    ) -> tuple[list[int], str]:
        """Prompts of one key have it at `depth`; of four, the keys' depths are random."""
        maker, (needle, question, begin) = self.maker, _WORDINGS[wording]
        keys: dict[str, str] = {}
        while len(keys) < num_keys:
            key = f"{rng.choice(_ADJECTIVES)}-{rng.choice(_NOUNS)}"
            keys[key] = str(rng.randint(10**6, 10**7 - 1))
        asked = rng.choice(list(keys))
        depths = [depth if key == asked or num_keys == 1 else rng.random() for key in keys]
        needles = [maker.encode(" " + needle.format(key=k, value=v)) for k, v in keys.items()]
        head = maker.encode(_INTRODUCTIONS[wording])
        end = f"\n{question.format(key=asked)}"
        tail = maker.encode(end + begin.format(key=asked))
        if chat:
            start = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by "
            head = maker.encode(f"{start}Hugging Face<|im_end|>\n<|im_start|>user\n") + head
            tail = maker.encode(f"{end}<|im_end|>\n<|im_start|>assistant\n")
        room = length - _NEW_TOKENS - len(head) - len(tail) - sum(map(len, needles))
        hay = maker.span(rng, room, True)
        places = np.concatenate([[0], maker.boundaries(np.array(hay))])
        body, before = [], 0
        for at, tokens in sorted(zip(depths, needles, strict=True)):
            place = int(places[np.searchsorted(places, at * len(hay), "right") - 1])
            body += hay[before:place] + tokens
            before = place
        return head + body + hay[before:] + tail, keys[asked]

    @torch.no_grad()
    def _said(self, model: Any, prompt: list[int]) -> str:
        ids = torch.tensor([prompt], device=self.device)
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False,
            max_new_tokens=_NEW_TOKENS, pad_token_id=self.maker.end,
        )  # fmt: skip
        return self.maker.decode(output[0, len(prompt) :].tolist())


def targets(rows: list[dict[str, Any]]) -> list[tuple[str, bool]]:
    """What the model must reach, and whether it does."""

    def one(**wanted: Any) -> dict[str, Any]:
        return next(row for row in rows if wanted.items() <= row.items())

    lengths = sorted({row["length"] for row in rows if row["task"] == "needle"
                      and row["model"] == "long" and not row["chat"]})  # fmt: skip
    short, longest = lengths[0], lengths[-1]
    checks = []
    for length in lengths:
        row = one(task="needle", model="long", length=length, chat=False)
        share = row["right"] / row["prompts"]
        checks.append((f"one needle at {length}: {share:.0%} (>= 96 %)", share >= 0.96))
    four = [one(task="four_keys", model=model)["right"] for model in ("stock", "long")]
    checks.append((f"four keys: {four[1]}, the stock model {four[0]}", four[1] >= four[0]))
    stock = one(task="nll", model="stock", length=short)["nll"]
    near = one(task="nll", model="long", length=short)["nll"]
    far = one(task="nll", model="long", length=longest)["nll"]
    checks.append((f"nll at {short}: {near} ({near / stock - 1:+.2%} of {stock}; <= +2 %)",
                   near <= 1.02 * stock))  # fmt: skip
    checks.append((f"nll at {longest}: {far} (not above {near})", far <= near))
    return checks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="folder of the stock model")
    parser.add_argument("--adapter", type=Path, required=True)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--spans", type=int, default=24)
    parser.add_argument("--only", choices=("nll",), help="nothing else, and no targets")
    parser.add_argument("--scale", type=int, default=1, help="divides lengths, to try it out")
    arguments = parser.parse_args()
    lengths = [8192 // arguments.scale, 16384 // arguments.scale, 32768 // arguments.scale]
    judge = Judge(
        arguments.model, read_corpus(arguments.corpus)["held_out"], arguments.device, lengths[-1]
    )
    rows: list[dict[str, Any]] = []

    def keep(name: str, found: list[dict[str, Any]]) -> None:
        rows.extend({"model": name} | row for row in found)
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps({"rows": rows}, indent=1) + "\n")

    short, count = lengths[0], arguments.prompts
    with tempfile.TemporaryDirectory() as merged:
        merge_adapter(read_adapter(arguments.adapter), arguments.model, Path(merged))
        model = judge.load(Path(merged))
    keep("long", judge.nll(model, lengths, arguments.spans))
    if arguments.only is None:
        for length in reversed(lengths):
            keep("long", [judge.retrieval(model, length, count, 1)])
        keep("long", [judge.retrieval(model, short, count, 4)])
    model = judge.load(arguments.model)
    keep("stock", judge.nll(model, [short], arguments.spans))
    if arguments.only is not None:
        return
    keep("stock", [judge.retrieval(model, short, count, num_keys) for num_keys in (4, 1)])
    checks = targets(rows)
    for text, reached in checks:
        print(f"{'reached' if reached else 'MISSED '}  {text}", flush=True)
    result = {"rows": rows, "targets": [[text, reached] for text, reached in checks]}
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
