"""Markdown of paper-tidal-decode, paper-lychee-decode-* and paper-lychee-rules: docs/papers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from perf.tables.markdown import Row, markdown_table
from perf.tables.tables import machine_line

_NONE = "\N{EN DASH}"
_FIRST_RESELECTION = 3  # after two dense layers and the first that selects
_FULL = "full"
_FEWEST_WINDOWS = 3  # of which a perplexity has an interval that says anything


def layer_sweep_table(result: dict[str, Any]) -> str:
    """A row of each layer: how like the next it is, and what re-selecting there keeps."""
    swept, answers = _of(result, "sweep"), _answers(result, "all")
    lines = []
    for row in _of(result, "similarity"):
        layer = row["layer"]
        line = [
            str(layer),
            *(f"{np.mean(row[name]):.2f}" for name in ("cosine", "cosine_without_sinks")),
            f"{min(row['overlap']):.0%} \N{HORIZONTAL ELLIPSIS} {max(row['overlap']):.0%}",
        ]
        if layer < _FIRST_RESELECTION - 1:
            lines.append([*line, "", "", "", ""])
            continue
        # The first entry of each list is that of no re-selection: layer 2 selects alone.
        at = layer - _FIRST_RESELECTION + 1
        label = "2" if at == 0 else f"2,{layer}"
        for name in ("recall", "mass", "answer"):
            line.append(_percent(_mean(of_kind[name][at] for of_kind in swept)))
        lines.append([*line, _scored(answers.get(label))])
    header = ["layer", "cosine", "without sinks", "overlap by head", "recall", "mass", "answer"]
    prompts = sum(row["prompts"] for row in swept)
    title = (
        f"{_setting(result)}: {prompts} prompts of {len(result['settings']['kinds'])} kinds of "
        f"text at {_lengths(result)} tokens, each kind and length counting the same. First, this "
        "layer's attention against the next layer's: cosine, and common tokens of the 256 heaviest "
        "in the query heads that have least and most of them. The rest: layers 2 and this one "
        f"select {result['settings']['budget_tokens']} tokens, the layers below reuse them (layer "
        "2: no re-selection). Recall: share that is among a head's own 256 heaviest, each KV head "
        "its own selection, no sinks or recent window given (the paper's Figure 2). Mass, and mass "
        "on the answer's tokens: one selection of all heads, sinks and recent window. Answers: of "
        f"{_prompts(answers)} other prompts (one needle; one of many keys), in brackets the 95 % "
        "interval of the difference to full attention."
    )
    table = markdown_table([*header, "answers"], lines)
    return "\n\n".join([title, table, machine_line(result["machine"], spreads=False)])


def layer_choice_table(result: dict[str, Any]) -> str:
    """Whether one re-selection layer is best for all kinds of text."""
    lines = [
        [
            result["settings"]["kinds"][row["kind"]],
            row["measure"],
            str(row["own"]),
            f"{row['of_own']:.1%}",
            str(row["others"]),
            f"{row['of_others']:.1%}",
        ]
        for row in _of(result, "transfer")
    ]
    header = ["text", "chosen by", "best layer", "it keeps", "best of the other kinds", "it keeps"]
    return markdown_table(header, lines)


def layer_sets_table(result: dict[str, Any]) -> str:
    """Sets of selection layers, beside methods that select in every layer."""
    sets: dict[tuple[int, ...], list[Row]] = {}
    for row in _of(result, "sets"):
        sets.setdefault(tuple(row["layers"]), []).append(row)
    tasks = [task for task in ("needle", "keys") if _answers(result, task)]
    of_task = {task: _answers(result, task) for task in ("all", *tasks)}

    def scores(label: str) -> list[str]:
        of_tasks = [f"{_score(of_task[task].get(label))}" for task in tasks]
        return [*of_tasks, _scored(of_task["all"].get(label))]

    lines = [[name, "", "", "", "", *scores(name)] for name in (_FULL, "exact_topk", "quest")]
    for layers, rows in sets.items():
        kept = [_percent(_mean(row[name] for row in rows)) for name in ("recall", "mass", "answer")]
        label = ",".join(map(str, layers))
        lines.append([label, rows[0]["why"], *kept, *scores(label)])
    header = ["selects in", "", "recall", "mass", "answer", *tasks, "both"]
    return markdown_table(header, lines)


def layer_lengths_table(result: dict[str, Any]) -> str:
    """Right answers by length: the methods, and TidalDecode by its layers."""
    cells, answers = _of(result, "cells"), _answers(result, "all")
    sets = [",".join(map(str, row["layers"])) for row in _of(result, "sets")]
    swept = {
        label: row
        for label, row in answers.items()
        if label.count(",") == 1 and row["score"] is not None
    }
    worst = min(swept, key=lambda label: swept[label]["score"], default=None)
    labels = [_FULL, "exact_topk", "quest", *sets, *([worst] if worst else [])]
    lines = (
        [
            [label, *(f"{cell['scores'][label]:.0%}" for cell in cells)]
            for label in dict.fromkeys(labels)
        ]
        if cells
        else []
    )
    header = ["selects in"]
    header += [f"{cell['task']}, {cell['length']:,} ({cell['samples']})" for cell in cells]
    return markdown_table(header, lines)


def needle_table(result: dict[str, Any]) -> str:
    """How many needles each choice of select layers finds."""
    settings = result["settings"]
    lines = [
        [
            row["kind"],
            row.get("choice", row["policy"]),
            ",".join(map(str, row["layers"])),
            "" if row["budget_tokens"] is None else f"{row['budget_tokens']:,}",
            f"{row['right']} of {row['needles']}",
            str(row["lost"]),
            "right"
            if row["demo_right"]
            else f"\N{LEFT DOUBLE QUOTATION MARK}{_line(row['demo'])}"
            "\N{RIGHT DOUBLE QUOTATION MARK}",
        ]
        for row in result["rows"]
    ]
    title = (
        f"{settings['model']} in bfloat16, one needle in {settings['length']:,} tokens, each "
        "another number and depth: RULER's niah_single_1, telephone numbers as the demo's, or "
        "`offload eval needle`. "
        "Lost: of those that full attention finds. Demo: the needle of `offload generate --demo` "
        "in as many tokens."
    )
    header = ["needles", "choice", "select layers", "budget", "right", "lost", "demo"]
    table = markdown_table(header, lines)
    return "\n\n".join([title, table, machine_line(result["machine"], spreads=False)])


def rules_table(result: dict[str, Any]) -> str:
    """LycheeDecode's four rules at the same mean number of tokens."""
    rows = [row for row in _of(result, "rules") if row["kind"] == "all"]
    lengths = list(rows[0]["tokens"]) if rows else []
    lines = [
        [
            f"{row['rule']}, {row['level']}",
            "" if row["rule"] == "top_k" else f"{row['number']:.3g}",
            *(f"{row['tokens'][length]:,.0f}" for length in lengths),
            _percent(row["mass"]),
            *_judged(result, row["policy"]),
        ]
        for row in rows
    ]
    header = ["rule, mean tokens", "number", *(f"{int(n):,}" for n in lengths), "mass"]
    title = (
        f"{_setting(result)}, a sixth of the heads retrieving, calibrated. Each rule's number "
        f"makes it hand down 128 or 512 tokens on average "
        f"over {rows[0]['prompts'] if rows else 0} prompts of all kinds and "
        "lengths, 2,048 at most; by length: what it then hands down. Mass: attention mass that "
        f"the heads keep which reuse. {_asked(result)}"
    )
    return "\n\n".join(
        [
            title,
            markdown_table([*header, *_judged_names(result)], lines),
            machine_line(result["machine"], spreads=False),
        ]
    )


def equal_rules_table(result: dict[str, Any]) -> str:
    """The four rules where heads attend to as many tokens under each: logits and answers."""
    rows, settings = result["rows"], result["settings"]
    kinds = [kind for kind in dict.fromkeys(row["kind"] for row in rows) if kind != "all"]
    by_kind = {(row["rule"], row["budget"], row["kind"]): row for row in rows}
    lengths = settings["lengths"] if len(settings["lengths"]) > 1 else []

    def tokens(value: float | None) -> str:
        return _NONE if value is None else f"{value:,.0f}"

    lines = []
    for (rule, budget, kind), row in by_kind.items():
        if kind != "all":
            continue
        change = ""
        if rule != "top_k":
            change = f"{row['kl_change']:+.4f}"
            if row["kl_interval"] is not None:
                low, high = row["kl_interval"]
                change += f" ({low:+.4f} \N{HORIZONTAL ELLIPSIS} {high:+.4f})"
        lines.append(
            [
                f"{rule}, {budget:,}",
                "" if row["number"] is None else f"{row['number']:.3g}",
                tokens(row["tokens"]),
                *(tokens(row["tokens_by_length"].get(str(length))) for length in lengths),
                f"{row['kl']:.4f}",
                change,
                *(f"{by_kind[rule, budget, kind]['kl']:.4f}" for kind in kinds),
                _scored(row | {"policy": rule, "interval": row["score_interval"]}),
            ]
        )
    every = next(row for row in rows if row["kind"] == "all")
    title = (
        f"{_setting(result)}, default roles, {_lengths(result)} tokens. Each rule's number was "
        f"searched on {_counted(settings['searched_on'], 'prompt')}, so that the heads that reuse "
        "attend to as many tokens, on the mean, as under top_k; at most "
        f"{settings['most_tokens']:,}. On {_counted(every['prompts'], 'other prompt')}: what they "
        "then attended to; KL of the next token (nats) to full attention, the difference to "
        f"top_k's, and KL by kind of text; right answers, of {every['asked']} (full "
        f"attention {_percent(every['full_score'])}). In brackets 95 % intervals of the "
        "difference."
    )
    header = ["rule, tokens", "number", "attended", *(f"at {n:,}" for n in lengths), "KL"]
    header += ["to top_k", *kinds, "answers"]
    return "\n\n".join(
        [title, markdown_table(header, lines), machine_line(result["machine"], spreads=False)]
    )


def roles_table(result: dict[str, Any]) -> str:
    """Which heads retrieve, and how many."""
    rows = [row for row in _of(result, "roles") if row["kind"] == "all"]
    lines = [
        [
            row["policy"],
            f"{row['retrieving']} of {row['heads']}",
            _percent(row["mass"]),
            *_judged(result, row["policy"]),
        ]
        for row in rows
    ]
    named = [row["policy"] for row in rows]
    others = [label for label in _answers(result, "all") if label not in (*named, _FULL)]
    lines += [[label, "", "", *_judged(result, label)] for label in others]
    recorded = _counted(rows[0]["prompts"] if rows else 0, "prompt")
    title = (
        f"{_setting(result)}, budget {result['settings']['roles_budget']}, rule top_k. After the "
        "name: retrieval heads after layer 0, in which all heads retrieve. Mass: of the heads "
        f"that reuse, over {recorded}. {_asked(result)}"
    )
    header = ["roles", "retrieving", "mass", *_judged_names(result)]
    return "\n\n".join(
        [title, markdown_table(header, lines), machine_line(result["machine"], spreads=False)]
    )


def _judged_names(result: dict[str, Any]) -> list[str]:
    return ["answers", *(["perplexity"] if _texts(result) else [])]


def _judged(result: dict[str, Any], label: str) -> list[str]:
    """Cells of `_judged_names`."""
    cells, texts = [_scored(_answers(result, "all").get(label))], _texts(result)
    if label in texts:
        row = texts[label]
        sure = _interval(row) if row["windows"] >= _FEWEST_WINDOWS else ""
        cells.append(f"{row['change']:+.1%}{sure}")
    elif texts:
        cells.append(_NONE)
    return cells


def _texts(result: dict[str, Any]) -> dict[str, Row]:
    """Perplexities over all lengths, by policy."""
    return {row["policy"]: row for row in _of(result, "text") if row["length"] == 0}


def _asked(result: dict[str, Any]) -> str:
    answers, texts = _answers(result, "all"), list(_texts(result).values())
    said = (
        f"Answers: of {_counted(_prompts(answers), 'other prompt')} (needle, keys, JSON; full "
        f"attention {_score(answers.get(_FULL))})."
    )
    windows = max((row["windows"] for row in texts), default=0)
    if texts:
        said += f" Perplexity: of {_counted(windows, 'text')}, their last tokens, against full "
        said += "attention."
    if windows >= _FEWEST_WINDOWS or any(_interval(row) for row in answers.values()):
        said += " In brackets the 95 % interval of the difference."
    return said


def _counted(number: int, name: str) -> str:
    return f"{number} {name}{'s' * (number != 1)}"


def _of(result: dict[str, Any], part: str) -> list[Row]:
    return [row for row in result["rows"] if row["part"] == part]


def _answers(result: dict[str, Any], task: str) -> dict[str, Row]:
    """Summaries by policy."""
    return {row["policy"]: row for row in _of(result, "answers") if row["task"] == task}


def _prompts(answers: dict[str, Row]) -> int:
    return max((row["prompts"] for row in answers.values()), default=0)


def _score(row: Row | None) -> str:
    return _NONE if row is None else _percent(row["score"])


def _scored(row: Row | None) -> str:
    """With the interval of the difference to full attention."""
    return "" if row is None else _percent(row["score"]) + _interval(row)


def _interval(row: Row) -> str:
    if row["interval"] is None or row["policy"] == _FULL:
        return ""
    low, high = row["interval"]
    return f" ({low:+.0%} \N{HORIZONTAL ELLIPSIS} {high:+.0%})"


def _line(text: str) -> str:
    """As a cell of a table."""
    return " ".join(text.replace("|", "\\|").split())


def _percent(value: float | None) -> str:
    return _NONE if value is None else f"{value:.1%}"


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def _setting(result: dict[str, Any]) -> str:
    return f"{result['settings']['model']} in bfloat16"


def _lengths(result: dict[str, Any]) -> str:
    return ", ".join(f"{n:,}" for n in result["settings"]["lengths"])
