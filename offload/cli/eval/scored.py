"""What commands have in common that ask questions with right answers: checks, the run, tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offload.bench.eval.output import (
    BOUND_LEGEND,
    HARD_LEGEND,
    LEGEND,
    cell_table,
    markdown,
    summary_table,
)
from offload.bench.eval.output import Table as EvalTable
from offload.bench.eval.prompt import prompt_counter, uses_chat_template
from offload.bench.eval.record_file import Record, RecordFile
from offload.bench.eval.sample import Item, Sample, key_of
from offload.bench.eval.summary import cell_rows, summaries
from offload.cli.console import (
    make_table,
    no_loading_bars,
    print_json,
    progress_bar,
    quiet_transformers,
    stderr,
    stdout,
)
from offload.cli.eval.options import Output, Questions, Runs
from offload.policies.auto import Auto
from offload.system.machine import describe_machine
from offload.system.version import __version__

if TYPE_CHECKING:
    from offload.bench.eval.bounds import Bound
    from offload.loading.checkpoint import Checkpoint
    from offload.policies import Policy
    from offload.runtime.config import RuntimeConfig
    from offload.runtime.shared_model import SharedModel


@dataclass(frozen=True)
class Setup:
    """Which model runs, how, and under which policies, full attention first."""

    model: str
    policies: Sequence[Policy]
    bounds: Sequence[Bound]
    runs: Runs
    verbose: bool

    @cached_property
    def checkpoint(self) -> Checkpoint:
        """The model's, checked."""
        from offload.loading.checkpoint import check_checkpoint
        from offload.loading.names import resolve_folder

        return check_checkpoint(resolve_folder(self.model), takes_generic=True)

    @property
    def is_generic(self) -> bool:
        """Whether the model has no lean layers."""
        from offload.models import is_generic

        runs = self.runs
        native = runs.device == "cpu" and runs.reads_on is None and not runs.hot_rows
        return is_generic(self.checkpoint.config, where="cpu" if native else "gpu")

    def _check_generic(self) -> None:
        """Refuse, before anything is loaded, what a model without lean layers does not take here.

        Raises:
            NotImplementedError: names the option, or the policy.
        """
        from offload.runtime.generic_loading import check_generic

        runs = self.runs
        refused = {
            "--device": runs.device != "cpu",
            "--reads-on": runs.reads_on is not None,
            "--hot-rows": runs.hot_rows,
            "--batch-size": runs.batch_size > 1,
            "--kv-dtype": runs.kv_dtype == "int8",
            "--host-share": bool(self.bounds),
        }
        for option in (option for option, is_given in refused.items() if is_given):
            raise NotImplementedError(
                f"{option} with a model of type {self.checkpoint.config['model_type']!r}, which "
                "has no lean layers there; leave it out"
            )
        for policy in self.resolved:
            check_generic(self.checkpoint, self.config().under(policy))

    @property
    def labels(self) -> list[str]:
        """Names of the policies, as records have them."""
        from offload.bench.eval.labels import label_of

        return [
            label if resolved == policy else f"{label} {policy.budget_tokens} ({resolved.name})"
            for policy, resolved in zip(self.policies, self.resolved, strict=True)
            for label in [label_of(policy)]
        ]

    @cached_property
    def resolved(self) -> list[Policy]:
        """The policies, with what `auto` comes to in the place of it."""
        from offload.runtime.auto_policy import with_resolved_policy

        if not any(isinstance(policy, Auto) for policy in self.policies):
            return [*self.policies]
        configs = [self.config().under(policy) for policy in self.policies]
        if self.is_generic:
            from offload.runtime.generic_loading import resolved_before_loading

            return [resolved_before_loading(self.checkpoint, each) for each in configs]
        return [with_resolved_policy(self.checkpoint, each, None)[0].policy for each in configs]

    @property
    def all_labels(self) -> list[str]:
        """Names of the policies, and of each policy within each bound."""
        from offload.bench.eval.bounds import all_labels

        return all_labels(self.labels, self.bounds)

    def config(self) -> RuntimeConfig:
        """How it runs; refuses a device or dtype that there is not."""
        from offload.runtime.config import checked_device, runtime_config

        runs = self.runs
        if runs.reads_on is not None:
            checked_device(runs.reads_on)
        return runtime_config(
            dtype=runs.dtype,
            weights=runs.weights,
            kv_dtype=runs.kv_dtype,
            device=runs.device,
            num_threads=runs.threads,
            page_tokens=runs.page_tokens,
            backend="inline" if runs.hot_rows and runs.device == "cpu" else None,
            cache_correction_every=runs.cache_correction_every,
        )

    def check_bounds(self, num_tokens: int) -> None:
        """Refuse a bound that prompts with answers of `num_tokens` cannot have, before weights are
        read.

        Raises:
            ValueError: names the share.
        """
        from offload.bench.eval.bounds import check_text_bound

        for policy in self.resolved:
            config = self.config().under(policy)
            for bound in self.bounds:
                check_text_bound(self.checkpoint, config, num_tokens, bound.share, bound.eviction)

    def described(self) -> dict[str, Any]:
        """For JSON, and to tell runs apart: a cap of a step as the tokens that it allows here."""
        from offload.bench.eval.labels import policy_options
        from offload.loading.checkpoint_digest import checkpoint_digest
        from offload.runtime.capping import with_cap_in_tokens

        configs = [self.config().under(policy) for policy in self.resolved]
        if not self.is_generic:
            configs = [with_cap_in_tokens(self.checkpoint, each, None) for each in configs]
        options = [policy_options(each.policy) for each in configs]
        return {
            "model": self.model,
            "checkpoint": checkpoint_digest(self.checkpoint.folder),
            **asdict(self.runs),
            "bounds": [asdict(bound) for bound in self.bounds],
            "version": __version__,
            "policies": dict(zip(self.labels, options, strict=True)),
        }

    def check_lengths(self, lengths: Sequence[int], option: str = "--context") -> None:
        """Refuse a length that the model has no positions for, before anything is loaded.

        Raises:
            ValueError: names both, and the option. FileNotFoundError: no such model.
        """
        from offload.models.base import stock_context_limit

        if self.is_generic:
            self._check_generic()
            from transformers import AutoConfig

            folder = self.checkpoint.folder
            config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
            max_context, _ = stock_context_limit(config)
        else:
            max_context = self.checkpoint.shape.max_context
        if max(lengths) > max_context:
            raise ValueError(
                f"{max(lengths):,} tokens are more than the {max_context:,} positions of "
                f"{self.model}; lower {option}"
            )


def measure_all(
    command: str,
    setup: Setup,
    make_items: Callable[[Any], Sequence[Item]],
    measure: Callable[[SharedModel, Any, Sequence[Any]], list[dict[str, Any]]],
    count_tokens: Callable[[Any, Any], int],
    *,
    resume: Path | None,
    settings: Mapping[str, Any],
) -> tuple[dict[str, Any], list[Record]]:
    """Have every item measured that the file has no record of: the run's options, and all records.

    Args:
        make_items: gets the tokenizer.
        measure: gets the model, the tokenizer and items of one task and length, as many as
            --batch-size says.
        count_tokens: gets the tokenizer and an item; its tokens, those that follow included.
        settings: of the items, by the names of the command's options.
    """
    from offload.loading.names import load_tokenizer
    from offload.runtime.generic_shared import GenericSharedModel
    from offload.runtime.shared_model import SharedModel

    config = setup.config()
    options = {"command": command, **setup.described(), **settings}
    with (
        quiet_transformers(verbose=setup.verbose),
        no_loading_bars(),
        RecordFile(resume, options) as file,
        progress_bar() as progress,
    ):
        bar = progress.add_task("making prompts", total=None)
        tokenizer = load_tokenizer(setup.model)
        items = list({key_of(item): item for item in make_items(tokenizer)}.values())
        if setup.bounds:
            setup.check_bounds(min(count_tokens(tokenizer, item) for item in items))
        done = file.keys
        left = [item for item in items if key_of(item) not in done]
        if left:
            progress.update(bar, description="loading the model")
            model: Any
            if setup.is_generic:
                model = GenericSharedModel(setup.model, setup.resolved, config)
            else:
                model = SharedModel(
                    setup.model,
                    setup.resolved,
                    config,
                    reads_on=setup.runs.reads_on,
                    hot_rows=setup.runs.hot_rows,
                )
            progress.update(bar, total=len(items), completed=len(items) - len(left))
            for group in _groups(left, setup.runs.batch_size):
                progress.update(bar, description=f"{group[0].task}, {group[0].length:,} tokens")
                for item, measured in zip(group, measure(model, tokenizer, group), strict=True):
                    file.add(item, measured)
                    progress.advance(bar)
    return options, file.records


def _groups(items: Sequence[Item], most: int) -> list[Sequence[Item]]:
    """Up to `most` of one task and length in a row; where there are several, the first ones of each
    task come first: a run that is ended early has asked all tasks alike."""
    groups: list[list[Item]] = []
    for item in items:
        last = groups[-1] if groups else []
        if last and len(last) < most and key_of(last[0])[:2] == key_of(item)[:2]:
            last.append(item)
        else:
            groups.append([item])
    return sorted(groups, key=lambda group: group[0].index) if most > 1 else [*groups]


def answer_all(
    command: str,
    setup: Setup,
    questions: Questions,
    tasks: Sequence[Any],
    sampler: Callable[[Any, bool], Callable[..., list[Sample]]],
    output: Output,
    *,
    settings: Mapping[str, Any],
    decode_last: int = 0,
    of_full: tuple[float, float] | None = None,
    with_kl: bool = False,
) -> dict[str, Any]:
    """Make the prompts, have them answered, sum up and print: the command's JSON document.

    Args:
        sampler: gets the tokenizer, and whether prompts have its chat template; what makes samples
            of a task, a length, how many, and a seed.
        settings: of the prompts, without `questions`, by the names of the command's options.
        decode_last, with_kl: as `answer_samples` has them.
        of_full: as `counting_cells` has it.
    """
    from offload.bench.eval.answers import answer_samples
    from offload.loading.names import load_tokenizer

    setup.runs.check_batch(setup.bounds)
    lengths = questions.all_lengths()
    setup.check_lengths(lengths)
    if decode_last >= min(lengths):
        raise ValueError(
            f"--decode-last {decode_last} leaves nothing to read of prompts of {min(lengths)} "
            "tokens; lower it or raise --context"
        )
    chat = uses_chat_template(load_tokenizer(setup.model), questions.chat_template)

    def make(tokenizer: Any) -> list[Sample]:
        samples_of = sampler(tokenizer, chat)

        def of_cell(cell: tuple[int, Any]) -> list[Sample]:
            length, task = cell
            return samples_of(task, length, questions.samples, seed=questions.seed)

        with ThreadPoolExecutor() as threads:  # tokenizers count on many
            cells = threads.map(of_cell, [(length, task) for length in lengths for task in tasks])
            return [sample for samples in cells for sample in samples]

    def measure(
        model: SharedModel, tokenizer: Any, samples: Sequence[Sample]
    ) -> list[dict[str, Any]]:
        return answer_samples(
            model,
            setup.labels,
            tokenizer,
            samples,
            chat=chat,
            decode_last=decode_last,
            bounds=setup.bounds,
            together=setup.runs.batch_size > 1,
            with_kl=with_kl,
        )

    def count_tokens(tokenizer: Any, sample: Sample) -> int:
        return prompt_counter(tokenizer, chat=chat)(sample) + sample.max_new_tokens

    options, records = measure_all(
        command,
        setup,
        make,
        measure,
        count_tokens,
        resume=output.resume,
        settings={
            **settings,
            "lengths": lengths,
            "samples": questions.samples,
            "seed": questions.seed,
            "chat_template": chat,
            "decode_last": decode_last,
            **({"kl": True} if with_kl else {}),
        },
    )
    document = {
        "machine": describe_machine(),
        "settings": options,
        "summary": summaries(records, setup.all_labels, of_full=of_full),
        "cells": cell_rows(records, setup.all_labels, of_full=of_full),
    }
    _print(document, output.shown)
    return document


def _print(document: Mapping[str, Any], shown: str) -> None:
    """As a table, Markdown or JSON."""
    truncated = sum(cell["truncated_samples"] for cell in document["cells"])
    if truncated:
        stderr().print(
            f"{truncated} prompt{'s were' if truncated > 1 else ' was'} longer than the model's "
            "positions and lost the beginning; lower --context"
        )
    if shown == "json":
        print_json(document)
        return
    settings = document["settings"]
    title = f"{settings['command']}: {settings['model']}, scores in per cent"
    tables = {title: cell_table(document["cells"]), "": summary_table(document["summary"])}
    legend = LEGEND if settings.get("of_full") is None else HARD_LEGEND
    print_tables(tables, legend + BOUND_LEGEND * bool(settings["bounds"]), shown)


def print_tables(tables: Mapping[str, EvalTable], legend: str, shown: str) -> None:
    """Tables by their titles, as Markdown or for people."""
    if shown == "md":
        parts = [x for title, table in tables.items() for x in (title, markdown(*table))]
        print("\n\n".join([*filter(None, parts), legend]))
        return
    for title, (header, rows) in tables.items():
        stdout().print(make_table(header, rows, title=title or None, overflow="fold"))
    stdout().print(legend)
