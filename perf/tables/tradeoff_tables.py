"""What do I lose, what do I gain: quality and milliseconds per token of the same configurations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from offload.bench.decode.engines import GRAPH, STOCK, STOCK_ON_CPU
from perf.tables.markdown import TIMES, Columns, Row, folded, median, table, tokens
from perf.tables.tables import machine_line
from perf.tradeoff.speed import ROOM

_WHERE = {"cuda": "GPU", "cpu": "CPU"}
_STOCK = {"cuda": STOCK, "cpu": STOCK_ON_CPU}
_IN_SHORT = ("full", "lychee_cluster", "lfps", "tidal_decode", "sketch", "quest")
_BUDGET = 1024  # of `_IN_SHORT`
UNKNOWN = "\N{EN DASH}"


def tradeoff_table(result: dict[str, Any]) -> str:
    """A folded table of each length, with a row of each configuration and peer."""
    settings, rows = result["settings"], result["rows"]
    quality = [row for row in rows if row["part"] == "quality"]
    parts = [
        f"{settings['model']}, {settings['dtype']}, batch 1. Quality: RULER, per cent, "
        f"{_how_judged(quality)}. Speed: {_how_timed(rows)}. Both of the very same policies: the "
        "number is the budget, every other option is at its default ([below](#options)).",
    ]
    for length in sorted({row["length"] for row in rows}):
        of_length = {row["label"]: row for row in quality if row["length"] == length}
        found = f"{length:,} tokens" + _counted(list(of_length.values()))
        rows_of_length = table(_columns(rows, length, of_length), _names(result, length))
        parts += [folded(found, rows_of_length)]
    return "\n\n".join([*parts, *_machine_lines(result)])


def in_short_table(result: dict[str, Any], latency: dict[str, Any] | None) -> str:
    """Six policies, a row each: quality and time at the shortest and the longest context.

    Args:
        latency: of `offload bench latency`; None: there is no column of its longest context.
    """
    rows = result["rows"]
    lengths = sorted({row["length"] for row in rows})
    ends = list(dict.fromkeys((lengths[0], lengths[-1])))
    known = {(row["label"], row["length"]): row for row in rows if row["part"] == "quality"}
    columns: dict[str, Any] = {"policy": lambda label: f"`{label.split(' ')[0]}`"}
    for length in ends:
        quality = {label: row for (label, n), row in known.items() if n == length}
        found = _columns(rows, length, quality)
        columns[f"RULER, {tokens(length)}"] = found["RULER"]
    columns[f"difference to exact, {tokens(ends[-1])}"] = lambda label: _difference(found, label)
    for device in devices_of(rows):
        name = f"ms, {_WHERE[device]}"
        columns[f"{name}, {tokens(ends[-1])}"] = found[name]
    if latency is not None:
        columns |= _attention_column(latency)
    labels = ["full", *(f"{name} {_BUDGET}" for name in _IN_SHORT[1:])]
    return table(columns, [label for label in labels if label in result["settings"]["policies"]])


def _difference(columns: Mapping[str, Any], label: str) -> str:
    """The difference with its interval."""
    difference, interval = (columns[name](label) for name in ("difference", "95 % interval"))
    return difference if interval == UNKNOWN else f"{difference} ({interval})"


def _attention_column(latency: dict[str, Any]) -> Columns:
    """How many times as fast as exact attention the layers of a model are on one thread."""
    rows = [row for row in latency["rows"] if row["num_threads"] == 1]
    longest = max(row["kv_len"] for row in rows)
    times = {
        row["policy"]: row["all_layers_microseconds"] for row in rows if row["kv_len"] == longest
    }

    def cell(label: str) -> str:
        name = label.split(" ")[0]
        return f"{times['full'] / times[name]:.1f}{TIMES}" if name in times else UNKNOWN

    return {f"CPU attention, {tokens(longest)}": cell}


def options_table(result: dict[str, Any]) -> str:
    """All options of each policy, as they were."""
    columns: Columns = {
        "policy": lambda item: f"`{item[0]}`",
        "options": lambda item: ", ".join(f"{k} {v}" for k, v in item[1].items()) or "none",
        "KV heads of all layers": lambda item: _heads(result, item[0]),
    }
    header, rule, *lines = table(columns, result["settings"]["policies"].items()).split("\n")
    return "\n".join([header, rule.replace("---:", "---"), *lines])


def speed_of(rows: Sequence[Row], device: str, length: int, label: str) -> Row | None:
    """The row of a configuration or peer that was timed, if it was."""
    wanted = {"part": "speed", "device": device, "length": length, "label": label}
    for row in rows:
        if all(row.get(name) == value for name, value in wanted.items()):
            return row if row["milliseconds"] is not None else None
    return None


def devices_of(rows: Sequence[Row]) -> list[str]:
    """On which speed was measured, a GPU first."""
    found = {row["device"] for row in rows if row["part"] == "speed"}
    return [device for device in _WHERE if device in found]


def _columns(rows: Sequence[Row], length: int, quality: dict[str, Row]) -> Columns:
    def of_quality(name: str, form: str, scale: float = 1.0) -> Any:
        def cell(label: str) -> str:
            value = quality.get(label, {}).get(name)
            return UNKNOWN if value is None else format(scale * value, form)

        return cell

    def interval(label: str) -> str:
        found = quality.get(label, {}).get("interval")
        if found is None or label == "full":
            return UNKNOWN
        low, high = (100 * share for share in found)
        return f"{low:+.1f} … {high:+.1f}"

    columns: dict[str, Any] = {
        "policy": lambda label: f"`{label}`" if label in quality else label,
        "RULER": of_quality("score", ".1f", 100),
        "difference": of_quality("difference", "+.1f", 100),
        "95 % interval": interval,
        "attended": of_quality("attended_tokens", ",.0f"),
        "scored": of_quality("scored_tokens", ",.0f"),
    }
    for device in devices_of(rows):
        where = _WHERE[device]
        columns |= {
            f"ms, {where}": lambda label, d=device: _milliseconds(speed_of(rows, d, length, label)),
            f"{where}, over full": lambda label, d=device: _ratio(rows, d, length, label, "full"),
            f"{where}, over transformers": lambda label, d=device: _ratio(
                rows, d, length, label, _STOCK[d]
            ),
        }
    return columns


def _milliseconds(row: Row | None) -> str:
    return UNKNOWN if row is None else median("milliseconds", ".2f")(row)


def _ratio(rows: Sequence[Row], device: str, length: int, label: str, over: str) -> str:
    ours, theirs = (speed_of(rows, device, length, name) for name in (label, over))
    if ours is None or theirs is None:
        return UNKNOWN
    return f"{theirs['milliseconds'] / ours['milliseconds']:.2f}{TIMES}"


def _names(result: dict[str, Any], length: int) -> list[Any]:
    """Configurations, and peers that were timed at this length."""
    baselines = (GRAPH, STOCK, STOCK_ON_CPU)
    others = dict.fromkeys(
        row["label"]
        for row in result["rows"]
        if row["part"] == "speed" and row["length"] == length and row["engine"] == row["label"]
    )
    known = [name for name in baselines if name in others]
    return [*result["settings"]["policies"], *known, *(x for x in others if x not in known)]


def _heads(result: dict[str, Any], label: str) -> str:
    """What they do, of the first run that says it: a GPU's, if there was one."""
    for device in devices_of(result["rows"]):
        for row in result["rows"]:
            if (row.get("label"), row.get("device")) == (label, device) and row.get("heads"):
                return ", ".join(
                    f"{n} {what.replace('_', ' ')}" for what, n in row["heads"].items()
                )
    return UNKNOWN


def _counted(quality: Sequence[Row]) -> str:
    if not quality:
        return ": no quality measured"
    row = quality[0]
    few = "" if any(row["interval"] for row in quality[1:]) else ", too few for an interval"
    reads = ", read by a GPU" if row["reads_on"] else ""
    if "prompts_read_on" in row:  # by where, if a run without a GPU went on from one with
        reads = f", {row['prompts_read_on']['cuda']} of them read by a GPU"
    return (
        f": {row['prompts']} prompts{reads}, the mean of {row['counting_tasks']} tasks in which "
        f"full attention scores, of at least {row['fewest_samples']} prompts each{few}"
    )


def _machine_lines(result: dict[str, Any]) -> list[str]:
    """Each part's machine; one line where the file does not tell them apart."""
    of_part = result["settings"].get("machines")
    if of_part is None:
        return [machine_line(result["machine"])]
    last = len(of_part) - 1
    return [
        f"*{name[0].upper()}{name[1:]}:* {machine_line(machine, spreads=i == last)}"
        for i, (name, machine) in enumerate(of_part.items())
    ]


def _how_judged(quality: Sequence[Row]) -> str:
    if not quality:
        return "not measured"
    row = quality[0]
    return (
        f"seed {row['seed']}, greedy answers decoded on {row['device']}; the difference is to full "
        "attention on the same prompts, with the interval of `offload eval`; attended, scored: "
        "tokens per step, layer and KV head"
    )


def _how_timed(rows: Sequence[Row]) -> str:
    said = []
    for device in devices_of(rows):
        first = next(row for row in rows if row["part"] == "speed" and row["device"] == device)
        with_gpu = "CPU only"
        if device == "cuda":
            with_gpu = "with a GPU, which holds the KV of the heads said below"
        said.append(f"{with_gpu}, {first['threads']} threads")
    steps = max((row["steps"] or 0 for row in rows if row["part"] == "speed"), default=0)
    return (
        f"{'; '.join(said) or 'not measured'}: medians of {steps} decode steps (of peers fewer) "
        f"that end {ROOM} tokens before that length of real text, where RULER's prompts end; "
        "±: half of the 10th to 90th percentile"
    )
