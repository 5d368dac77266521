"""One limit of memory for several tenants, each of which counts its own bytes."""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakKeyDictionary


class MemoryLedger:
    """Who has how much of a limit; whoever wants more asks `left_bytes` first.

    Attributes:
        limit_bytes: a hard limit for all tenants together.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._tenants: list[tuple[str, Callable[[], int]]] = []
        self._in_turn: dict[str, WeakKeyDictionary[object, int]] = {}

    def add(self, name: str, count_bytes: Callable[[], int]) -> None:
        """A tenant; several may have one name."""
        self._tenants.append((name, count_bytes))

    def take_turns(self, name: str, owner: object, num_bytes: int) -> None:
        """A tenant of several owners, of whom one at a time has its bytes.

        Args:
            owner: counts as long as it lives.
            num_bytes: 0: it has none any more.
        """
        if name not in self._in_turn:
            sizes = self._in_turn[name] = WeakKeyDictionary()
            self.add(name, lambda: max([*sizes.values()], default=0))
        self._in_turn[name][owner] = num_bytes

    @property
    def is_shared(self) -> bool:
        """Whether there is a tenant."""
        return bool(self._tenants)

    def by_tenant(self) -> dict[str, int]:
        """Bytes of all tenants, by name."""
        found: dict[str, int] = {}
        for name, count_bytes in self._tenants:
            found[name] = found.get(name, 0) + count_bytes()
        return found

    @property
    def left_bytes(self) -> int:
        """Bytes that no tenant has."""
        return self.limit_bytes - sum(count_bytes() for _, count_bytes in self._tenants)
