"""The one table from error classes to HTTP, and the two shapes errors take."""

from __future__ import annotations

import pytest

from edgellm.engine.wire import error_info
from edgellm.errors import (
    ContextOverflowError,
    DoesNotFitError,
    EdgeLLMError,
    InvalidRequestError,
    QueueFullError,
)
from edgellm.request import ErrorInfo
from edgellm.server.errors import (
    TABLE,
    Problem,
    anthropic_body,
    every_error_class,
    openai_body,
    problem,
    problem_of_info,
)

ANTHROPIC_TYPES = {
    "invalid_request_error",
    "authentication_error",
    "permission_error",
    "not_found_error",
    "request_too_large",
    "rate_limit_error",
    "timeout_error",
    "api_error",
    "overloaded_error",
}


def test_the_table_names_every_class_of_the_tree_and_nothing_else() -> None:
    assert set(TABLE) == set(every_error_class())


@pytest.mark.parametrize("cls", list(TABLE), ids=lambda c: c.__name__)
def test_every_row_is_a_status_and_types_that_clients_know(cls: type[EdgeLLMError]) -> None:
    row = TABLE[cls]
    assert 400 <= row.status < 600
    assert row.anthropic in ANTHROPIC_TYPES
    if row.status < 500:
        assert row.type in ("invalid_request_error", "rate_limit_error")


def test_a_subclass_that_is_not_in_the_table_takes_its_parents_row() -> None:
    class Special(InvalidRequestError):
        pass

    assert problem(Special("no", param="x")).status == 400
    assert problem(Special("no", param="x")).param == "x"


@pytest.mark.parametrize(
    "error",
    [
        InvalidRequestError("bad", param="top_p"),
        ContextOverflowError(9000, 4096),
        QueueFullError("full"),
    ],
)
def test_an_error_from_the_engine_process_becomes_the_same_as_one_raised_here(
    error: EdgeLLMError,
) -> None:
    here, there = problem(error), problem_of_info(error_info(error))
    assert openai_body(here) == openai_body(there)
    assert here.status == there.status


def test_a_class_nobody_knows_is_a_500_and_not_a_crash() -> None:
    assert problem_of_info(ErrorInfo(type="Strange", message="?")).status == 500


def test_an_overflow_carries_both_counts_and_the_words_clients_look_for() -> None:
    failed = problem(ContextOverflowError(9000, 4096))
    error = openai_body(failed)["error"]
    assert error["code"] == "context_length_exceeded"
    assert (error["n_prompt_tokens"], error["n_ctx"]) == (9000, 4096)
    assert "maximum context length is 4096 tokens" in error["message"]
    assert "exceeds the available context size" in error["message"]
    words = anthropic_body(failed, "req_1")["error"]["message"]
    assert words == "prompt is too long: 9000 tokens > 4096 maximum"


def test_what_does_not_fit_is_not_a_status_that_sdks_try_again() -> None:
    failed = problem(
        DoesNotFitError("no", device="CUDA0", required=2, available=1, smallest_fix="--ctx 512")
    )
    assert failed.status == 422
    error = openai_body(failed)["error"]
    assert (error["device"], error["required"], error["available"]) == ("CUDA0", 2, 1)
    assert "--ctx 512" in error["message"]


def test_the_shapes_have_all_their_fields() -> None:
    failed = Problem(404, "gone", code="not_found")
    assert set(openai_body(failed)["error"]) == {"message", "type", "param", "code"}
    body = anthropic_body(failed, "req_1")
    assert body == {
        "type": "error",
        "error": {"type": "not_found_error", "message": "gone"},
        "request_id": "req_1",
    }


def test_too_many_requests_say_when_to_come_back() -> None:
    assert (b"retry-after", b"1") in problem(QueueFullError("full")).headers
