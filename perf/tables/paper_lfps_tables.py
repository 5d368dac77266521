"""Markdown of perf/results/paper-lfps.json: what LFPS's paper says beside what we measure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from operator import itemgetter
from statistics import fmean
from typing import Any

from offload.bench.attention.measure import SHAPES
from offload.bench.eval.summary import mean, summaries
from perf.tables.markdown import TIMES, Columns, Row, known, mark, table
from perf.tables.selection_tables import PAPER_CANDIDATES, PAPER_LENGTHS
from perf.tables.tables import machine_line

# "Learn from the Past: Fast Sparse Indexing for Large Language Model Decoding"; Llama-3.1-8B.
PAPER_OVERLAP, PAPER_GAIN, PAPER_QUEST, PAPER_CLUSTERED = "85%", "+3", "< 50%", "50 to 80%"
PAPER_SCORED = dict(zip(PAPER_LENGTHS, PAPER_CANDIDATES[0.2], strict=True))  # Table 4
# Table 3: share of the heads that are bypassed, and the score of Qasper.
PAPER_BYPASS: dict[float | None, tuple[float | None, float | None]] = {
    1.0: (0.0, 38.94),
    0.95: (0.025, 39.34),
    0.9: (0.061, 39.21),
    0.85: (0.12, 38.95),
    0.8: (0.16, 36.65),
    0.75: (0.23, 36.13),
    0.7: (0.32, 36.29),
}
PAPER_BATCH = {("lfps", 8): 45.0, ("quest", 8): 30.0}  # Figure 5b: tokens/s; 50 % over Quest
PAPER_OVER_FULL = {4096: 4.3, 16384: 8.1, 65536: 14.7, 131072: 22.8}  # Figure 5a, one core

Table = Callable[[dict[str, Any]], str]


def _of_parts(*parts: str) -> Callable[[Table], Table]:
    """A table of these parts of the results; what measures those that are missing, if any is."""

    def wrapped(make: Table) -> Table:
        @wraps(make)
        def made(result: dict[str, Any]) -> str:
            missing = [part for part in parts if not _part(result, part)]
            return _not_measured(missing) if missing else make(result)

        return made

    return wrapped


@_of_parts("overlap")
def paper_lfps_overlap_table(result: dict[str, Any]) -> str:
    """Figure 2 and Table 4: the paper's numbers beside ours."""
    rows, settings = _part(result, "overlap"), result["settings"]
    lengths = sorted({row["length"] for row in rows})

    def line(claim: str, paper: str, ours: Callable[[int], str]) -> Row:
        return {"claim": claim, "paper": paper} | {n: ours(n) for n in lengths}

    def share(rule: str | None, name: str) -> Callable[[int], str]:
        return lambda n: f"{_mean(rows, rule, n, name):.0%}"

    def gain(n: int) -> str:
        points = _mean(rows, "LFPS", n, "overlap") - _mean(rows, "no expansion", n, "overlap")
        return f"{100 * points:+.1f}"

    scored = [f"{PAPER_SCORED[n]:.1%}" for n in lengths if n in PAPER_SCORED]
    lines = [
        line("overlap, no expansion", PAPER_OVERLAP, share("no expansion", "overlap")),
        line("what expansion adds, points", PAPER_GAIN, gain),
        line("overlap of Quest's pages of 16, all heads", PAPER_QUEST, share(None, "quest")),
        line("chosen, next one at most 2 further", PAPER_CLUSTERED, share(None, "clustered")),
        line(
            "keys scored (Table 4)",
            " / ".join(scored),
            lambda n: f"{_mean(rows, 'LFPS', n, 'candidates'):.1%}",
        ),
        line("heads bypassed (Table 3)", "12%", share(None, "bypassed_0.85")),
    ]
    columns = {"": "{claim}", "paper": "{paper}"} | _by_length(lengths)
    texts = sorted({(row["text"], row["seed"]) for row in rows})
    title = (
        f"{settings['model']}, layers from the third on, each query head for itself, alpha 0.2, "
        f"bypass at 0.85: the best 2 % of the tokens beside the sinks, over {settings['steps']} "
        f"decode steps of {len(texts)} texts at each length "
        f"({', '.join(dict.fromkeys(kind for kind, _ in texts))}); means."
    )
    return "\n\n".join(
        [title, table(columns, lines), machine_line(result["machine"], spreads=False)]
    )


@_of_parts("overlap")
def paper_lfps_ablation_table(result: dict[str, Any]) -> str:
    """Overlap of every rule at every length, and what it scores for it."""
    rows = _part(result, "overlap")
    lengths = sorted({row["length"] for row in rows})
    longest = lengths[-1]

    def cell(rule: str | None, name: str, n: int) -> str:
        found = [100 * row[name] for row in rows if (row["rule"], row["length"]) == (rule, n)]
        return f"{fmean(found):.0f} ({min(found):.0f} to {max(found):.0f})"

    rules = [rule for rule in dict.fromkeys(row["rule"] for row in rows) if rule is not None]
    lines = [
        {"rule": rule}
        | {n: cell(rule, "overlap", n) for n in lengths}
        | {
            "scored": f"{_mean(rows, rule, longest, 'candidates'):.1%}",
            "far": f"{_mean(rows, rule, longest, 'overlap_far'):.0%}",
            "mass": f"{_mean(rows, rule, longest, 'mass'):.1%}",
        }
        for rule in rules
    ]
    lines.append(
        {"rule": "Quest's pages of 16", "scored": "", "far": ""}
        | {n: cell(None, "quest", n) for n in lengths}
        | {"mass": f"{_mean(rows, None, longest, 'quest_mass'):.1%}"}
    )
    columns = {"rule": "{rule}"} | _by_length(lengths)
    columns |= {name: f"{{{name}}}" for name in ("scored", "far", "mass")}
    title = (
        "Overlap with exact top-k, per cent: mean over texts (lowest to highest). LFPS: alpha 0.2, "
        "both tables, neighbours -1, 1 and 2 above the mean, bypass at 0.85, the best 2 %; other "
        f"rows change what they say. At {longest:,} tokens: scored, the candidates; far, overlap "
        "without the last 64 tokens; mass, attention of what was chosen over exact top-k's. Means "
        "leave out heads that are bypassed; `no bypass` and Quest's have all of them, so compare "
        "these two."
    )
    return "\n\n".join([title, table(columns, lines)])


@_of_parts("overlap")
def paper_lfps_steps_table(result: dict[str, Any]) -> str:
    """LFPS's overlap over the decode steps, and by text."""
    rows, steps = _part(result, "overlap"), result["settings"]["steps"]
    lengths = sorted({row["length"] for row in rows})

    def line(what: str, name: str, text: str | None = None) -> Row:
        of_text = [row for row in rows if text in (None, row["text"])]
        cells = {n: f"{_mean(of_text, 'LFPS', n, name):.0%}" for n in lengths}
        return {"what": what} | cells

    quarters = [
        line(f"steps {steps * i // 4 + 1} to {steps * (i + 1) // 4}", f"overlap_{i + 1}")
        for i in range(4)
    ]
    texts = [line(text, "overlap", text) for text in dict.fromkeys(row["text"] for row in rows)]
    columns = {"overlap of LFPS": "{what}"} | _by_length(lengths)
    return table(columns, [*quarters, *texts])


def paper_lfps_bypass_table(result: dict[str, Any], timed: dict[str, Any] | None = None) -> str:
    """Table 3: quality and speed by the threshold of the bypass; of what was measured of it.

    Args:
        timed: results of another machine, which measured the speed and what text loses.
    """
    missing = [part for part in ("overlap", "ruler") if not _part(result, part)]
    return _not_measured(missing) if missing else _bypass_table(result, timed or result)


def _bypass_table(result: dict[str, Any], of_timed: dict[str, Any]) -> str:
    settings, heads = result["settings"], _part(result, "overlap")
    length = settings["bypass_length"]
    prompts = _part(result, "ruler")
    answered = summaries(prompts, list(prompts[0]["answers"]))
    ruler = {row["policy"]: row for row in answered}
    speed = {row["policy"]: row for row in _part(of_timed, "speed")}
    texts: dict[str, list[Row]] = {}
    for row in _part(of_timed, "bypass"):
        limit = row["options"].get("bypass_threshold")
        name = row["policy"] if limit is None else f"{row['policy']} {limit}"
        texts.setdefault(name, []).append(row)

    def line(name: str) -> Row:
        limit = float(name.split()[1]) if " " in name else None
        asked, timed = ruler.get(name), speed.get(name)
        bypassed, qasper = PAPER_BYPASS.get(limit, (None, None))
        ours = None
        if limit is not None:
            ours = 0.0 if limit == 1 else _mean(heads, None, length, f"bypassed_{limit}")
        return {
            "name": name,
            "paper": bypassed,
            "bypassed": ours,
            "qasper": qasper,
            "ruler": None if asked is None else 100 * asked["score"],
            "interval": "" if asked is None else _interval(asked),
            "microseconds": None if timed is None else timed["microseconds"],
            **{
                key: mean([row[key] for row in texts.get(name, [])])
                for key in ("mass_of_topk", "output_error", "kl", "perplexity_change")
            },
        }

    columns: dict[str, Any] = {
        "": "{name}",
        "heads bypassed, paper": known("paper", ".1%"),
        "ours": known("bypassed", ".1%"),
        "Qasper, paper": known("qasper", ".2f"),
        f"RULER, ours, {len(prompts)} prompts": known("ruler", ".1f"),
        "to full, 95 %": "{interval}",
    }
    titles = [
        f"{settings['model']} at {length:,} tokens, a budget of {settings['bypass_budget']}. "
        "Heads bypassed: as in the table of overlap."
    ]
    if texts:
        columns |= {
            "KL": known("kl", ".4f"),
            "perplexity": known("perplexity_change", "+.2%"),
            "error": known("output_error", ".3f"),
            "mass of top-k": known("mass_of_topk", ".1%"),
        }
        titles.append(
            "KL, perplexity (against full attention), error of a layer's output and mass: means "
            f"over {len(next(iter(texts.values())))} texts, {settings['steps']} steps each."
        )
    if speed:
        columns["\N{MICRO SIGN}s"] = known("microseconds", ".1f")
        titles.append("\N{MICRO SIGN}s: decode attention per layer on one thread, docstrings.")
    lines = [line(name) for name in dict.fromkeys([*texts, *ruler])]
    missing = [part for part in ("bypass", "speed") if not _part(of_timed, part)]
    parts = [
        " ".join(titles),
        table(columns, lines),
        machine_line(result["machine"], spreads=False),
    ]
    if of_timed is not result:
        where = machine_line(of_timed["machine"], spreads=False)
        parts.append(f"*KL, perplexity, error, mass and speed:* {where}")
    return "\n\n".join([*parts, *([_not_measured(missing)] if missing else [])])


@_of_parts("batch")
def paper_lfps_batch_table(result: dict[str, Any]) -> str:
    """Figure 5b: tokens/s by batch size."""
    rows, settings = _part(result, "batch"), result["settings"]
    layers = SHAPES[settings["batch_shape"]].num_layers
    sizes = sorted({row["batch_size"] for row in rows})
    speed = {
        (row["policy"], row["batch_size"]): 1e6 / layers / row["all_layers_microseconds"]
        for row in rows
    }
    names = dict.fromkeys(row["policy"] for row in rows)
    lines = [
        {"policy": name, "paper": PAPER_BATCH.get((name, sizes[-1]))}
        | {f"batch {size}": f"{speed[name, size]:.0f}" for size in sizes}
        | {
            f"LFPS over it at {size}": f"{speed['lfps', size] / speed[name, size]:.1f}{TIMES}"
            for size in sizes[:: len(sizes) - 1 or 1]
        }
        for name in names
    ]
    columns: Columns = {
        "policy": "`{policy}`",
        **{name: f"{{{name}}}" for name in lines[0] if name not in ("policy", "paper")},
        f"paper at {sizes[-1]}": known("paper", ".0f"),
    }
    title = (
        f"Tokens/s of all sequences together at {settings['batch_depth']:,} tokens each, decode "
        f"attention of {layers} layers of {settings['batch_shape']} on {rows[0]['num_threads']} "
        f"threads, a budget of {settings['batch_budget']:,}; made keys; two layers of sparse "
        "policies are dense, as in the whole model. The paper's include the rest of the model, on "
        "another machine, at a length that it does not say."
    )
    return "\n\n".join(
        [title, table(columns, lines), machine_line(result["machine"], spreads=False)]
    )


def paper_lfps_context_table(result: dict[str, Any]) -> str:
    """Figure 5a, from perf/results/latency.json."""
    threads = min(row["num_threads"] for row in result["rows"])
    rows = {
        (row["policy"], row["kv_len"]): row
        for row in result["rows"]
        if row["num_threads"] == threads
    }
    lines = []
    for n, paper in PAPER_OVER_FULL.items():
        if ("lfps", n) in rows:
            lfps, full = rows["lfps", n], rows["full", n]
            lines.append(
                lfps
                | {"n": n, "paper": paper}
                | {"whole": full["microseconds"] / lfps["all_layers_microseconds"]}
            )
    columns: Columns = {
        "tokens": "{n:,}",
        "paper": f"{{paper:.1f}}{TIMES}",
        "ours, all layers": lambda x: f"{x['whole']:.1f}{TIMES} {mark(x['whole'] >= x['paper'])}",
        "layers that select": f"{{speedup_over_full:.1f}}{TIMES}",
        "these over exact top-k": f"{{speedup_over_exact_topk:.1f}}{TIMES}",
        "keys scored": "{candidate_share:.1%}",
    }
    return "\n\n".join([table(columns, lines), machine_line(result["machine"], spreads=False)])


def _not_measured(parts: Sequence[str]) -> str:
    name = "paper-lfps" if {"overlap", "ruler"} & set(parts) else "paper-lfps-speed"
    return (
        f"*Not measured yet: run `python -m perf.papers.lfps --name {name} --parts "
        f"{' '.join(parts)}`, with `--add` to what is there.*"
    )


def _part(result: dict[str, Any], part: str) -> list[Row]:
    return [row for row in result["rows"] if row["part"] == part]


def _mean(rows: Sequence[Row], rule: str | None, length: int, name: str) -> float:
    """Over the texts of a length."""
    return fmean(row[name] for row in rows if (row["rule"], row["length"]) == (rule, length))


def _by_length(lengths: Sequence[int]) -> dict[str, Callable[[Any], str]]:
    return {f"{n:,} tokens": itemgetter(n) for n in lengths}


def _interval(row: Row) -> str:
    if row["interval"] is None:
        return ""
    low, high = (100 * x for x in row["interval"])
    return f"{low:+.1f} … {high:+.1f}"
