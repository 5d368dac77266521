"""A row of docs/compatibility.md is a small program, run with the stock model and with ours."""

from __future__ import annotations

import contextlib
import io
import linecache
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from cases.tiny_models import byte_tokenizer, make_tiny_model, random_tokens
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.utils import ModelOutput
from transformers.utils import logging as transformers_logging

import offload
from offload import HostBudgetError, OffloadedModel

WORKS, REFUSED, AS_STOCK = "works", "refused", "refused, as by transformers"
DEFECTS = OTHER, BROKEN = "other result", "broken"

# How our code may refuse a feature, in words of its own; anything else that is raised is a defect.
REFUSALS = (ValueError, NotImplementedError, TypeError, RuntimeError, HostBudgetError)
_OUR_FILES = str(Path(offload.__file__).parent)
_KEPT_OUTPUTS = ("sequences", "scores", "logits", "sequences_scores", "beam_indices")
_MAX_WORDS = 230


@dataclass
class Side:
    """One of the two models that a program is run with.

    Attributes:
        folder: of the checkpoint of `model`.
        calls: what the calls of `generate` returned.
    """

    is_ours: bool
    model: Any
    folder: Path
    tokenizer: Any
    calls: list[Any] = field(default_factory=list)

    def new_cache(self) -> Any:
        return self.model.new_cache() if self.is_ours else DynamicCache()

    def load(self, folder: Path | None = None, **options: Any) -> Any:
        """The model of a folder, by default a second one of this side's, to change."""
        folder = folder or self.folder
        if self.is_ours:
            return OffloadedModel.from_pretrained(folder, num_threads=1, page_tokens=16, **options)
        return AutoModelForCausalLM.from_pretrained(folder, **options).eval()

    def load_changed(self, name: str = "llama", **changes: Any) -> Any:
        """A tiny model (`make_tiny_model`) with another config."""
        with tempfile.TemporaryDirectory() as folder:
            make_tiny_model(name, **changes).save_pretrained(folder)
            return self.load(Path(folder))

    def generate(self, *args: Any, model: Any = None, **options: Any) -> Any:
        """`generate()` from a fixed random state; 8 greedy tokens if nothing else is said.

        What it returned is compared with the other side's.
        """
        torch.manual_seed(7)
        if not {"max_length", "max_time", "generation_config"} & options.keys():
            options.setdefault("max_new_tokens", 8)
        options.setdefault("do_sample", False)
        model = self.model if model is None else model
        out = model.generate(*args, **options)
        kept = out
        if isinstance(out, ModelOutput):
            kept = {name: out[name] for name in _KEPT_OUTPUTS if out.get(name) is not None}
        self.calls.append(kept)
        return out

    def logits(self, *args: Any, model: Any = None, **options: Any) -> torch.Tensor:
        """Logits of a forward pass without gradients."""
        with torch.no_grad():
            out = (self.model if model is None else model)(*args, **options)
        logits: torch.Tensor = out.logits
        return logits


@dataclass(frozen=True)
class Feature:
    """One row.

    Attributes:
        name: what a user would look for, in Markdown.
        run: returns tensors, texts or numbers to compare; what `side.generate` returns is compared
            anyway.
        why: for the reader, above all of a refusal.
        reference: in place of the stock model running `run`; gets our side.
        stock_refuses: transformers does not do it either.
        refused_by_torch: in its words; nothing of ours is asked.
        tolerance: relative and absolute, of floating-point results.
    """

    name: str
    run: Callable[[Side], Any]
    why: str = ""
    reference: Callable[[Side], Any] | None = None
    stock_refuses: bool = False
    refused_by_torch: bool = False
    tolerance: float = 1e-3


@dataclass(frozen=True)
class Verdict:
    """What came of a feature: WORKS, REFUSED, AS_STOCK, or one of DEFECTS.

    Attributes:
        words: of the refusal or failure.
        num_calls, num_same: calls of `generate()`, and those with the results of the stock model.
    """

    result: str
    words: str = ""
    num_calls: int = 0
    num_same: int = 0


def judge(feature: Feature, stock: Side, ours: Side) -> Verdict:
    """Run a feature on both sides.

    Raises:
        Exception: what a program raised that is no refusal, or what only the stock model raised.
    """
    by_stock = _outcome(feature.reference or feature.run, ours if feature.reference else stock)
    by_ours = _outcome(feature.run, ours)
    stock_error, our_error = by_stock[0], by_ours[0]
    foreign = feature.stock_refuses or feature.refused_by_torch
    if stock_error is not None and not (feature.stock_refuses and our_error is not None):
        raise stock_error
    if our_error is not None and not (foreign or _is_refusal(our_error)):
        return Verdict(BROKEN, f"{type(our_error).__name__}: {words_of(our_error)}")
    if stock_error is not None:
        return Verdict(AS_STOCK, words_of(our_error))
    if our_error is not None:
        return Verdict(REFUSED, words_of(our_error))
    same_calls = [
        same(got, expected, feature.tolerance)
        for got, expected in zip(by_ours[2], by_stock[2], strict=True)
    ]
    is_same = all(same_calls) and same(by_ours[1], by_stock[1], feature.tolerance)
    return Verdict(WORKS if is_same else OTHER, "", len(same_calls), sum(same_calls))


def _is_refusal(error: BaseException) -> bool:
    """Whether a `raise` of ours says no; a failure in the middle of something is none."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    if traceback is None or not isinstance(error, REFUSALS):
        return False
    name = traceback.tb_frame.f_code.co_filename
    line = linecache.getline(name, traceback.tb_lineno).strip()
    return name.startswith(_OUR_FILES) and line.startswith("raise ")


def words_of(error: BaseException) -> str:
    """The first line of the message, shortened, without the names of temporary folders."""
    words = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
    words = re.sub(rf"{re.escape(tempfile.gettempdir())}/[\w/.-]+", "FOLDER", words)
    return words if len(words) <= _MAX_WORDS else words[:_MAX_WORDS].rsplit(" ", 1)[0] + " …"


def same(got: Any, expected: Any, tolerance: float) -> bool:
    """Whether two results agree: whole numbers and texts exactly, others within a tolerance."""
    if isinstance(expected, torch.Tensor):
        if not isinstance(got, torch.Tensor) or got.shape != expected.shape:
            return False
        if not expected.is_floating_point():
            return torch.equal(got, expected)
        got, expected = got.float(), expected.float()
        return torch.allclose(got, expected, rtol=tolerance, atol=tolerance)
    if isinstance(expected, dict):
        return got.keys() == expected.keys() and all(
            same(got[key], expected[key], tolerance) for key in expected
        )
    if isinstance(expected, (list, tuple)):
        return len(got) == len(expected) and all(
            same(x, y, tolerance) for x, y in zip(got, expected, strict=True)
        )
    if isinstance(expected, float):
        return bool(abs(got - expected) <= tolerance * (1 + abs(expected)))
    return bool(got == expected)


def _outcome(run: Callable[[Side], Any], side: Side) -> tuple[BaseException | None, Any, list[Any]]:
    """(what was raised, what was returned, what the calls of generate returned)."""
    side.calls = []
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            result = run(side)
    except Exception as error:
        return error, None, side.calls
    return None, result, side.calls


@contextlib.contextmanager
def both_sides() -> Iterator[tuple[Side, Side]]:
    """(stock, ours) of one tiny llama."""
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity(transformers_logging.CRITICAL)
    transformers_logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as name:
        folder, tokenizer = Path(name), byte_tokenizer()
        make_tiny_model("llama").save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        sides = [Side(is_ours, None, folder, tokenizer) for is_ours in (False, True)]
        for side in sides:
            side.model = side.load()
        yield sides[0], sides[1]
    transformers_logging.set_verbosity(verbosity)
    transformers_logging.enable_progress_bar()


# Prompts that the programs use.

SINGLE = {"input_ids": random_tokens(1, 40)}
REPETITIVE = {"input_ids": random_tokens(1, 12).repeat(1, 5)}


def padded(*lengths: int, side: str = "left") -> dict[str, torch.Tensor]:
    """Rows of these lengths with their mask."""
    width = max(lengths)
    columns = torch.arange(width)
    masks = [columns >= width - n if side == "left" else columns < n for n in lengths]
    tokens, mask = random_tokens(len(lengths), width), torch.stack(masks).long()
    return {"input_ids": tokens.masked_fill(mask == 0, 258), "attention_mask": mask}
