"""Who has how much of the host budget."""

from __future__ import annotations

import pytest
import torch

from offload.kv.ledger import MemoryLedger
from offload.kv.store import HostBudgetError, KVStore


def test_tenants_of_one_limit() -> None:
    ledger, held = MemoryLedger(100), {"arrays": 10, "queries": 5}
    assert not ledger.is_shared
    ledger.add("policy", lambda: held["arrays"])
    ledger.add("policy", lambda: held["queries"])
    ledger.add("sessions", lambda: 20)
    assert ledger.by_tenant() == {"policy": 15, "sessions": 20}
    assert ledger.left_bytes == 65
    held["arrays"] = 0
    assert ledger.left_bytes == 75


def test_pages_leave_what_tenants_have() -> None:
    """All tenants count, not the last that came, and the error names them."""
    store = KVStore(num_layers=1, num_kv_heads=1, head_dim=8, dtype=torch.float32, page_tokens=16,
                    host_budget_bytes=64 << 10)  # fmt: skip
    seq = store.new_sequence()
    store.ledger.add("what the policy keeps", lambda: 30 << 10)
    store.ledger.add("sessions", lambda: 30 << 10)
    with pytest.raises(HostBudgetError, match=r"30.00 KiB are what the policy .*, 30.* sessions"):
        store.reserve([seq], [1024])
    assert store.left_bytes() == 4 << 10
