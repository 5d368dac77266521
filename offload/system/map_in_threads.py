"""A function of many items on several threads, or on this one where no more can be started."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

_Item = TypeVar("_Item")


def map_in_threads(
    function: Callable[[_Item], object], items: Iterable[_Item], num_threads: int
) -> None:
    """Call `function` of each of `items`, some of them twice where threads cannot be started: after
    the main thread has ended, or at a limit of threads.

    Raises:
        What `function` raises.
    """
    items = list(items)
    started = []
    try:
        with ThreadPoolExecutor(num_threads) as executor:
            for item in items:
                started.append(executor.submit(function, item))
    except RuntimeError:
        for item in items:
            function(item)
        return
    for future in started:
        future.result()
