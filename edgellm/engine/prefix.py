"""Which tokens the cache holds, for whom, and who can share them: a radix tree over token ids.

A node is a run of cells that the same holders share, so the sum of all runs is exactly the number
of cells in use. Two holders that computed the same tokens apart have cells apart: siblings may
begin with the same token. Pure: it moves no cell, it only knows.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Set
from typing import Final

import msgspec

_PROBE: Final = 64


def common_prefix(a: array[int], b: array[int], start: int = 0) -> int:
    """How many tokens from ``start`` on are the same in both: the count, without ``start``."""
    limit = min(len(a), len(b)) - start
    n = 0
    step = _PROBE
    while n < limit:
        step = min(step, limit - n)
        at = start + n
        if a[at : at + step] == b[at : at + step]:
            n += step
            step *= 4
        elif step == 1:
            break
        else:
            limit = min(limit, n + step)
            step = max(1, step // 4)
    return max(n, 0)


class _Node:
    __slots__ = ("children", "holders", "parent", "start", "tokens")

    def __init__(
        self, parent: _Node | None, start: int, tokens: array[int], holders: set[int]
    ) -> None:
        self.parent = parent
        self.start = start
        self.tokens = tokens
        self.holders = holders
        self.children: list[_Node] = []

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


class Match(msgspec.Struct, frozen=True):
    """The longest cached beginning of a token list, and a holder that has all of it."""

    n: int
    holder: int


class PrefixTree:
    """Cells by holder. A holder is a seq_id; what it holds always begins at position 0."""

    def __init__(self) -> None:
        self._root = _Node(None, 0, array("i"), set())
        self._leaf: dict[int, _Node] = {}
        self.n_cells = 0

    @property
    def holders(self) -> set[int]:
        return set(self._leaf)

    def length(self, holder: int) -> int:
        """Tokens a holder has."""
        leaf = self._leaf.get(holder)
        return 0 if leaf is None else leaf.end

    def tokens(self, holder: int) -> array[int]:
        """A holder's tokens, from the first."""
        out = array("i")
        for node in reversed(list(self._path(holder))):
            out.extend(node.tokens)
        return out

    def exclusive(self, holder: int) -> int:
        """Cells that nobody else holds: what releasing it would give back."""
        n = 0
        for node in self._path(holder):
            if len(node.holders) > 1:
                break
            n += len(node.tokens)
        return n

    def held_by(self, holders: Set[int]) -> int:
        """Cells that these holders have and nobody else."""
        nodes = (node for node in self._walk(self._root) if node.holders <= holders)
        return sum(len(node.tokens) for node in nodes)

    def subsumed(self, holder: int) -> list[int]:
        """Other holders all of whose tokens this holder has too, in the same cells."""
        path = set(map(id, self._path(holder)))
        return [h for h, leaf in self._leaf.items() if h != holder and id(leaf) in path]

    def match(self, tokens: array[int], limit: int) -> Match | None:
        """The longest cached beginning of ``tokens``, at most ``limit`` long."""
        node = self._root
        n = 0
        holder = -1
        while n < limit:
            best, best_n = None, 0
            for child in node.children:
                if child.tokens[0] != tokens[n]:
                    continue
                same = common_prefix(child.tokens, tokens[n : n + len(child.tokens)])
                if same > best_n:
                    best, best_n = child, same
            if best is None:
                break
            holder = next(iter(best.holders))
            n += best_n
            if best_n < len(best.tokens):
                break
            node = best
        n = min(n, limit)
        return Match(n, holder) if n > 0 else None

    def share(self, source: int, holder: int, n: int) -> None:
        """Let a new ``holder`` hold the first ``n`` tokens of ``source`` too."""
        last = None
        for node in list(self._path(source)):
            if node.start >= n:
                continue
            if node.end > n:
                node = self._split(node, n - node.start)  # noqa: PLW2901
            node.holders.add(holder)
            last = last or node
        if last is not None:
            self._leaf[holder] = last

    def extend(self, holder: int, tokens: array[int]) -> None:
        """A holder computed ``tokens`` after what it had: new cells, its own."""
        self.n_cells += len(tokens)
        leaf = self._leaf.get(holder, self._root)
        if leaf is not self._root and len(leaf.holders) == 1 and not leaf.children:
            leaf.tokens.extend(tokens)
            return
        node = _Node(leaf, leaf.end, array("i", tokens), {holder})
        leaf.children.append(node)
        self._leaf[holder] = node

    def truncate(self, holder: int, n: int) -> None:
        """A holder keeps its first ``n`` tokens; cells that nobody holds any more are free."""
        node = self._leaf.pop(holder, None)
        while node is not None and node is not self._root and node.end > n:
            if node.start < n:
                self._split(node, n - node.start)
                continue
            parent = node.parent
            node.holders.discard(holder)
            if not node.holders:
                self._drop(node)
            node = parent
        if node is not None and node is not self._root:
            self._leaf[holder] = node

    def release(self, holder: int) -> None:
        """A holder gives everything back."""
        self.truncate(holder, 0)

    def rename(self, old: int, new: int) -> None:
        """``new`` holds what ``old`` held, and ``old`` nothing."""
        for node in self._path(old):
            node.holders.discard(old)
            node.holders.add(new)
        leaf = self._leaf.pop(old, None)
        if leaf is not None:
            self._leaf[new] = leaf

    def check(self) -> None:
        """Raise ValueError when the tree contradicts itself (for tests and the invariant check)."""
        total = 0
        for node in self._walk(self._root):
            total += len(node.tokens)
            inherited = set().union(*(c.holders for c in node.children))
            if node is not self._root and not (inherited <= node.holders and node.holders):
                raise ValueError(f"holders {node.holders} do not cover {inherited}")
            if any(c.start != node.end or not c.tokens for c in node.children):
                raise ValueError("a child does not begin where its parent ends")
        if total != self.n_cells:
            raise ValueError(f"{self.n_cells} cells counted, {total} in the tree")

    def _path(self, holder: int) -> Iterator[_Node]:
        node = self._leaf.get(holder)
        while node is not None and node is not self._root:
            yield node
            node = node.parent

    def _walk(self, node: _Node) -> Iterator[_Node]:
        stack = [node]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children)

    def _split(self, node: _Node, n: int) -> _Node:
        """Cut a node after n tokens; returns the first part. The node object is the second."""
        parent = node.parent
        first = _Node(parent, node.start, node.tokens[:n], set(node.holders))
        first.children = [node]
        if parent is not None:
            parent.children[parent.children.index(node)] = first
        node.parent = first
        node.start += n
        node.tokens = node.tokens[n:]
        return first

    def _drop(self, node: _Node) -> None:
        self.n_cells -= len(node.tokens)
        if node.parent is not None:
            node.parent.children.remove(node)
