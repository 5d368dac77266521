"""What the kernels ask of a policy's roles."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from offload.selection.policy import DENSE, RETRIEVE, REUSE, SELECT, Policy


def check_roles(
    policy: Policy, roles: npt.NDArray[np.uint8] | None
) -> npt.NDArray[np.uint8] | None:
    """Refuse roles that the kernels cannot follow."""
    if roles is None:
        return None
    roles = np.ascontiguousarray(roles, np.uint8)
    published = np.zeros(roles.shape[1], bool)
    for layer_idx, of_layer in enumerate(roles):
        if (of_layer == DENSE).any() and (of_layer == RETRIEVE).any():
            raise ValueError(
                f"policy {policy.name!r}: layer {layer_idx} has units that are DENSE beside units "
                "that RETRIEVE"
            )
        if (of_layer == RETRIEVE).any() and not policy.scans_keys:
            raise ValueError(
                f"policy {policy.name!r}: layer {layer_idx} retrieves, but the policy that selects "
                "does not scan keys"
            )
        orphans = np.flatnonzero((of_layer == REUSE) & ~published)
        if orphans.size:
            raise ValueError(
                f"policy {policy.name!r}: unit {orphans[0]} of layer {layer_idx} reuses a "
                "selection, but no layer above publishes one"
            )
        published |= (of_layer == RETRIEVE) | (of_layer == SELECT)
    return roles
