"""Frames arrive whole in any slicing, and every error comes back as the class it was."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgellm import errors
from edgellm.engine import wire
from edgellm.gguf.reader import IncompleteHeaderError
from edgellm.request import TokenEvent

SAMPLES = {
    "GGUFError": errors.GGUFError("/m.gguf", "cut short", offset=12),
    "IncompleteHeaderError": IncompleteHeaderError("/m.gguf", needed=64, offset=12),
    "DiskFullError": errors.DiskFullError("no room", required=2, available=1),
    "DoesNotFitError": errors.DoesNotFitError(
        "too big", device="CUDA0", required=5, available=3, smallest_fix="--ctx 2048"
    ),
    "InvalidRequestError": errors.InvalidRequestError("wrong", param="n", hint="use 1"),
    "ContextOverflowError": errors.ContextOverflowError(9000, 8192),
    "DecodeError": errors.DecodeError("failed", code=-3),
}


@pytest.mark.parametrize("name", sorted(wire.ERROR_CLASSES))
def test_every_error_class_crosses_the_border_and_comes_back(name: str) -> None:
    cls = wire.ERROR_CLASSES[name]
    error = SAMPLES.get(name) or cls("it went wrong", hint="try this")
    again = wire.rebuild_error(wire.error_info(error))
    assert type(again) is type(error) is cls
    assert vars(again) == vars(error)
    assert str(again) == str(error)


def test_the_map_holds_every_class_of_the_tree() -> None:
    in_module = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.EdgeLLMError)
    }
    assert in_module <= set(wire.ERROR_CLASSES)


def test_a_foreign_exception_becomes_an_engine_error_with_its_name() -> None:
    again = wire.rebuild_error(wire.error_info(KeyError("x")))
    assert type(again) is errors.EngineError
    assert "KeyError" in again.message


@given(st.lists(st.text(max_size=50), max_size=6), st.integers(1, 40))
def test_frames_survive_any_slicing(texts: list[str], size: int) -> None:
    messages = [wire.Events([TokenEvent(request_id="r", text=t)]) for t in texts]
    data = b"".join(wire.pack(m) for m in messages)
    unframer = wire.Unframer()
    bodies: list[bytes] = []
    for at in range(0, len(data), size):
        bodies += unframer.feed(data[at : at + size])
    again = [wire.from_child_decoder.decode(b) for b in bodies]
    assert [m.events[0].text for m in again if isinstance(m, wire.Events)] == texts


def test_an_impossible_length_is_refused() -> None:
    with pytest.raises(ValueError, match="a frame of"):
        wire.Unframer().feed(b"\xff\xff\xff\xff")
