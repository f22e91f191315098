# edgellm: `make demo` answers with a real model, `make test` proves it works.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# The RPC backend costs a few seconds of compiling and lets tests offload layers without a GPU.
export CMAKE_ARGS ?= -DGGML_RPC=ON

.PHONY: demo test lint types check clean

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --upgrade 'pip>=25.1'
	@echo "Installing. The engine is compiled once (about 10 minutes on two cores), then cached."
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[starter]' --group dev
	touch $@

demo: $(VENV)/.installed
	$(BIN)/edgellm plan starter
	$(BIN)/edgellm chat starter --stats -p 'In one sentence: what is the capital of France known for?'

test: $(VENV)/.installed
	$(BIN)/pytest

lint: $(VENV)/.installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(VENV)/.installed
	$(BIN)/mypy

check: lint types test

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache
