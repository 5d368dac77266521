"""Tables of what policies lose on RULER, from documents of `offload eval ruler --json`."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from offload.bench.eval.output import cell_table, markdown, summary_table
from perf.tables.markdown import by_context, context_columns, table
from perf.tables.tables import machine_line


def ruler_table(result: dict[str, Any]) -> str:
    """What `offload eval ruler --json` wrote, as the command shows it."""
    settings, cells = result["settings"], result["cells"]
    prose = settings["haystack"] and (settings["haystack"]["path"] or "Python's docstrings")
    samples = sum(cell["samples"] for cell in cells)
    truncated = sum(cell["truncated_samples"] for cell in cells)
    header, rows = summary_table(result["summary"])
    speed = header.index("tokens/s")  # of prompts of one run, beside whatever else ran
    header, *rows = ([*row[:speed], *row[speed + 1 :]] for row in (header, *rows))
    return "\n\n".join(
        [
            f"RULER on {settings['model']}, {settings['dtype']}, {settings['samples']} prompts of "
            f"each task and length, {samples} in all, {truncated} of them truncated; seed "
            f"{settings['seed']}, {'the' if settings['chat_template'] else 'no'} chat template, "
            f"prose: {prose or 'none'}. In per cent; where full attention scores nothing (*) a "
            "task is not in the mean. Every policy on the same prompts.",
            f"Options: {_options(settings['policies'])}.",
            markdown(*cell_table(cells)),
            markdown(header, rows),
            machine_line(result["machine"], spreads=False),
        ]
    )


def ruler_ablation_table(result: dict[str, Any]) -> str:
    """Policies and their options, of documents as `ruler_table` takes one: by budget."""
    settings = result["settings"]
    rows = []
    for row in result["summary"]:
        name, _, rest = row["policy"].partition(" ")
        budget, _, options = rest.partition(" ")
        if budget:
            rows.append(row | {"name": (name, options), "budget": int(budget)})
    full = next(row for row in result["summary"] if row["policy"] == "full")
    counted = {
        "right": lambda row: f"{100 * row['score']:.0f} %",
        "scored": lambda row: f"{row['scored_tokens']:,.0f}",
        "ms": lambda row: f"{1e3 * row['decode_seconds'] / row['decoded_tokens']:.1f}",
    }
    columns: dict[str, str | Callable[[Any], str]] = {
        "policy": "`{name[0]}`",
        "options": "{name[1]}",
    }
    for budget, name in itertools.product(sorted({row["budget"] for row in rows}), counted):
        cell = context_columns(rows, counted[name], "budget")[f"{budget:,} tokens"]
        columns[f"{budget:,}: {name}"] = cell
    prompts = sum(cell["samples"] for cell in result["cells"])
    return "\n\n".join(
        [
            f"{settings['model']}, {settings['dtype']}, {prompts} prompts of "
            f"{', '.join(f'{n:,}' for n in settings['lengths'])} tokens "
            f"({', '.join(settings['tasks'])}), seed {settings['seed']}: right answers, keys "
            "scored for each token, layer and head, and milliseconds per token on "
            f"{settings['threads']} CPU threads; by budget. Full attention: "
            f"{100 * full['score']:.0f} %.",
            table(columns, by_context(rows, lambda row: row["name"], "budget")),
            machine_line(result["machine"], spreads=False),
        ]
    )


def _options(policies: dict[str, dict[str, Any]]) -> str:
    """Those that all selecting policies share, then the others of each."""
    selecting = {
        label: {key: value for key, value in options.items() if value is not None}
        for label, options in policies.items()
        if options
    }
    shared = set.intersection(*(set(options.items()) for options in selecting.values()))
    of_all = {"all": dict(sorted(shared))}
    of_each = {
        label: dict(pair for pair in options.items() if pair not in shared)
        for label, options in selecting.items()
    }
    said = {
        name: ", ".join(f"{key}={value}" for key, value in options.items())
        for name, options in (of_all | of_each).items()
    }
    return "; ".join(f"{name}: {options}" for name, options in said.items() if options)
