# `make help` lists the targets. Everything runs in a virtual environment that `make setup` builds;
# SGLANG_VERSION=0.5.18 make ... uses another SGLang release, in a virtual environment of its own.

PYTHON ?= python3
MINUTES ?= 2
RIG := PYTHONPATH=tests $(PYTHON) -m rig.build_env
VENV := $(shell $(RIG) --print-venv)
PY := $(VENV)/bin/python
STRESS_TESTS := tests/test_native.py tests/test_ring_model.py tests/test_fuzz.py tests/test_kills.py
CXX_FILES = $(wildcard csrc/*.cpp csrc/*.h csrc/tests/*.cpp csrc/*.cu csrc/*.cuh)

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-fast test-gpu test-releases stress check lint format clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

setup: ## build .venv: SGLang for CPUs, hstransport, the test models (2 minutes; quick when done)
	@$(RIG)

demo: setup ## serve SmolLM2, extract hidden states of demo/prompts.jsonl into data/shards, verify
	@PYTHONPATH=tests $(PY) demo/run.py

test: setup ## all tests, those with a real SGLang server too
	@$(PY) -m pytest -n 2 --dist loadfile $(ARGS)

test-fast: setup ## the tests that start no server
	@$(PY) -m pytest -m "not sglang" $(ARGS)

test-gpu: setup ## the tests that need an NVIDIA GPU; they skip with the reason where there is none
	@$(PY) -m pytest -m gpu $(ARGS)

test-releases: setup ## check every SGLang release that pip offers (downloads their sources)
	@SGLANG_RELEASES=all $(PY) -m pytest tests/test_releases.py $(ARGS)

stress: setup ## sanitizers, spin, fuzzers for MINUTES=2 each, hundreds of kills; skips say what to install
	@$(PY) -m pip install --quiet --disable-pip-version-check -r tests/rig/requirements/stress.txt || \
		echo "make: no atheris for this Python: its tests are skipped"
	@$(PY) -m pytest --stress $(MINUTES) $(STRESS_TESTS) --durations=0 $(ARGS)

lint: setup ## formatting, ruff, mypy, clang-format
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy
	$(if $(CXX_FILES),$(VENV)/bin/clang-format --dry-run -Werror $(CXX_FILES))

format: setup ## rewrite the sources as `make lint` wants them
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .
	$(if $(CXX_FILES),$(VENV)/bin/clang-format -i $(CXX_FILES))

check: lint test ## everything: formatting, lint, types, tests (CI leaves the exhaustive tests out)

clean: ## remove what was built or made here: virtual environments, models, demo data
	rm -rf .venv .venv-* build dist models data .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
