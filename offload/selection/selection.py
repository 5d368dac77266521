"""What the author of a policy writes.

A policy is a frozen dataclass of options plus up to five native callbacks (see `callback`), which
the C++ worker pool calls without the GIL for every query row and selection unit:

    prepare   before the query is known: may overlap the linear layers, and runs beside observe and
              append of the layer before: it touches the arrays of its own layer only
    propose   name candidates, whose keys the runtime then scores on all threads; or answer
    select    write the chosen token indices, sorted and unique, and return how many
    observe   see the attention weights of what was attended
    append    the newest token has entered the cache; earlier ones may have entered without a call

`select` chooses among all tokens by weight (`scans_keys`), among the candidates by weight (with
`propose`; it may be missing then: the heaviest are kept), or by the policy's own means.

Three more parts have defaults that do nothing: `state`, what the policy keeps of a sequence;
`device`, what a GPU can do for it; `calibration`, what it learns from a model.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

from offload.selection.calibration import Calibration
from offload.selection.device_support import DeviceSupport
from offload.selection.layer_state import LayerState

if TYPE_CHECKING:
    from offload.selection.callback import Callback
    from offload.selection.layouts import NumberLayout


class Selection:
    """What to select for a query.

    Attributes:
        scans_keys: score every key first and hand over `importance`, the exact attention weights
            summed over the unit's query heads.
        per_query_head: a selection unit is one query head instead of a KV head with its group.
        number_layout: the numbers that callbacks read.
        observes_every: where tokens are chosen a layer ahead, for a GPU that keeps their rows, one
            step in so many is scored for `observe`. The others choose all that `propose` names.
    """

    name: ClassVar[str]
    scans_keys: ClassVar[bool] = False
    per_query_head: ClassVar[bool] = False
    number_layout: ClassVar[NumberLayout | None] = None
    observes_every: ClassVar[int] = 1
    prepare: ClassVar[Callback | None] = None
    propose: ClassVar[Callback | None] = None
    select: ClassVar[Callback | None] = None
    observe: ClassVar[Callback | None] = None
    append: ClassVar[Callback | None] = None

    state = cached_property(LayerState)
    device = cached_property(DeviceSupport)
    calibration = cached_property(Calibration)
