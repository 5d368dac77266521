"""Which KV heads look for tokens themselves, and the JSON file that says so.

A retrieval head attends to the whole cache and publishes the tokens it found; every other head
attends to the tokens that the nearest retrieval head above it, of the same index, has published
(LycheeDecode, arXiv 2602.04541; in layer 0 all heads are retrieval heads then), or to those that
another policy selects (`per_head`). The file names the model it was made for, and its weights;
`offload calibrate` and `offload train-heads` write it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from offload.selection.made_files import COMMON_KEYS, MadeFile

BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class HeadRoles(MadeFile):
    """Roles of every KV head of one model.

    Attributes:
        retrieval: [num_layers][num_kv_heads], True for retrieval heads.
        The others: see `MadeFile`.

    Raises:
        ValueError: a `retrieval` of another shape.
    """

    kind: ClassVar[str] = "roles file"
    bare_kind: ClassVar[str] = "head roles"
    remedy: ClassVar[str] = "make roles for it with `offload calibrate`"
    command: ClassVar[str] = "calibrate MODEL -o"
    format: ClassVar[str] = "offload-head-roles-2"
    keys: ClassVar[tuple[str, ...]] = (*COMMON_KEYS, "retrieval")

    retrieval: tuple[tuple[bool, ...], ...]

    def __post_init__(self) -> None:
        self._check_made()
        rows = self.retrieval
        if not isinstance(rows, (tuple, list)) or len(rows) != self.num_layers:
            got = f"{len(rows)} rows" if isinstance(rows, (tuple, list)) else repr(rows)
            raise ValueError(
                f"{self._name}: retrieval must have one row per layer, num_layers="
                f"{self.num_layers}, got {got}"
            )
        for layer_idx, row in enumerate(rows):
            if (
                not isinstance(row, (tuple, list))
                or len(row) != self.num_kv_heads
                or not all(isinstance(role, bool) for role in row)
            ):
                raise ValueError(
                    f"{self._name}: retrieval[{layer_idx}] must be one true or false per KV head, "
                    f"num_kv_heads={self.num_kv_heads}, got {row!r}"
                )
        object.__setattr__(self, "retrieval", tuple(tuple(row) for row in rows))

    def __str__(self) -> str:
        """The file that they are from, if there is one."""
        return self.source or repr(self)

    @classmethod
    def of(
        cls,
        retrieval: BoolArray,
        *,
        head_dim: int,
        model_type: str = "",
        made_by: str = "",
        checkpoint: str = "",
    ) -> HeadRoles:
        """Roles from bool [num_layers, num_kv_heads]."""
        num_layers, num_kv_heads = retrieval.shape
        rows = tuple(tuple(bool(role) for role in row) for row in retrieval)
        shape = (num_layers, num_kv_heads, head_dim)
        return cls(model_type, *shape, rows, made_by=made_by, checkpoint=checkpoint)

    def of_heads(self, heads: range) -> HeadRoles:
        """The roles of some KV heads of every layer, as those of a model that has no others."""
        rows = tuple(row[heads.start : heads.stop] for row in self.retrieval)
        return replace(self, num_kv_heads=len(heads), retrieval=rows)

    @property
    def array(self) -> BoolArray:
        """bool [num_layers, num_kv_heads]."""
        return np.array(self.retrieval, np.bool_)

    @property
    def num_retrieval_heads(self) -> int:
        """Retrieval heads below layer 0, where every head is one."""
        return int(self.array[1:].sum())

    def check_first_layer(self) -> None:
        """Refuse sparse heads in layer 0, for policies whose sparse heads reuse."""
        sparse = [head for head, retrieves in enumerate(self.retrieval[0]) if not retrieves]
        if sparse:
            raise ValueError(
                f"{self._name}: all heads of layer 0 must be retrieval heads, because there is "
                f"nothing above them to reuse; sparse there: {sparse}"
            )


def evenly_spaced_heads(
    num_layers: int, num_kv_heads: int, retrieval_heads: int | None
) -> BoolArray:
    """Retrieval heads at equal distances: what roles are worth is measured against these.

    Args:
        retrieval_heads: None: `default_retrieval_heads`.

    Returns:
        bool [num_layers, num_kv_heads]: layer 0, and `retrieval_heads` more, shared out among the
        KV heads; each KV head's are spread over its layers.
    """
    if retrieval_heads is None:
        retrieval_heads = default_retrieval_heads(num_layers, num_kv_heads)
    check_retrieval_heads(retrieval_heads, num_layers, num_kv_heads)
    retrieval = np.zeros((num_layers, num_kv_heads), np.bool_)
    retrieval[0] = True
    for head in range(num_kv_heads):
        count = retrieval_heads // num_kv_heads + (head < retrieval_heads % num_kv_heads)
        if count:
            step = (num_layers - 1) / count
            retrieval[1 + ((np.arange(count) + 0.5) * step).astype(int), head] = True
    return retrieval


def default_retrieval_heads(num_layers: int, num_kv_heads: int) -> int:
    """A sixth of all KV heads, beyond layer 0.

    With the paper's eighth, the heads of SmolLM2-135M that reuse keep a little less attention mass
    than Quest (0.934 against 0.937 with 1,024 of 7K tokens); with 16 of its 90 they keep 0.951.
    """
    return min(-(-num_layers * num_kv_heads // 6), (num_layers - 1) * num_kv_heads)


def check_more_layers(num_layers: int) -> None:
    """Refuse a model that has layer 0 alone, for what chooses heads after it."""
    if num_layers < 2:
        raise ValueError(
            "this model has one layer, whose KV heads all retrieve: there are none to choose"
        )


def check_retrieval_heads(
    retrieval_heads: int, num_layers: int, num_kv_heads: int, name: str = "retrieval_heads="
) -> None:
    """Refuse a number of retrieval heads that the layers after layer 0 do not have.

    Args:
        name: what comes before the number where it is given.
    """
    if not isinstance(retrieval_heads, int) or isinstance(retrieval_heads, bool):
        raise ValueError(f"retrieval_heads must be an int, got {retrieval_heads!r}")
    most = (num_layers - 1) * num_kv_heads
    if not 0 <= retrieval_heads <= most:
        raise ValueError(
            f"{name}{retrieval_heads} must be in [0, {most}]: so many KV heads does this "
            f"model have after layer 0, whose {num_kv_heads} are retrieval heads anyway"
        )


def roles_from(
    head_roles: str | Path | HeadRoles | None, retrieval_heads: int | None
) -> HeadRoles | None:
    """What a policy's options of these names say: a roles file is read; None is to be calibrated.

    Raises:
        ValueError: both are given, or something else than roles.
    """
    if isinstance(head_roles, (str, Path)):
        head_roles = HeadRoles.load(head_roles)
    if head_roles is not None and not isinstance(head_roles, HeadRoles):
        raise ValueError(f"head_roles must be a roles file or HeadRoles, got {head_roles!r}")
    if head_roles is not None and retrieval_heads is not None:
        raise ValueError(
            f"retrieval_heads={retrieval_heads} is for a calibration, but head_roles say "
            "which heads retrieve; give one of the two"
        )
    return head_roles
