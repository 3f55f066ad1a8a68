PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install -q --disable-pip-version-check
ORACLES := .oracles/0.21.1/ready .oracles/0.24.2/ready

.PHONY: demo test lint bench bench-quick clean

demo: $(VENV)/demo
	$(BIN)/granular demo

test: $(VENV)/test $(ORACLES)
	$(BIN)/python -m pytest $(ARGS)

# What mypy sees depends on what is installed, so it is given all of it.
lint: $(VENV)/test $(VENV)/lint
	$(BIN)/ruff check granular tests benchmarks
	$(BIN)/ruff format --check granular tests benchmarks
	$(BIN)/mypy

bench: $(VENV)/test .oracles/0.24.2/ready
	$(BIN)/python -m benchmarks

bench-quick: $(VENV)/test .oracles/0.24.2/ready
	$(BIN)/python -m benchmarks --quick

clean:
	rm -rf $(VENV) .oracles .mypy_cache .pytest_cache .ruff_cache build dist

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/demo: pyproject.toml | $(BIN)/python
	$(PIP) -e '.[all,demo]'
	touch $@

$(VENV)/test: pyproject.toml | $(BIN)/python
	$(PIP) -e '.[all,test]'
	touch $@

$(VENV)/lint: pyproject.toml | $(BIN)/python
	$(PIP) -e '.[lint]'
	touch $@

# The published releases, each in an environment of its own: what they write, we read, and the other way round.
.oracles/%/ready: Makefile
	$(PYTHON) -m venv .oracles/$*
	.oracles/$*/bin/python -m pip install -q --disable-pip-version-check granular==$* pillow av
	touch $@
