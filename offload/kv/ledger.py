"""One limit of memory for several tenants, each of which counts its own bytes."""

from __future__ import annotations

from collections.abc import Callable


class MemoryLedger:
    """Who has how much of a limit; whoever wants more asks `left_bytes` first.

    Attributes:
        limit_bytes: a hard limit for all tenants together.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._tenants: list[tuple[str, Callable[[], int]]] = []

    def add(self, name: str, count_bytes: Callable[[], int]) -> None:
        """A tenant; several may have one name."""
        self._tenants.append((name, count_bytes))

    def put(self, name: str, count_bytes: Callable[[], int]) -> None:
        """A tenant in the place of those that have its name."""
        self._tenants = [tenant for tenant in self._tenants if tenant[0] != name]
        self.add(name, count_bytes)

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
