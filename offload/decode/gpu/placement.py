"""Where each KV head of each layer is attended in a decode step, and the JSON file that says so.

    CPU     the host's worker pool attends to the selected rows of host pages
    GPU     all of the head's KV stays on the GPU, which attends to it; where the policy's role of
            the head is RETRIEVE, the GPU also takes the top-k for the heads below that wait for it
    GATHER  the GPU fetches the selected rows from host pages and attends to them: only where the
            selection is known before the query, and on the GPU
    CODES   as CPU, but the GPU keeps codes of the head's keys and lists by them which tokens the
            host should consider
    HOT     the GPU keeps a bounded set of the head's rows and attends to it; which, the host
            chooses a layer ahead, by the query that the next layer's projection makes of this
            layer's input
    FOUND   as HOT, but the GPU chooses by itself, by codes of the head's keys and the true query

A placement is made by `placement_choice`, from what the machine was measured to do.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from offload.selection.policy import DENSE, RETRIEVE, REUSE, SELECT, Policy
from offload.selection.unit_roles import check_roles
from offload.system.json_file import read_json

UInt8Array = npt.NDArray[np.uint8]
BoolArray = npt.NDArray[np.bool_]

HOT_BUDGETS = 3  # rows that stay, in budgets: what is attended to beside the choice costs little
_MOST_FOUND = 32767  # hot rows of a head, which the GPU's map of them tells apart
_FORMAT = "offload-placement-1"


class Place(enum.IntEnum):
    """Where a KV head of a layer is attended."""

    CPU = 0  # the host's pool attends to rows of host pages
    GPU = 1  # the GPU keeps all of its KV and attends
    GATHER = 2  # the GPU fetches the selected rows from host pages and attends
    CODES = 3  # the host's pool attends, to tokens among those that the GPU lists
    HOT = 4  # the GPU attends, to rows that it keeps and the host chooses a layer ahead
    FOUND = 5  # the GPU attends, to rows that it keeps and finds by codes of all keys


LETTERS = dict(zip(Place, ".Ggchf", strict=True))
_PLACES = {letter: place for place, letter in LETTERS.items()}


@dataclass(frozen=True, eq=False)
class HeadPlacement:
    """The place of every KV head of one model.

    Attributes:
        places: uint8 [num_layers, num_kv_heads], values of `Place`; read-only.
        source: the file it was read from, for messages; "" if there is none.

    Raises:
        ValueError: another shape or type, or values that are no place.
    """

    places: UInt8Array
    source: str = ""

    def __post_init__(self) -> None:
        places = np.array(self.places)
        if places.ndim != 2 or 0 in places.shape:
            raise ValueError(
                f"{self._name}: places must be [num_layers, num_kv_heads], "
                f"got shape {list(places.shape)}"
            )
        if places.dtype.kind not in "iu":
            raise ValueError(f"{self._name}: places must be integers, got {places.dtype}")
        if places.min() < min(Place) or places.max() > max(Place):
            known = ", ".join(f"{place.value} = {place.name}" for place in Place)
            raise ValueError(
                f"{self._name}: places must be {known}, got {places.min()} to {places.max()}"
            )
        places = places.astype(np.uint8)
        places.flags.writeable = False
        object.__setattr__(self, "places", places)

    @classmethod
    def filled(cls, num_layers: int, num_kv_heads: int, place: Place) -> HeadPlacement:
        """All heads in one place."""
        return cls(np.full((num_layers, num_kv_heads), place, np.uint8))

    @property
    def num_layers(self) -> int:
        return int(self.places.shape[0])

    @property
    def num_kv_heads(self) -> int:
        return int(self.places.shape[1])

    @property
    def on_device(self) -> BoolArray:
        """[num_layers, num_kv_heads]: heads to which the GPU attends, and not the host."""
        attended: BoolArray = (self.places == Place.GPU) | (self.places == Place.GATHER)
        return attended

    def of_heads(self, heads: range) -> HeadPlacement:
        """The part of some KV heads of each layer, as a rank has them."""
        return HeadPlacement(self.places[:, heads.start : heads.stop].copy(), self.source)

    def counts(self, place: Place) -> list[int]:
        """How many heads of each layer are in a place."""
        return [int(n) for n in (self.places == place).sum(1)]

    def check_model(self, *, num_layers: int, num_kv_heads: int) -> None:
        """Refuse a model that this placement is not for.

        Raises:
            ValueError: names the file and both shapes.
        """
        if self.places.shape != (num_layers, num_kv_heads):
            raise ValueError(
                f"{self._name} was made for another model: it has num_layers={self.num_layers}, "
                f"num_kv_heads={self.num_kv_heads}, this model has num_layers={num_layers}, "
                f"num_kv_heads={num_kv_heads}; make one for it with `offload plan --json`"
            )

    def check_policy(self, policy: Policy, num_qo_heads: int, windows: Sequence[int] = ()) -> None:
        """Refuse places that the policy's heads cannot have when a GPU decodes.

        Args:
            windows: tokens that each layer sees, 0: all; (): of all of them.

        Raises:
            ValueError: names the layer, the head and the rule.
        """
        check_dense_until(policy)
        for layer_idx in np.flatnonzero(windows).tolist():
            elsewhere = np.flatnonzero(self.places[layer_idx] != Place.GPU)
            if elsewhere.size:
                self._refuse(
                    layer_idx,
                    int(elsewhere[0]),
                    f"the layer sees a window of {windows[layer_idx]} tokens, and such layers stay "
                    "on the GPU as a whole",
                )
        roles = kv_head_roles(policy, self.num_layers, num_qo_heads, self.num_kv_heads)
        if roles is None:
            self._check_full(policy)
            return
        coded = has_codes(policy, roles)
        allowed = may_stay_on_gpu(policy, roles)
        gathered = may_be_gathered(policy, roles, self.places)
        hot = may_be_hot(policy, roles, self.places)
        found = may_be_found(policy, roles, self.places)
        awaited = awaited_heads(roles, self.places, shares_selection=policy.shares_selection)
        for layer_idx, (of_layer, places) in enumerate(zip(roles, self.places, strict=True)):
            on_gpu = places == Place.GPU
            if (of_layer == DENSE).all() and not on_gpu.all():
                self._refuse(
                    layer_idx,
                    int(np.flatnonzero(~on_gpu)[0]),
                    f"policy {policy.name!r} leaves this layer dense, and dense layers stay on "
                    "the GPU as a whole",
                )
            wrong = np.flatnonzero(on_gpu & ~allowed[layer_idx])
            if wrong.size and not (on_gpu.all() and not awaited[layer_idx].any()):
                self._refuse(
                    layer_idx,
                    int(wrong[0]),
                    f"policy {policy.name!r} has it {_ROLE_NAMES[int(of_layer[wrong[0]])]}; only "
                    "heads that attend to everything, and then publish a plain top-k, stay on "
                    "the GPU, or a whole layer whose selections no head elsewhere reuses",
                )
            retrieves = of_layer == RETRIEVE
            if policy.shares_selection and on_gpu[retrieves].any() and not on_gpu[retrieves].all():
                self._refuse(
                    layer_idx,
                    int(np.flatnonzero(retrieves & ~on_gpu)[0]),
                    f"the heads of this layer publish one selection together (policy "
                    f"{policy.name!r}), so all of them are on the GPU or none",
                )
            wrong = np.flatnonzero((places == Place.CODES) & ~coded[layer_idx])
            if wrong.size:
                self._refuse(
                    layer_idx,
                    int(wrong[0]),
                    f"policy {policy.name!r} keeps no codes of its keys; 'sketch' does, and "
                    "'per_head' with retrieval='sketch' of the heads that retrieve",
                )
            wrong = np.flatnonzero((places == Place.HOT) & ~hot[layer_idx])
            if wrong.size:
                self._refuse(
                    layer_idx,
                    int(wrong[0]),
                    "hot rows are of heads that select or reuse by KV head, with a budget beyond "
                    "the window, in a layer below the first whose other heads are on the GPU; not "
                    "right below heads of the GPU that retrieve, if they reuse, nor if others "
                    "reuse what they select",
                )
            wrong = np.flatnonzero((places == Place.FOUND) & ~found[layer_idx])
            if wrong.size:
                self._refuse(
                    layer_idx,
                    int(wrong[0]),
                    "the GPU finds rows of heads whose keys have codes, with a budget beyond the "
                    "window, in a layer whose other heads are on the GPU; not where others reuse "
                    "what they select",
                )
            wrong = np.flatnonzero((places == Place.GATHER) & ~gathered[layer_idx])
            if wrong.size:
                reason = (
                    "the head above that publishes its tokens is not on the GPU"
                    if of_layer[wrong[0]] == REUSE
                    else f"policy {policy.name!r} has it {_ROLE_NAMES[int(of_layer[wrong[0]])]}, "
                    "and only heads that reuse a selection can be gathered"
                )
                self._refuse(layer_idx, int(wrong[0]), reason)

    def after_calibration(self, before: Policy, policy: Policy, num_qo_heads: int) -> HeadPlacement:
        """This placement, if it was made for `before`, for what that became in a calibration.

        As many heads are on the GPU: those that must be there now, those that were and may stay,
        and of others the first layers' first. As many have codes there, the first layers' first.
        """
        try:
            self.check_policy(before, num_qo_heads)
        except ValueError:
            return self  # made for another policy: whoever places heads refuses it, or takes it
        roles = kv_head_roles(policy, self.num_layers, num_qo_heads, self.num_kv_heads)
        if roles is None:
            return self
        places, allowed = self.places.copy(), may_stay_on_gpu(policy, roles)
        num_before = int((places == Place.GPU).sum())
        awaited = awaited_heads(roles, places, shares_selection=policy.shares_selection)
        whole = (places == Place.GPU).all(axis=1) & ~awaited.any(axis=1)
        places[(places == Place.GPU) & ~allowed & ~whole[:, None]] = Place.CPU
        places[(roles == DENSE).all(axis=1)] = Place.GPU
        missing = max(0, num_before - int((places == Place.GPU).sum()))
        coming = np.argwhere(allowed & (places != Place.GPU))[:missing]
        places[tuple(coming.T)] = Place.GPU
        fetched = may_be_gathered(policy, roles, places)
        places[(places == Place.GATHER) & ~fetched] = Place.CPU
        for _ in range(2):  # one that comes to the CPU takes its layer's others along
            places[(places == Place.HOT) & ~may_be_hot(policy, roles, places)] = Place.CPU
            places[(places == Place.FOUND) & ~may_be_found(policy, roles, places)] = Place.CPU
        num_coded = int((self.places == Place.CODES).sum())
        places[places == Place.CODES] = Place.CPU
        coded = np.argwhere(has_codes(policy, roles) & (places == Place.CPU))[:num_coded]
        places[tuple(coded.T)] = Place.CODES
        return HeadPlacement(places, self.source)

    def with_hot_rows(
        self, policy: Policy, num_qo_heads: int, *, roles: UInt8Array | None = None
    ) -> HeadPlacement:
        """The same, but that layers which are not on the GPU keep hot rows there where they may,
        found by codes where all of their heads have some.

        Args:
            roles: of `kv_head_roles`, where they are known.
        """
        if roles is None:
            roles = kv_head_roles(policy, self.num_layers, num_qo_heads, self.num_kv_heads)
        if roles is None:
            return self
        places = self.places
        for place, may_be in ((Place.HOT, may_be_hot), (Place.FOUND, may_be_found)):
            tried = np.where(self.places == Place.GPU, Place.GPU, place).astype(np.uint8)
            able = may_be(policy, roles, tried) | (tried == Place.GPU)
            places = np.where(able.all(axis=1, keepdims=True), tried, places)
        return HeadPlacement(places, self.source)

    def without_codes(self) -> HeadPlacement:
        """The same, but that the CPU lists for itself."""
        places = np.where(self.places == Place.CODES, Place.CPU, self.places).astype(np.uint8)
        return HeadPlacement(places, self.source)

    def without_prediction(self) -> HeadPlacement:
        """The same, but that the CPU attends where it would choose hot rows a layer ahead."""
        places = np.where(self.places == Place.HOT, Place.CPU, self.places).astype(np.uint8)
        return HeadPlacement(places, self.source)

    def text(self) -> str:
        """A line per layer, of each head its letter in `LETTERS`."""
        return "\n".join("".join(LETTERS[Place(p)] for p in of_layer) for of_layer in self.places)

    @classmethod
    def from_text(cls, text: str, source: str = "") -> HeadPlacement:
        """What `text` returns."""
        rows = text.split()
        name = _name_of(source)
        if not rows or len({len(row) for row in rows}) != 1 or set("".join(rows)) - set(_PLACES):
            raise ValueError(
                f"{name} must have one line per layer of equally many letters, one per KV head: "
                + ", ".join(f"{letter!r} = {place.name}" for letter, place in _PLACES.items())
            )
        return cls(np.array([[_PLACES[letter] for letter in row] for row in rows]), source)

    def as_json(self) -> dict[str, Any]:
        """Plain values; `from_json` takes them."""
        return {
            "format": _FORMAT,
            "num_layers": self.num_layers,
            "num_kv_heads": self.num_kv_heads,
            "heads": self.text().split("\n"),
        }

    @classmethod
    def from_json(cls, document: Any, source: str = "") -> HeadPlacement:
        """From `as_json`'s values, or a document that has them as "placement" (`offload plan`).

        Raises:
            ValueError: something else; names the file.
        """
        name = _name_of(source)
        if isinstance(document, dict) and "format" not in document:
            document = document.get("placement")
        if not isinstance(document, dict) or document.get("format") != _FORMAT:
            raise ValueError(
                f"{name} holds no placement: expected an object with format {_FORMAT!r}, or the "
                "output of `offload plan --json`"
            )
        heads = document.get("heads")
        if not isinstance(heads, list) or not all(isinstance(row, str) for row in heads):
            raise ValueError(f"{name}: heads must be a list of strings, one per layer")
        placement = cls.from_text("\n".join(heads), source)
        for key in ("num_layers", "num_kv_heads"):
            if document.get(key) != getattr(placement, key):
                raise ValueError(
                    f"{name} says {key}={document.get(key)!r}, but its heads have "
                    f"{getattr(placement, key)}"
                )
        return placement

    def save(self, path: str | Path) -> None:
        """Write it as JSON, a line per layer."""
        Path(path).write_text(json.dumps(self.as_json(), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> HeadPlacement:
        """Read a placement or a plan.

        Raises:
            FileNotFoundError: there is none.
            ValueError: not JSON, or not a placement; names the file.
        """
        hint = f"; write one with `offload plan MODEL --json > {path}`"
        return cls.from_json(read_json(path, "placement file", hint=hint), str(path))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HeadPlacement) and np.array_equal(self.places, other.places)

    def __hash__(self) -> int:
        return hash((self.places.shape, self.places.tobytes()))

    def _check_full(self, policy: Policy) -> None:
        """Checks a policy that selects nothing: any head may stay on the GPU or on the CPU."""
        for place, reason in (
            (Place.GATHER, "selects no tokens to gather"),
            (Place.CODES, "keeps no codes of its keys"),
            (Place.HOT, "selects no tokens to keep"),
            (Place.FOUND, "selects no tokens to find"),
        ):
            placed = np.argwhere(self.places == place)
            if len(placed):
                layer_idx, head = (int(x) for x in placed[0])
                self._refuse(layer_idx, head, f"policy {policy.name!r} {reason}")

    def _refuse(self, layer_idx: int, head: int, reason: str) -> None:
        place = Place(int(self.places[layer_idx, head])).name
        raise ValueError(
            f"{self._name}: KV head {head} of layer {layer_idx} cannot be placed {place}: {reason}"
        )

    @property
    def _name(self) -> str:
        return _name_of(self.source)


_ROLE_NAMES = {
    DENSE: "attend to everything",
    RETRIEVE: "retrieve",
    SELECT: "select",
    REUSE: "reuse",
}


def kv_head_roles(
    policy: Policy, num_layers: int, num_qo_heads: int, num_kv_heads: int
) -> UInt8Array | None:
    """DENSE, RETRIEVE, SELECT or REUSE of each [layer, KV head]; None: the policy selects nothing.

    Where units are query heads, a KV head is DENSE if all of its units are; else the CPU asks the
    policy, whatever it says: SELECT.
    """
    if not policy.selects:
        return None
    num_units = num_qo_heads if policy.per_query_head else num_kv_heads
    roles = check_roles(policy, policy.roles(num_layers, num_units))
    if roles is None:
        sparse = np.arange(num_layers) >= policy.dense_layers
        roles = np.where(sparse[:, None], SELECT, np.full((1, num_units), DENSE)).astype(np.uint8)
    if policy.per_query_head:
        dense = (roles == DENSE).reshape(num_layers, num_kv_heads, -1).all(axis=2)
        roles = np.where(dense, DENSE, SELECT).astype(np.uint8)
    return roles


def least_places(
    policy: Policy,
    num_layers: int,
    num_qo_heads: int,
    num_kv_heads: int,
    windows: Sequence[int] = (),
) -> UInt8Array:
    """What decoding needs no choice for: dense layers on the GPU, everything else on the CPU.

    A policy's first `dense_layers` are dense there if they may as well attend to everything, and so
    are layers with `windows` (of each; 0: none).
    """
    places = np.full((num_layers, num_kv_heads), Place.CPU, np.uint8)
    roles = kv_head_roles(policy, num_layers, num_qo_heads, num_kv_heads)
    if roles is not None:
        dense = roles == DENSE
        dense[: policy.dense_layers] |= whole_on_device(policy, roles)[: policy.dense_layers]
        places[dense.all(axis=1)] = Place.GPU
    places[np.flatnonzero(windows)] = Place.GPU
    return places


def places_by_role(
    policy: Policy,
    num_layers: int,
    num_qo_heads: int,
    num_kv_heads: int,
    windows: Sequence[int] = (),
) -> UInt8Array:
    """Places at which all heads do what the policy says, however much the GPU has room for: those
    that attend to everything, or to `windows` (as of `least_places`), there, the others on the CPU.
    """
    places = least_places(policy, num_layers, num_qo_heads, num_kv_heads, windows)
    roles = kv_head_roles(policy, num_layers, num_qo_heads, num_kv_heads)
    if roles is not None and policy.device.top_k() is not None:
        places[roles == RETRIEVE] = Place.GPU
    return places


def may_stay_on_gpu(policy: Policy, roles: UInt8Array) -> BoolArray:
    """[num_layers, num_kv_heads]: dense heads, retrieving ones whose rule the GPU knows, and those
    that may as well attend to everything."""
    allowed: BoolArray = (roles == DENSE) | whole_on_device(policy, roles)
    if policy.device.top_k() is not None:
        allowed = allowed | (roles == RETRIEVE)
    return allowed


def whole_on_device(policy: Policy, roles: UInt8Array) -> BoolArray:
    """[num_layers, num_kv_heads]: heads that may as well attend to everything on a GPU."""
    whole = None
    if policy.selects and not policy.per_query_head:
        whole = policy.device.whole(*roles.shape)
    return np.zeros(roles.shape, np.bool_) if whole is None else whole


def has_codes(policy: Policy, roles: UInt8Array) -> BoolArray:
    """[num_layers, num_kv_heads]: heads whose candidates a GPU can list by codes of their keys."""
    codes = None if policy.per_query_head else policy.device.codes(*roles.shape)
    if codes is None:
        return np.zeros(roles.shape, np.bool_)
    coded: BoolArray = codes.heads & (roles == SELECT)
    return coded


def may_be_hot(policy: Policy, roles: UInt8Array, places: UInt8Array) -> BoolArray:
    """[num_layers, num_kv_heads]: heads whose tokens the CPU can choose a layer ahead.

    Args:
        places: where the layer's other heads are.
    """
    hot = np.zeros(roles.shape, np.bool_)
    fixed = policy.sink_tokens + policy.recent_tokens
    if policy.per_query_head or policy.budget_tokens <= fixed or not policy.recent_tokens:
        return hot
    leaves_none = ((places == Place.HOT) | (places == Place.GPU)).all(axis=1, keepdims=True)
    publishes = ((roles == RETRIEVE) & (places == Place.GPU)).any(axis=1, keepdims=True)
    reuses = (roles[1:] == REUSE) & ~publishes[:-1]
    hot[1:] = ((roles[1:] == SELECT) | reuses) & leaves_none[1:]
    # What is chosen a layer ahead lacks the step's own token: no layer could inherit it.
    return hot & ~awaited_heads(roles, places, shares_selection=policy.shares_selection)


def may_be_found(policy: Policy, roles: UInt8Array, places: UInt8Array) -> BoolArray:
    """[num_layers, num_kv_heads]: heads whose tokens the GPU can choose by codes of their keys.

    Args:
        places: where the layer's other heads are.
    """
    fixed = policy.sink_tokens + policy.recent_tokens
    too_many = HOT_BUDGETS * policy.budget_tokens > _MOST_FOUND
    if policy.budget_tokens <= fixed or not policy.recent_tokens or too_many:
        return np.zeros(roles.shape, np.bool_)
    whole = ((places == Place.FOUND) | (places == Place.GPU)).all(axis=1, keepdims=True)
    awaited = awaited_heads(roles, places, shares_selection=policy.shares_selection)
    found: BoolArray = has_codes(policy, roles) & whole & ~awaited
    return found


def check_dense_until(policy: Policy) -> None:
    """Refuse, where a GPU decodes, a policy that is dense up to anything but its budget.

    What a GPU lists has room for the budget, and its kernels take shorter rows to be dense.

    Raises:
        ValueError: names both numbers.
    """
    if policy.selects and policy.dense_tokens != policy.budget_tokens:
        raise ValueError(
            f"policy {policy.name!r}: dense_until={policy.dense_tokens} must be its budget_tokens="
            f"{policy.budget_tokens} where a GPU decodes; leave dense_until out, or decode on the "
            "CPU"
        )


def awaited_heads(
    roles: UInt8Array, places: UInt8Array, *, shares_selection: bool = False
) -> BoolArray:
    """[num_layers, num_kv_heads]: heads whose selection a head reuses that is not on the GPU.

    Args:
        roles: of `kv_head_roles`.
        shares_selection: the policy's; what a layer's heads publish is for all.
    """
    awaited = np.zeros(roles.shape, np.bool_)
    publishes = (roles == RETRIEVE) | (roles == SELECT)
    waits = (roles == REUSE) & (places != Place.GPU)
    above = _publishing_layers(publishes, shares_selection)
    layers, heads = np.nonzero(waits & (above >= 0))
    awaited[above[layers, heads], heads] = True
    return publishes & awaited.any(axis=1, keepdims=True) if shares_selection else awaited


def may_be_gathered(policy: Policy, roles: UInt8Array, places: UInt8Array) -> BoolArray:
    """[num_layers, num_kv_heads]: heads that reuse what a head above has published on the GPU.

    Args:
        places: where those above are.
    """
    if policy.budget_tokens <= policy.sink_tokens + policy.recent_tokens:
        return np.zeros(roles.shape, np.bool_)  # there are no rows beside those of the window
    publishes = (roles == RETRIEVE) | (roles == SELECT)
    on_gpu = (roles == RETRIEVE) & (places == Place.GPU)
    if policy.shares_selection:
        on_gpu[:] = (on_gpu | ~publishes).all(axis=1, keepdims=True)
    above = _publishing_layers(publishes, policy.shares_selection)
    published = (above >= 0) & on_gpu[above, np.arange(roles.shape[1])]
    gathered: BoolArray = (roles == REUSE) & published
    return gathered


def _publishing_layers(publishes: BoolArray, shares_selection: bool) -> npt.NDArray[np.intp]:
    """[num_layers, num_kv_heads]: the nearest layer above that publishes what the head could
    reuse, or -1."""
    if shares_selection:
        publishes = np.broadcast_to(publishes.any(axis=1, keepdims=True), publishes.shape)
    above = np.full(publishes.shape, -1)
    above[1:] = np.where(publishes, np.arange(len(publishes))[:, None], -1)[:-1]
    return np.maximum.accumulate(above, axis=0)


def _name_of(source: str) -> str:
    return f"placement file {source}" if source else "placement"
