"""/metrics: Prometheus text, the numbers that were served, and what the dashboard asks for."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from edgellm.server.prom import Histogram, Metrics
from tests.server.conftest import Running

ROOT = Path(__file__).parents[2]
SAMPLE = re.compile(r'([a-zA-Z_:][\w:]*)(?:\{((?:\w+="(?:[^"\\]|\\.)*",?)*)\})? (\S+)')


def samples(text: str) -> dict[tuple[str, str], float]:
    """(name, labels) -> value; every line must be a comment or a sample."""
    found = {}
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        match = SAMPLE.fullmatch(line)
        assert match is not None, line
        key = (match[1], match[2] or "")
        assert key not in found, f"{key} is there twice"
        found[key] = float(match[3])
    return found


@pytest.fixture
def fresh(serving: Callable[..., Running]) -> Running:
    return serving()


def ask(client: httpx.Client, **more: Any) -> httpx.Response:
    body = {"prompt": "one two three", "max_tokens": 4, **more}
    return client.post("/v1/completions", json=body)


def test_counters_are_what_the_answers_said(fresh: Running) -> None:
    with fresh.client() as client:
        usages = [ask(client, max_tokens=n).json()["usage"] for n in (1, 4, 16)]
        ask(client, temperature=50)
        text = client.get("/metrics").text
    found = samples(text)
    model = 'model="starter"'
    assert found["edgellm_generated_tokens_total", model] == 21
    prompt = sum(u["prompt_tokens"] for u in usages)
    assert found["edgellm_prompt_tokens_total", model] == prompt
    cached = sum(u["prompt_tokens_details"]["cached_tokens"] for u in usages)
    assert found["edgellm_cached_tokens_total", model] == cached
    both = 'model="starter",priority="normal"'
    assert found["edgellm_ttft_seconds_count", both] == 3
    assert found["edgellm_e2e_seconds_count", both] == 3
    # A gap between tokens for every token but each answer's first.
    assert found["edgellm_itl_seconds_count", both] == 18
    assert found["edgellm_errors_total", 'class="InvalidRequestError"'] == 1
    ok = 'endpoint="/v1/completions",status="200"'
    assert found["edgellm_requests_total", ok] == 3


def test_every_series_has_help_and_type_once(fresh: Running) -> None:
    with fresh.client() as client:
        ask(client, priority="batch")
        answer = client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    kinds = re.findall(r"^# TYPE (\S+) (\w+)$", answer.text, re.MULTILINE)
    names = [name for name, _ in kinds]
    assert len(names) == len(set(names))
    assert re.findall(r"^# HELP (\S+) ", answer.text, re.MULTILINE) == names
    for name, _ in samples(answer.text):
        base = re.sub(r"_(bucket|sum|count)$", "", name)
        assert base in names or name in names
    assert 'priority="batch"' in answer.text


def test_an_unknown_path_does_not_make_a_series_of_its_own(fresh: Running) -> None:
    with fresh.client() as client:
        for i in range(5):
            client.get(f"/scan/{i}")
        text = client.get("/metrics").text
    assert "/scan" not in text
    assert samples(text)["edgellm_requests_total", 'endpoint="other",status="404"'] == 5


def test_the_dashboard_asks_for_nothing_that_is_not_there(fresh: Running) -> None:
    board = json.loads((ROOT / "packaging/grafana/edgellm.json").read_text())
    with fresh.client() as client:
        ask(client)
        ask(client, temperature=50)
        text = client.get("/metrics").text
    known = set(re.findall(r"^# TYPE (\S+)", text, re.MULTILINE))
    asked = [t["expr"] for p in board["panels"] for t in p.get("targets", ())]
    asked += [v["query"]["query"] for v in board["templating"]["list"]]
    names = {n for expr in asked for n in re.findall(r"edgellm_\w+", expr)}
    assert len(names) > 15
    for name in names:
        assert re.sub(r"_(bucket|count)$", "", name) in known or name in known, name


def test_labels_are_escaped_and_large_counters_keep_their_digits() -> None:
    metrics = Metrics()
    metrics.add("edgellm_generated_tokens_total", 123_456_789, model='a"b\\c\nd')
    text = metrics.render([])
    assert 'edgellm_generated_tokens_total{model="a\\"b\\\\c\\nd"} 123456789' in text


def test_a_histogram_counts_each_value_once_and_up_to_infinity() -> None:
    histogram = Histogram((0.1, 1.0))
    for value in (0.05, 0.1, 0.5, 7):
        histogram.observe(value)
    assert histogram.counts == [2, 1, 1]
    assert histogram.total == pytest.approx(7.65)


def test_stats_and_plan_tell_the_engines_numbers(fresh: Running) -> None:
    with fresh.client() as client:
        ask(client)
        stats = client.get("/v1/edgellm/stats").json()
        plan = client.get("/v1/edgellm/plan").json()
        other = client.post("/v1/edgellm/plan", json={"model": "starter", "ctx": 512}).json()
    assert stats["models"][0]["state"] == "loaded"
    assert stats["engines"]["starter"]["generated_tokens"] == 4
    assert "step" in stats["engines"]["starter"]
    assert plan["schema"] == "edgellm.plan/1"
    assert plan["report"] is not None
    assert other["params"]["n_ctx"] == 512
