"""Programs of others, as installed from their registries, against a running server.

`make clients` installs them; without them these tests say so and are skipped.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.server.conftest import Running

HERE = Path(__file__).parent
ENVIRONMENT = HERE.parents[2] / ".venv-clients"
PYTHON = ENVIRONMENT / "bin" / "python"

needs_python = pytest.mark.skipif(
    not (ENVIRONMENT / ".installed").exists(), reason="`make clients` installs these programs"
)
needs_node = pytest.mark.skipif(
    shutil.which("node") is None or not (HERE / "node_modules" / "openai").is_dir(),
    reason="`make clients` installs this package where there is npm",
)


def run(*command: str | Path, cwd: Path = HERE, timeout: int = 240, **environ: str) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        cwd=cwd,
        env={**{k: v for k, v in os.environ.items() if k != "PYTHONPATH"}, **environ},
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.model
@needs_python
@pytest.mark.parametrize("script", ["use_langchain.py", "use_litellm.py"])
def test_a_python_client_passes_its_script(starter: Running, script: str) -> None:
    # litellm would fetch a price list from the network first.
    run(PYTHON, HERE / script, starter.url, LITELLM_LOCAL_MODEL_COST_MAP="True")


@pytest.mark.model
@needs_node
def test_the_node_sdk_passes_its_script(starter: Running) -> None:
    run("node", HERE / "use_openai.mjs", starter.url)


@pytest.mark.model
@needs_python
@pytest.mark.parametrize("more", [(), ("--no-stream",)])
def test_the_llm_command_answers(starter: Running, tmp_path: Path, more: tuple[str, ...]) -> None:
    (tmp_path / "extra-openai-models.yaml").write_text(
        f"- model_id: here\n  model_name: starter\n  api_base: {starter.url}/v1\n"
    )
    answer = run(
        ENVIRONMENT / "bin" / "llm",
        *("-m", "here", "-o", "max_tokens", "40", *more),
        "What is the capital of France? Answer in one sentence.",
        LLM_USER_PATH=str(tmp_path),
        OPENAI_API_KEY="none",
    )
    assert "Paris" in answer


@pytest.mark.slow
@needs_python
def test_schemathesis_finds_no_5xx(scripted: Running, tmp_path: Path) -> None:
    run(
        ENVIRONMENT / "bin" / "schemathesis",
        *("run", f"{scripted.url}/openapi.json", "--checks", "not_a_server_error"),
        *("--phases", "coverage,fuzzing", "--max-examples", "5", "--seed", "29"),
        # These two would end the server and the model under test.
        *("--exclude-path", "/v1/edgellm/stop", "--exclude-path", "/v1/edgellm/unload"),
        cwd=tmp_path,  # it keeps what it found beside where it runs
    )
