"""What policies have in common: their contract (`policy`, `selection`), what is kept of sequences
for them (`state`), callbacks, members, roles and calibration.

Imports `models` and what is below; `prefill` stands beside it, and neither knows the other. The
methods are in `policies`, which no file here imports.
"""

from __future__ import annotations

from pathlib import Path

from offload.selection.numba_cache import drop_stale

_folder = Path(__file__).parent
drop_stale(_folder, [_folder.parents[1] / "cpu_ops"])
