"""Calibrated heads that are kept: for the embedded models in the package, else in the user's cache.

A calibration takes seconds, and always finds the same heads.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offload.models.checkpoint_names import embedded_part, key_part
from offload.selection.calibration import Calibration
from offload.selection.head_roles import HeadRoles
from offload.system.cache_folder import cache_folder

if TYPE_CHECKING:
    from offload.models.base import LeanModel

_CALIBRATION = "1"  # change it when other heads are found than by older versions

logger = logging.getLogger(__name__)


def kept_roles(
    policy: str,
    checkpoint: str,
    retrieval_heads: int,
    first_layers: int,
    *,
    first_retrieve: bool = False,
    **shape: Any,
) -> HeadRoles | None:
    """What a calibration has found before; None where none is kept, or what lies there is not it.

    Args:
        policy: the name of the one that calibrated.
        checkpoint: tells weights apart, as `loading.names.checkpoint_name` does; "": unknown.
        retrieval_heads: of the calibration, after the `first_layers`.
        first_retrieve: what the roles say of all heads of the first layers.
        shape: as `HeadRoles.check` takes it.
    """
    places = ((_of_package, embedded_part(checkpoint)), (_cached, key_part(checkpoint)))
    for folder, of_weights in places:
        if not of_weights:
            continue
        try:
            path = folder(policy) / _file_name(of_weights, retrieval_heads, first_layers)
            if not path.is_file():
                continue
            roles = HeadRoles.load(path)
            roles.check(**shape, checkpoint=checkpoint)
            first, later = roles.array[:first_layers], roles.array[first_layers:]
            if (first != first_retrieve).any() or later.sum() != retrieval_heads:
                raise ValueError(f"roles file {roles.source} was changed")
        except (OSError, ValueError, RuntimeError) as error:
            logger.warning(
                "the heads kept of this model are damaged or cannot be read, and are not used: %s. "
                "Loading it with %s finds them again",
                error,
                policy,
            )
            continue
        return roles
    return None


def keep_roles(policy: str, roles: HeadRoles, retrieval_heads: int, first_layers: int) -> None:
    """Have `kept_roles` find them for their checkpoint. Where the cache cannot be written to, they
    are not kept."""
    key = key_part(roles.checkpoint)
    if not key:
        return
    try:
        roles.keep(_cached(policy) / _file_name(key, retrieval_heads, first_layers))
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home
        logger.info(
            "calibrated heads are not kept (%s); set OFFLOAD_CACHE to a folder that can be written "
            "to",
            error,
        )


class RolesCalibration(Calibration):
    """Which heads retrieve, of a policy with `head_roles` and `with_roles`.

    Attributes:
        first_retrieve: all heads of the first layers do.
    """

    first_retrieve = False

    def wanted(self, num_layers: int, num_kv_heads: int) -> tuple[int, int]:
        """How many retrieval heads are to be found, after so many first layers."""
        raise NotImplementedError

    def find(
        self, lean: LeanModel, model_type: str, load_tokenizer: Callable[[], Any]
    ) -> HeadRoles | None:
        """Calibrates; None where the model is too small for it."""
        raise NotImplementedError

    def learn(
        self,
        make_lean: Callable[[], LeanModel],
        model_type: str,
        load_tokenizer: Callable[[], Any],
        checkpoint: Callable[[], str],
    ) -> Any:
        """With roles of the model, if it has none; they are kept for the next time.

        Raises:
            ValueError: it has roles of another model or of other weights, or more retrieval heads
                than it may.
        """
        policy, lean = self.policy, make_lean()
        shape = lean.shape
        policy.check_model(**shape.heads)
        if isinstance(policy.head_roles, HeadRoles):
            name = checkpoint()
            policy.head_roles.check(**shape.kv_heads, model_type=model_type, checkpoint=name)
            return policy
        kept = self.with_kept(checkpoint, model_type, **shape.kv_heads)
        if kept is not policy:
            return kept
        roles = self.find(lean, model_type, load_tokenizer)
        if roles is None:
            return policy
        roles = replace(roles, checkpoint=checkpoint())
        keep_roles(policy.name, roles, *self.wanted(shape.num_layers, shape.num_kv_heads))
        return policy.with_roles(roles)

    def with_kept(self, checkpoint: Callable[[], str], model_type: str, **shape: Any) -> Any:
        """With roles that a calibration has found, if it has none."""
        policy = self.policy
        if isinstance(policy.head_roles, HeadRoles):
            return policy
        wanted = self.wanted(shape["num_layers"], shape["num_kv_heads"])
        of_model = {**shape, "model_type": model_type, "first_retrieve": self.first_retrieve}
        kept = kept_roles(policy.name, checkpoint(), *wanted, **of_model)
        return policy if kept is None else policy.with_roles(kept)


def _of_package(policy: str) -> Path:
    return Path(__file__).parent / "packaged_roles" / policy


def _cached(policy: str) -> Path:
    return cache_folder() / "roles" / f"{policy}-{_CALIBRATION}"


def _file_name(checkpoint: str, retrieval_heads: int, first_layers: int) -> str:
    return f"{checkpoint}-{retrieval_heads}-after-{first_layers}.json"
