"""What a GPU can do for a policy: select, list candidates, and build what the policy keeps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from offload.selection.layer_state import BuildContext, State

if TYPE_CHECKING:
    from torch import Tensor

# What `DeviceSupport.build` returns: called once, after the device has done what was queued.
DeviceBuild = Callable[[], State]


@dataclass(frozen=True)
class DeviceTopK:
    """A rule of `select` that a GPU can follow: the heaviest tokens by importance, ties to the
    lowest positions, as many as the budget has room for.

    Attributes:
        ratio: of kv_len, at most so many with sinks and recent window; None: no such limit.
        top_p: or the fewest that have this share of the attention with sinks and recent window.
        threshold: or those above this attention weight. Weights are means over the query heads.
    """

    ratio: float | None = None
    top_p: float | None = None
    threshold: float | None = None


@dataclass(frozen=True)
class DeviceCodes:
    """Codes of keys by which a GPU can list candidates in place of `propose`: of the tokens whose
    codes score most, by `gpu_ops.top_k_codes`.

    Attributes:
        heads: bool [num_layers, num_units], for which units, which are KV heads.
        num_candidates: without sinks and recent tokens.
        levels: 2 or 4, of a code of 1 or 2 bits a dimension.
        outer: see `gpu_ops.append_codes`.
        rotation: head_dim -> float32 [head_dim, head_dim], what keys and queries are multiplied by.
    """

    heads: npt.NDArray[np.bool_]
    num_candidates: int
    levels: tuple[float, ...]
    outer: float
    rotation: Callable[[int], npt.NDArray[np.float32]]

    @property
    def bits(self) -> int:
        return len(self.levels).bit_length() - 1


class DeviceSupport:
    """What a GPU can do for `policy`; this one: nothing.

    Attributes:
        builds: `build` is there.
    """

    builds: bool = False

    def __init__(self, policy: Any) -> None:
        self.policy = policy

    def top_k(self) -> DeviceTopK | None:
        """How units that RETRIEVE choose, if a GPU that holds their KV can do it; else None."""
        return None

    def whole(self, num_layers: int, num_units: int) -> npt.NDArray[np.bool_] | None:
        """Which [layer, unit] may as well attend to everything, on a GPU that holds their KV.

        Beside those that are DENSE or RETRIEVE; None: no others.
        """
        return None

    def codes(self, num_layers: int, num_units: int) -> DeviceCodes | None:
        """The codes by which a GPU finds the candidates of some units, if it can; else None."""
        return None

    def code_state(self, arrays: State, kv_len: int, load_keys: Callable[[int], Tensor]) -> State:
        """Those of a layer's arrays with codes, scales and mean, as sketch/policy.py has them: of
        the units of `codes` in order, and of all of `kv_len` tokens. Asked only where there are
        `codes`.

        Args:
            load_keys: gives the keys [num_units, n, head_dim] from a token on.
        """
        raise NotImplementedError(f"{type(self).__name__} has `codes`, but no `code_state`")

    def build(self, context: BuildContext) -> DeviceBuild:
        """`LayerState.build` alongside a prefill, from tensors on the device that computes it.

        Queues its work to the current stream and does not wait for it: the keys and values are
        overwritten after it. Returns what makes the arrays, for when that work is done.
        """
        raise NotImplementedError(f"{type(self).__name__} has `builds`, but no `build`")

    def copied_heads(self, num_layers: int, num_kv_heads: int) -> int:
        """KV heads of a layer at most of whose keys and values `build` makes copies."""
        return 0

    def warm_up_kernels(self, keys: Tensor) -> None:
        """Launch the kernels of ours that `build` launches; `gpu_ops.compile_ahead`.

        Args:
            keys: [num_kv_heads, 64, head_dim], whatever they are.
        """
