# edgellm: `make demo` answers with a real model, `make test` proves it works.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/pip --disable-pip-version-check --quiet
# The RPC backend costs a few seconds of compiling and lets tests offload layers without a GPU.
export CMAKE_ARGS ?= -DGGML_RPC=ON
# Test files side by side, each whole in one process; one worker a core.
PYTEST_ARGS ?= -n auto --dist loadfile

.PHONY: clients demo test lint types check generate docs packaging dist install-check audit clean

$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "edgellm needs Python 3.10 to 3.13; try: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	@command -v c++ >/dev/null || \
	  { echo "a C++ compiler is needed to build the engine; try: sudo apt install build-essential"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --upgrade 'pip>=25.1'
	touch $@

$(VENV)/.installed: pyproject.toml $(VENV)/.python
	@echo "Installing. The engine is compiled once (about 10 minutes on two cores), then cached."
	$(PIP) install --editable '.[engine,starter]' --group dev
	touch $@

# The tools of docs, packaging and releases; nothing of the product needs them.
$(VENV)/.tools: pyproject.toml $(VENV)/.python
	$(PIP) install --group release
	touch $@

demo: $(VENV)/.installed
	$(BIN)/edgellm plan starter
	$(BIN)/edgellm chat starter --stats --temperature 0 -p 'Name the capital of France and one thing it is known for.'
	@echo 'Next: . $(BIN)/activate   then: edgellm   (the terminal interface), or: edgellm chat starter'

test: $(VENV)/.installed
	$(BIN)/pytest $(PYTEST_ARGS)

lint: $(VENV)/.installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(VENV)/.installed
	$(BIN)/mypy

check: lint types docs packaging dist install-check test

# Completions, manual page and reference pages, from the command line itself.
generate: $(VENV)/.installed
	$(BIN)/python packaging/generate.py

docs: $(VENV)/.tools
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

packaging: $(VENV)/.installed $(VENV)/.tools
	PATH="$(CURDIR)/$(BIN):$$PATH" packaging/check.sh

dist: $(VENV)/.tools
	rm -rf dist
	$(BIN)/python -m build --outdir dist . >/dev/null
	$(BIN)/twine check --strict dist/*
	$(BIN)/check-wheel-contents dist/*.whl
	@$(BIN)/python packaging/wheel_size.py dist/*.whl

# The wheel through pipx in an empty home, with an engine and without one.
install-check: dist $(VENV)/.installed
	@PYTHON=$(BIN)/python packaging/try_install.sh dist/*.whl

# Licences, the bill of materials, and known vulnerabilities. The last asks a database on the network:
# one that cannot be reached is a failure, not a clean result.
audit: $(VENV)/.installed $(VENV)/.tools
	$(BIN)/python packaging/licences.py --check --listed
	mkdir -p dist
	$(BIN)/cyclonedx-py environment --output-file dist/sbom.json $(BIN)/python
	$(BIN)/pip freeze --exclude-editable > $(VENV)/installed.txt
	$(BIN)/pip-audit --strict --disable-pip --no-deps --requirement $(VENV)/installed.txt

# Other people's clients, as their registries have them: tests/server/clients runs them.
CLIENTS := tests/server/clients
.venv-clients/.installed: $(CLIENTS)/requirements.txt $(CLIENTS)/package.json
	$(PYTHON) -m venv .venv-clients
	.venv-clients/bin/pip install --quiet --disable-pip-version-check -r $(CLIENTS)/requirements.txt
	if command -v npm >/dev/null; then npm install --silent --no-audit --no-fund --prefix $(CLIENTS); fi
	touch $@

clients: .venv-clients/.installed

clean:
	rm -rf $(VENV) build dist site .mypy_cache .ruff_cache .pytest_cache
