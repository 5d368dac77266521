"""Sequences by their token ids: which of them shares the longest beginning with a prompt."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int64]


@dataclass(eq=False)
class _Node:
    """The tokens from its parent to here. Leaves have a sequence, and only they do."""

    tokens: Tokens
    children: dict[int, _Node] = field(default_factory=dict)
    seq: int | None = None
    used: int = 0

    def with_seq(self) -> Iterator[tuple[_Node, int]]:
        """The nodes at or below this one that have a sequence, and these sequences."""
        nodes = [self]
        while nodes:
            node = nodes.pop()
            if node.seq is not None:
                yield node, node.seq
            nodes.extend(node.children.values())


class PrefixTree:
    """A radix tree of token ids. What its sequences are is the caller's business."""

    def __init__(self) -> None:
        self._root = _Node(np.empty(0, np.int64))
        self._clock = itertools.count(1)

    def __len__(self) -> int:
        return sum(1 for _ in self._with_seq())

    def longest(
        self,
        tokens: Sequence[int] | Tokens,
        cut: Callable[[int, int], int] = lambda seq, shared: shared,
    ) -> tuple[int, int] | None:
        """(a sequence, how many of its first tokens are the first of `tokens`); None: no token.

        The sequence counts as used now.

        Args:
            cut: of a sequence, and how many tokens it shares: how many of these can be used.
        """
        ids = np.asarray(tokens, np.int64)
        node, shared = self._root, 0
        path = list[tuple[_Node, int]]()
        while shared < len(ids):
            child = node.children.get(int(ids[shared]))
            if child is None:
                break
            same = num_equal(child.tokens, ids[shared:])
            node, shared = child, shared + same
            path.append((node, shared))
            if same < len(child.tokens):
                break
        best, used, most = None, self._root, 0
        for node, shared in reversed(path):
            if shared <= most:
                break
            for leaf, seq in node.with_seq():
                kept = cut(seq, shared)
                if kept > most:
                    best, used, most = seq, leaf, kept
                if most == shared:
                    break
        if best is None:
            return None
        used.used = next(self._clock)
        return best, most

    def add(self, tokens: Sequence[int], seq: int) -> list[int]:
        """Keep a sequence of these tokens; those that are not needed besides leave the tree.

        Returns:
            handles that the caller frees: `seq` itself if a sequence begins with `tokens` already,
            and the ones that `tokens` begin with.
        """
        ids = np.asarray(tokens, np.int64)
        node, at, surplus = self._root, 0, list[int]()
        while at < len(ids):
            if node.seq is not None:
                surplus.append(node.seq)
                node.seq = None
            child = node.children.get(int(ids[at]))
            if child is None:
                leaf = _Node(ids[at:].copy(), seq=seq, used=next(self._clock))
                node.children[int(ids[at])] = leaf
                return surplus
            same = num_equal(child.tokens, ids[at:])
            at += same
            if same < len(child.tokens):
                if at == len(ids):
                    break
                child = _split(node, child, same)
            node = child
        return [seq]

    def least_recent(self) -> int | None:
        """Take out the sequence that was not used for the longest time; None: it is empty."""
        oldest = min(self._with_seq(), key=lambda path: path[-1].used, default=None)
        if oldest is None:
            return None
        seq, oldest[-1].seq = oldest[-1].seq, None
        for parent, node in zip(oldest[-2::-1], oldest[:0:-1], strict=True):
            if node.seq is not None or node.children:
                break
            del parent.children[int(node.tokens[0])]
        return seq

    def seqs(self) -> list[int]:
        """All sequences."""
        return [path[-1].seq for path in self._with_seq() if path[-1].seq is not None]

    def _with_seq(self) -> Iterator[list[_Node]]:
        """The paths from the root to nodes with a sequence."""
        paths = [[self._root]]
        while paths:
            path = paths.pop()
            if path[-1].seq is not None:
                yield path
            paths.extend([*path, child] for child in path[-1].children.values())


def _split(parent: _Node, child: _Node, size: int) -> _Node:
    """A node between the two, with the first `size` tokens of the child."""
    middle = _Node(child.tokens[:size])
    child.tokens = child.tokens[size:]
    middle.children[int(child.tokens[0])] = child
    parent.children[int(middle.tokens[0])] = middle
    return middle


def num_equal(a: Tokens, b: Tokens) -> int:
    """First tokens that are the same in both."""
    n = min(len(a), len(b))
    different = np.flatnonzero(a[:n] != b[:n])
    return int(different[0]) if len(different) else n
