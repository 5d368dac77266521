"""What a policy learns from the model that it decodes with."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from offload.models.base import LeanModel


class Calibration:
    """What `policy` learns; this one: nothing."""

    def __init__(self, policy: Any) -> None:
        self.policy = policy

    def learn(
        self,
        make_lean: Callable[[], LeanModel],
        model_type: str,
        load_tokenizer: Callable[[], Any],
        checkpoint: Callable[[], str],
    ) -> Any:
        """The policy with what it has to learn from the attention of the model that will run.

        Args:
            make_lean, load_tokenizer: called only if they are needed.
            checkpoint: the same; names the weights, so that what was learnt can be kept.

        Raises:
            ValueError: the policy is for another model.
        """
        return self.policy

    def with_kept(self, checkpoint: Callable[[], str], model_type: str, **shape: Any) -> Any:
        """The policy with what `learn` has kept of the model, if anything: nothing is learnt.

        Args:
            checkpoint: as of `learn`.
            shape: num_layers, num_kv_heads and head_dim of the model.
        """
        return self.policy
