"""The radix tree: what is shared is counted once, and nothing is lost or invented."""

from __future__ import annotations

from array import array

from hypothesis import given, settings
from hypothesis import strategies as st

from edgellm.engine.prefix import PrefixTree, common_prefix


def ids(*tokens: int) -> array[int]:
    return array("i", tokens)


@given(st.lists(st.integers(0, 3), max_size=300), st.lists(st.integers(0, 3), max_size=300))
def test_common_prefix_is_the_longest_common_beginning(a: list[int], b: list[int]) -> None:
    n = common_prefix(array("i", a), array("i", b))
    assert a[:n] == b[:n]
    assert n == min(len(a), len(b)) or a[n] != b[n]


def test_a_shared_prefix_is_counted_once() -> None:
    tree = PrefixTree()
    tree.extend(0, ids(1, 2, 3, 4))
    found = tree.match(ids(1, 2, 3, 9), 4)
    assert found is not None
    assert (found.n, found.holder) == (3, 0)
    tree.share(0, 1, 3)
    tree.extend(1, ids(9))
    assert tree.n_cells == 5
    assert tree.exclusive(0) == 1
    assert list(tree.tokens(1)) == [1, 2, 3, 9]


def test_the_limit_leaves_the_last_token_to_be_computed() -> None:
    tree = PrefixTree()
    tree.extend(0, ids(1, 2, 3))
    found = tree.match(ids(1, 2, 3), 2)
    assert found is not None
    assert found.n == 2


def test_releasing_one_holder_keeps_what_the_other_holds() -> None:
    tree = PrefixTree()
    tree.extend(0, ids(1, 2, 3, 4))
    tree.share(0, 1, 2)
    tree.release(0)
    assert tree.n_cells == 2
    assert list(tree.tokens(1)) == [1, 2]
    tree.release(1)
    assert tree.n_cells == 0


def test_equal_tokens_computed_apart_are_cells_apart() -> None:
    tree = PrefixTree()
    tree.extend(0, ids(1, 2))
    tree.extend(1, ids(1, 2))
    assert tree.n_cells == 4


def test_a_holder_inside_another_is_subsumed() -> None:
    tree = PrefixTree()
    tree.extend(0, ids(1, 2, 3, 4))
    tree.share(0, 1, 2)
    assert tree.subsumed(0) == [1]
    assert tree.subsumed(1) == []


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_the_tree_equals_a_plain_model_of_cells(data: st.DataObject) -> None:
    """Against holders that keep a list of cell objects each."""
    tree = PrefixTree()
    model: dict[int, list[tuple[int, object]]] = {}
    for _ in range(data.draw(st.integers(1, 25))):
        action = data.draw(st.sampled_from(["extend", "share", "truncate", "release", "rename"]))
        holder = data.draw(st.integers(0, 4))
        held = model.get(holder, [])
        if action == "extend":
            tokens = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=6))
            tree.extend(holder, array("i", tokens))
            model[holder] = held + [(t, object()) for t in tokens]
        elif action == "share" and not held:
            prompt = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=8))
            found = tree.match(array("i", prompt), len(prompt))
            best = max((common(prompt, m) for m in model.values()), default=0)
            assert (found.n if found else 0) == best
            if found is not None:
                assert common(prompt, model[found.holder]) >= found.n
                tree.share(found.holder, holder, found.n)
                model[holder] = model[found.holder][: found.n]
        elif action == "truncate":
            n = data.draw(st.integers(0, 8))
            tree.truncate(holder, n)
            model[holder] = held[:n]
        elif action == "release":
            tree.release(holder)
            model[holder] = []
        elif action == "rename" and held and not model.get(9):
            tree.rename(holder, 9)
            model[9], model[holder] = held, []
        tree.check()
        assert tree.n_cells == len({id(cell) for m in model.values() for _, cell in m})
        for h, m in model.items():
            assert list(tree.tokens(h)) == [t for t, _ in m]


def common(prompt: list[int], held: list[tuple[int, object]]) -> int:
    n = 0
    while n < min(len(prompt), len(held)) and prompt[n] == held[n][0]:
        n += 1
    return n


def test_cells_shared_by_retained_prefixes_alone_count_once() -> None:
    tree = PrefixTree()
    tree.extend(1, array("i", range(10)))
    tree.share(1, 2, 6)
    tree.extend(2, array("i", [50, 51]))
    assert tree.held_by({1, 2}) == tree.n_cells == 12
    assert tree.held_by({1}) == 4
    assert tree.held_by(set()) == 0
