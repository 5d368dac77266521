"""Write docs/compatibility.md from what the programs do: `python -m compatibility.document`.

Run it with --write and with tests/ in PYTHONPATH, as `make report` does. With --check nothing is
written, and the exit code is 1 if the document would change. Rows of defects are written, too, and
the exit code is 1.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from compatibility.forward import CACHES, CHANGES, PASSES
from compatibility.generation import CALLS, OPTIONS
from compatibility.surroundings import LOADING, USERS
from compatibility.table import DEFECTS, Feature, Verdict, both_sides, judge

DOCUMENT = Path(__file__).parents[2] / "docs" / "compatibility.md"

SECTIONS: dict[str, list[Feature]] = {
    "Calls of generate()": CALLS,
    "Other inputs and options of generate()": OPTIONS,
    "Forward passes": PASSES,
    "Caches and conversations": CACHES,
    "Changes of a model": CHANGES,
    "Loading and saving": LOADING,
    "Used with": USERS,
}
FEATURES = {feature.name: feature for features in SECTIONS.values() for feature in features}
if len(FEATURES) != sum(map(len, SECTIONS.values())):
    raise ValueError("two features have one name: no row may stand for both")

_HEAD = """\
# Compatibility

Every row is a small program in `tests/compatibility`, run with the stock transformers model and
with ours: a tiny llama in float32 on the CPU, `auto` where no policy is named (exact there).
*works* says that tokens and texts are the same and other numbers agree within 0.1 % (what else is
allowed is said).
*refused* says that ours raises an error instead of a wrong answer; its words stand beside it. This
file is written by `make report` from what the programs do, and `make test` fails where it says
something else.

"""


def render(verdicts: dict[str, Verdict]) -> str:
    """The whole document; `verdicts` has all of FEATURES."""
    of_calls = [verdicts[feature.name] for feature in CALLS]
    num_calls = sum(verdict.num_calls for verdict in of_calls)
    num_same = sum(verdict.num_same for verdict in of_calls)
    parts = [
        _HEAD,
        f"**{num_same} of {num_calls}** calls of `generate()`, in the manner of transformers' own "
        "tests of generation, give the stock model's tokens, scores and beams in float32. In "
        "bfloat16 they do up to rounding: 94 % of the next tokens of real text are the same, where "
        "transformers with its own static cache has 95 % ([measured](performance.md)).\n",
    ]
    for title, features in SECTIONS.items():
        parts.append(f"\n## {title}\n\n| | result | |\n| --- | --- | --- |\n")
        parts += [row(feature, verdicts[feature.name]) + "\n" for feature in features]
    return "".join(parts)


def row(feature: Feature, verdict: Verdict) -> str:
    """A line of a table: feature, result, and the words of a refusal with its reason."""
    result = f"**{verdict.result}**" if verdict.result in DEFECTS else verdict.result
    if verdict.num_calls > 1:
        result += f", {verdict.num_same} of {verdict.num_calls} calls"
    notes = [feature.why] if feature.why else []
    if verdict.words:
        words = verdict.words.replace("`", "'").replace("|", "\\|")
        notes.insert(0, f"`{words}`")
    return f"| {feature.name} | {result} | {'; '.join(notes)} |".replace("|  |", "| |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--write", action="store_true", help="write docs/compatibility.md")
    action.add_argument("--check", action="store_true", help="change nothing; exit 1 if outdated")
    arguments = parser.parse_args()
    with both_sides() as (stock, ours):
        verdicts = {name: judge(feature, stock, ours) for name, feature in FEATURES.items()}
    text = render(verdicts)
    if arguments.write:
        DOCUMENT.write_text(text, "utf-8")
    elif DOCUMENT.read_text("utf-8") != text:
        sys.exit(f"{DOCUMENT.name} does not say what the programs do; run: make report")
    defects = [name for name, verdict in verdicts.items() if verdict.result in DEFECTS]
    if defects:
        sys.exit("defects: " + ", ".join(defects))


if __name__ == "__main__":
    main()
