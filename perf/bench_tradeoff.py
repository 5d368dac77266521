r"""What do I lose, what do I gain: `python -m perf.bench_tradeoff --out FILE.json`.

One list of policies with all their options is timed and judged on one model. Speed first, alone on
the machine: decode steps behind real text, the KV cache on the host, full attention of ours and
with peers. Then quality: `offload eval ruler`, several processes at once.

FILE is written after each length of the speed and after each task and length of the quality, whose
answers FILE's folder FILE.answers keeps. The same command goes on from there; `--only` does one of
the two, and each of quality, speed with a GPU and speed without may be of a machine of its own. On
a machine with a GPU:

    python -m perf.bench_tradeoff --out t.json --only speed --device cuda,cpu
    python -m perf.bench_tradeoff --out t.json --only quality --reads-on cuda --processes 8
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from offload.bench.decode.engines import ENGINES
from offload.bench.eval.labels import policy_label, policy_options
from offload.bench.eval.record_file import Record
from offload.bench.eval.ruler import RULER_TASKS
from offload.bench.eval.summary import FULL, cell_rows, counting_cells, summaries
from offload.cli.bench.options import option_values, policy_grid
from offload.policies import Policy
from offload.policies.registry import available_policies, make_policy
from offload.system.memory import available_cpus
from perf.results_file import start_machine, write_results
from perf.tradeoff.quality import answer_all, records_of
from perf.tradeoff.speed import Row, speed_rows

MODEL = "smollm2-135m-instruct-32k"
LENGTHS = (4096, 8192, 16384, 32768)
_SAME_MACHINE = ("cpu", "cpus_usable", "gpus", "commit")


def label_of(policy: Policy) -> str:
    """Name, budget, and the options that are not the defaults."""
    if not policy.selects:
        return policy.name
    name, *changed = policy_label(policy).split(" ")
    return " ".join([name, str(policy.budget_tokens), *changed])


class Document:
    """FILE: its rows, to which each measurement is added as soon as it is there.

    Args:
        path: made if it is not there.
        settings: that all rows share.

    Raises:
        ValueError: it has rows with other settings.
    """

    def __init__(self, path: Path, settings: dict[str, Any], commit: str | None) -> None:
        self.path, self.settings, self.rows = path, settings, list[Row]()
        self._here = self.machine = start_machine(commit)
        self._written = dict(settings)
        if not path.exists():
            return
        found = json.loads(path.read_text("utf-8"))
        self._refuse_others(settings, found["settings"])
        self.rows, self.machine = found["rows"], found["machine"]
        self._written = found["settings"]

    def begin(self, part: str, device: str, options: dict[str, Any]) -> None:
        """Rows of a part on a device come next, made here with these options.

        Raises:
            ValueError: there are some that were made with others, or by another machine or commit.
        """
        made_with = self._written.setdefault("made_with", {})
        machines = self._written.setdefault("machines", {})
        name = f"{part} on {device}"
        if self.has(part=part, device=device):
            self._refuse_others(options, made_with.get(name, {}))
            here = {which: self._here[which] for which in _SAME_MACHINE}
            self._refuse_others(here, machines.get(name, {}))
        else:
            machines[name] = self._here
        made_with[name] = options

    def _refuse_others(self, now: dict[str, Any], then: dict[str, Any]) -> None:
        for name, value in json.loads(json.dumps(now)).items():
            if then.get(name) != value:
                was = then.get(name, "what it does not say")
                raise ValueError(
                    f"{self.path} was made with {name} = {was}, but this run has {value}; give "
                    "another --out, or the same options"
                )

    def replace(self, rows: list[Row], **which: Any) -> None:
        """Write `rows` in place of those that are `which`."""
        kept = [any(row.get(k) != v for k, v in which.items()) for row in self.rows]
        at = kept.index(False) if False in kept else len(kept)
        behind = [row for row, is_kept in zip(self.rows, kept, strict=True) if is_kept][at:]
        self.rows = self.rows[:at] + rows + behind
        write_results(
            self.path.stem,
            machine=self.machine,
            settings=self._written,
            rows=self.rows,
            folder=self.path.parent,
        )

    def has(self, **which: Any) -> bool:
        """Whether there are such rows."""
        return any(all(row.get(k) == v for k, v in which.items()) for row in self.rows)


def measure_speed(
    document: Document, policies: list[Policy], device: str, options: argparse.Namespace
) -> None:
    """Rows of every length that has none."""
    on_cpu = device == "cpu"
    baselines = [peer for peer in options.peers if peer == "transformers" or not on_cpu]
    made_with = {"--steps": options.steps, "--repeats": options.repeats}
    made_with |= {"--peers": baselines, "--peer-steps": options.peer_steps}
    if on_cpu:
        made_with |= {"--threads": options.threads, "--reads-on": options.reads_on}
    document.begin("speed", device, made_with)
    lengths = [
        n for n in options.lengths if not document.has(part="speed", device=device, length=n)
    ]
    if not lengths:
        return
    say(f"speed on {device}, {len(policies)} policies: opening the model")
    labels = list(document.settings["policies"])
    for rows in speed_rows(options, policies, labels, device, baselines, lengths):
        length = rows[0]["length"]
        document.replace(rows, part="speed", device=device, length=length)
        times = [row["milliseconds"] for row in rows if row["milliseconds"]]
        say(f"{device}, {length:,}: {min(times):.2f} to {max(times):.2f} ms; full {times[0]:.2f}")


def measure_quality(document: Document, options: argparse.Namespace) -> None:
    """Rows of what the files of answers have, after as many more as there is time for."""
    device = options.quality_device
    ways = {"device": device, "reads_on": options.reads_on, "seed": options.seed}
    document.begin("quality", device, {"--seed": options.seed, "--reads-on": options.reads_on})
    say(f"quality on {device}: {options.processes} processes")
    folder = options.out.with_suffix(".answers")

    def write(length: int) -> None:
        if records := records_of(folder, length, document.settings["policies"]):
            say(write_quality(document, records, length, ways))

    answer_all(options, folder, say, write)


def write_quality(
    document: Document, records: list[Record], length: int, ways: dict[str, Any]
) -> str:
    """The rows of a length, all of whose records these are; returns what they say in a line."""
    labels = list(document.settings["policies"])
    counting = counting_cells(records)
    counts = {
        "prompts": len(records),
        "counting_tasks": len(counting),
        "fewest_samples": min(map(len, counting.values()), default=0),
    }
    common = {"length": length, **ways}
    lines = [
        {"part": "quality", **common, **counts, "label": line.pop("policy"), **line}
        for line in summaries(records, labels)
    ]
    cells = [{"part": "cells", **common, **cell} for cell in cell_rows(records, labels)]
    which = {"length": length, "device": ways["device"]}
    document.replace(lines, part="quality", **which)
    document.replace(cells, part="cells", **which)
    full, *others = [100 * (line["score"] or 0) for line in lines]
    worst = min(others, default=full)
    return f"{length:,} tokens, {counts}: full {full:.1f}, others {worst:.1f} and more"


_START = time.monotonic()


def say(line: str) -> None:
    """Print a line with the time."""
    print(f"[{time.monotonic() - _START:6.1f} s] {line}", flush=True)


def _counts(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _names(text: str) -> list[str]:
    return text.split(",")


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="FILE.json")
    add("--only", choices=("quality", "speed"), help="default: speed, then quality")
    add("--commit", help="of this tree, where there is no repository")
    add("--model", default=MODEL)
    add("--dtype", default="bfloat16")
    add("--policies", type=_names, default=available_policies())
    add("--budgets", type=_counts, default=[1024])
    add("--option", action="append", default=[], metavar="POLICY.KEY=VALUE")
    add("--lengths", type=_counts, default=list(LENGTHS))
    add("--reads-on", help="cuda: a GPU reads the prompts where the CPU decodes")
    quality = parser.add_argument_group("quality")
    add = quality.add_argument
    add("--tasks", type=_names, default=list(RULER_TASKS))
    add("--samples", type=int, default=4, help="of each task and length")
    add("--seed", type=int, default=0)
    add("--quality-device", default="cpu", help="where answers are decoded")
    add("--processes", type=int, default=1)
    add("--quality-threads", type=int, default=2, help="of each process")
    add("--seconds", type=float, default=1e6, help="after which it ends with what there is")
    speed = parser.add_argument_group("speed")
    add = speed.add_argument
    add("--device", type=_names, default=["cuda" if torch.cuda.is_available() else "cpu"])
    add("--threads", type=int, default=min(8, available_cpus()), help="without a GPU")
    add("--steps", type=int, default=36)
    add("--repeats", type=int, default=2)
    add("--peers", type=_names, default=["graph", "transformers"], help=", ".join(ENGINES))
    add("--peer-steps", type=int, default=8)
    return parser.parse_args()


def main() -> None:
    options = parsed()
    selecting = [name for name in options.policies if name != FULL]
    values = option_values(options.option, option="--option")
    grid = policy_grid(selecting, options.budgets, values, option="--option")
    policies = [make_policy(FULL), *grid]
    settings = {
        "model": options.model,
        "dtype": options.dtype,
        "policies": {label_of(policy): policy_options(policy) for policy in policies},
        "text": "docstrings of Python's library",
    }
    document = Document(options.out, settings, options.commit)
    if options.only != "quality":
        for device in options.device:
            measure_speed(document, policies, device, options)
    if options.only != "speed":
        measure_quality(document, options)


if __name__ == "__main__":
    main()
