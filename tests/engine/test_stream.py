"""Text a client may see: whole characters, and nothing of a stop string."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from edgellm.engine.stream import TextStream


@given(st.text(), st.data())
def test_any_cut_of_the_bytes_gives_the_text_back(text: str, data: st.DataObject) -> None:
    raw = text.encode("utf-8", "replace")
    stream = TextStream()
    out, at = "", 0
    while at < len(raw):
        n = data.draw(st.integers(1, 4))
        piece = stream.push(raw[at : at + n])
        assert "\ufffd" not in piece or "\ufffd" in text
        out += piece
        at += n
    assert out + stream.finish() == raw.decode()


def test_a_character_that_never_ends_comes_out_as_a_replacement_at_the_end() -> None:
    stream = TextStream()
    assert stream.push("é".encode()[:1]) == ""
    assert stream.finish() == "\ufffd"


def test_a_stop_string_across_pieces_is_held_back_and_cut() -> None:
    stream = TextStream(("<end>",))
    assert stream.push(b"hello <e") == "hello "
    assert stream.push(b"n") == ""
    assert stream.push(b"d> more") == ""
    assert stream.matched == "<end>"
    assert stream.finish() == ""


def test_what_only_looked_like_a_stop_string_is_released() -> None:
    stream = TextStream(("<end>",))
    assert stream.push(b"a <en") == "a "
    assert stream.push(b"try") == "<entry"
    assert stream.push(b" <e") == " "
    assert stream.finish() == "<e"


def test_of_two_stops_the_earlier_wins_and_the_longer_of_equals() -> None:
    stream = TextStream(("b", "ab", "abc"))
    assert stream.push(b"xabc") == "x"
    assert stream.matched == "abc"


@given(st.text("ab<", max_size=30), st.lists(st.text("ab<", min_size=1, max_size=4), max_size=3))
def test_the_output_is_the_text_before_the_first_stop(text: str, stops: list[str]) -> None:
    stream = TextStream(tuple(stops))
    out = ""
    for char in text:
        out += stream.push(char.encode())
        if stream.matched is not None:
            break
    out += stream.finish()
    assert text.startswith(out)
    assert not any(stop in out for stop in stops)
    if stream.matched is None:
        assert out == text
