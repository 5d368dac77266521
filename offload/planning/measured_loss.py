"""What policies lose of hard look-ups, as measured: the table by which `auto` chooses.

`perf/report.py` writes measured_loss.json from perf/results/hard-ruler*.json.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offload.system.json_file import read_json

PACKAGED = Path(__file__).with_name("measured_loss.json")
# Where a policy selects: with a GPU by a predicted query, on a CPU by the true one.
HOT_ROWS, TRUE_QUERY = "hot rows", "true query"
MOST_POINTS = 1.0  # that a policy may lose
WIDEST_POINTS = 1.5  # half of an interval that shows something
MEASURED_MODEL = "SmolLM2-135M"  # for readers; `LossTable.model` is the checkpoint's name


@dataclass(frozen=True)
class Loss:
    """Difference of one policy to full attention on the hard set of RULER.

    Attributes:
        options: of the policy, that are not the defaults, and its budget_tokens.
        where: HOT_ROWS or TRUE_QUERY.
        context: tokens of a prompt.
        points: of 100; less than 0: it loses.
        interval: 95 % of points.
        prompts: that were answered.
    """

    policy: str
    options: Mapping[str, Any]
    where: str
    context: int
    points: float
    interval: tuple[float, float]
    prompts: int

    @property
    def half_width(self) -> float:
        """Half the width of the interval, in points."""
        return (self.interval[1] - self.interval[0]) / 2

    @property
    def shows(self) -> bool:
        """The interval is narrow enough to say something."""
        return self.half_width <= WIDEST_POINTS

    @property
    def is_small(self) -> bool:
        """By the point estimate."""
        return self.points >= -MOST_POINTS


@dataclass(frozen=True)
class LossTable:
    """All that was measured.

    Attributes:
        model: name of the checkpoint that answered.
    """

    model: str
    losses: tuple[Loss, ...]

    @classmethod
    def load(cls, path: Path = PACKAGED) -> LossTable:
        """What `perf.report` wrote.

        Raises:
            FileNotFoundError: there is none.
            ValueError: damaged; names the file and what is wrong.
        """
        document = read_json(path, "table of measured losses")
        try:
            losses = [Loss(**{**row, "interval": _pair(row)}) for row in document["losses"]]
            return cls(document["model"], tuple(losses))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"table of measured losses {path} is damaged: {error!r}") from error

    def find(
        self, policy: str, options: Mapping[str, Any], where: str, context: int
    ) -> Loss | None:
        """What the policy of that name loses there; None: it was not measured with such options.

        Of the budgets that were measured the largest one up to that of `options`, or the smallest
        where all are beyond; of the contexts the one nearest to `context`, by their ratio.
        """
        wanted = _but_budget(options)
        of_policy = (x for x in self.losses if (x.policy, x.where) == (policy, where))
        found = [x for x in of_policy if _but_budget(x.options) == wanted]
        if not found:
            return None
        budget = _up_to(options["budget_tokens"], (x.options["budget_tokens"] for x in found))
        found = [x for x in found if x.options["budget_tokens"] == budget]
        return min(found, key=lambda x: max(x.context / context, context / x.context))

    def told(self, loss: Loss | None, budget_tokens: int, model: str) -> str:
        """A clause that says what a policy loses, and how sure that is.

        Args:
            loss: as `find` has it.
            budget_tokens: of the policy that runs.
            model: name of the checkpoint that runs; "": none that has one.
        """
        if loss is None:
            return "loss of hard look-ups not measured"
        length = loss.context
        tokens = f"{length // 1024}K" if length % 1024 == 0 else f"{length:,} tokens"
        said = f"hard look-ups at {tokens}: {loss.points:+.1f} ± {loss.half_width:.1f} points of "
        said += "full attention"
        notes = [f"on {MEASURED_MODEL}"] if model != self.model else []
        budget = loss.options["budget_tokens"]
        notes += [f"with budget {budget:,}"] if budget != budget_tokens else []
        said += f" (measured {' '.join(notes)})" if notes else ""
        if loss.interval[1] < 0:
            return f"{said}, which shows a loss"
        return said if loss.shows else f"{said}, too wide to show that nothing is lost"


@functools.cache
def measured_losses() -> LossTable:
    """The table that comes with the package."""
    return LossTable.load()


def _but_budget(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name != "budget_tokens"}


def _pair(row: Mapping[str, Any]) -> tuple[float, float]:
    low, high = row["interval"]
    return float(low), float(high)


def _up_to(most: int, values: Iterable[int]) -> int:
    every = sorted(values)
    return max((value for value in every if value <= most), default=every[0])
