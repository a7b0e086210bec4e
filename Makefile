# `make demo` and `make test` make their environment first; `make help` lists the rest.
SHELL := /bin/bash
VENV := .venv
PY := $(VENV)/bin/python
RUN_DIR ?= runs/demo-$(shell date +%Y%m%d-%H%M%S)
export HF_HUB_OFFLINE := 1

.DEFAULT_GOAL := help
.PHONY: help setup setup-gpu setup-awq demo serve bench-serve test test-fast lint types bench-train requirements clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

setup:  ## make .venv from requirements/cpu.txt and the bundled model, where missing or out of date
	@requirements/make_venv.sh $(VENV) requirements/cpu.txt
	@$(PY) -m policy.bundled

setup-gpu:  ## make .venv-gpu from requirements/gpu.txt, on a machine with CUDA
	@requirements/make_venv.sh .venv-gpu requirements/gpu.txt

demo: setup  ## train the bundled 135M model on arithmetic, end to end, on this machine
	@$(PY) train.py configs/laptop.yaml run_dir=$(RUN_DIR)

setup-awq: setup
	@requirements/make_overlay.sh .venv-awq requirements/awq.txt $(PY)

serve: setup-awq  ## serve the newest trained run, or the bundled model, over HTTP on this machine
	@$(PY) -m serve $(SOURCE)

bench-serve: setup-awq  ## the gateway against the bare engine, cache hits against a constant
	@$(PY) -m benchmarks.bench_serve

test: setup-awq  ## every test that needs no GPU
	@requirements/test_tools.sh
	@$(PY) -m pytest -m "not gpu"

test-fast: setup  ## the pure tests: no Ray, no vLLM
	@requirements/test_tools.sh
	@$(PY) -m pytest -m fast

lint: setup  ## ruff
	@$(PY) -m ruff check . && $(PY) -m ruff format --check .

types: setup  ## mypy
	@$(PY) -m mypy

bench-train: setup  ## training against TRL on the same work (STEPS=10 takes an hour on 2 cores)
	@requirements/make_venv.sh .venv-peer requirements/peer.txt
	@$(PY) -m benchmarks.bench_train --peer-python .venv-peer/bin/python --steps $(or $(STEPS),10)

requirements: setup  ## renew the pinned lists from pyproject.toml (needs uv)
	echo 'torch==2.13.0+cpu' | uv pip compile pyproject.toml - --extra cpu --constraint requirements/constraints.txt \
	  --override requirements/overrides.txt --python-version 3.11 --no-annotate --no-header -o requirements/cpu.txt
	grep -v -E '^torch|^triton' requirements/overrides.txt > requirements/.gpu-overrides
	uv pip compile pyproject.toml --extra gpu --constraint requirements/constraints.txt \
	  --override requirements/.gpu-overrides --python-version 3.11 --no-annotate --no-header -o requirements/gpu.txt
	rm requirements/.gpu-overrides

clean:  ## remove the environment and the caches, not the runs
	rm -rf .venv .venv-gpu .venv-awq .venv-peer .pytest_cache .mypy_cache .ruff_cache
