# Each target works in a clean clone: it needs python3 (3.11 or later, with venv) or uv, and the
# network for the first installation. It prints what it does, ends with its figure, and fails when
# that falls short.

PYTHON ?= python3
UV_VERSION ?= >=0.8,<1
# The installed uv, or one of our own in .uv/.
UV ?= $(or $(shell command -v uv 2>/dev/null),.uv/bin/uv)
# What the lock file says, and nothing else.
RUN := $(UV) run --frozen
PYTEST_ARGS ?=
CASE_ARGS ?=
FAULT_ARGS ?=
EQUALITY_ARGS ?=
BENCH_ARGS ?=
MEMORY_ARGS ?=
DEMO_ARGS ?=
SEED1_ARGS ?=
SEED1_STALL_S ?= 60

# mlx has wheels for macOS 14 and later; uv assumes 13 and would pick an old release.
export MACOSX_DEPLOYMENT_TARGET ?= 14.0

.DEFAULT_GOAL := help

.PHONY: help
help: ## List the targets.
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: demo
demo: install ## Kill an engine in the middle of a sentence, and see the sentence go on.
	@$(RUN) headrace demo $(DEMO_ARGS)

.PHONY: test
test: install ## Run the tests (PYTEST_ARGS selects).
	@$(RUN) pytest $(PYTEST_ARGS)

.PHONY: lint
lint: install ## Style, types and layers.
	$(RUN) ruff check
	$(RUN) ruff format --check
	$(RUN) mypy
	$(RUN) lint-imports

.PHONY: failover
failover: install ## Kill and freeze engines under requests over HTTP; prints one table.
	@$(RUN) python -m tests.e2e.failover

.PHONY: faults
faults: install ## Every fault scenario on the real stack, under load (FAULT_ARGS selects).
	@$(RUN) python -m tests.e2e.faults $(FAULT_ARGS)

.PHONY: kill-loop
kill-loop: install ## Mixed faults under constant load for KILL_LOOP_MINUTES (30).
	@$(RUN) python -m tests.e2e.kill_loop

.PHONY: cases
cases: install ## The field cases against the real stack (CASE_ARGS selects).
	@$(RUN) python -m tests.cases.driver $(CASE_ARGS)

.PHONY: stream-equality
stream-equality: install ## Streamed experts against resident ones, bit for bit (EQUALITY_ARGS selects).
	@$(RUN) python -m tests.streaming.equality $(EQUALITY_ARGS)

.PHONY: seed1
seed1: install ## Slow and stalled storage under an engine and a fleet (SEED1_ARGS, SEED1_STALL_S).
	@$(RUN) python -m tests.streaming.seed1 $(SEED1_ARGS)
	@$(RUN) python -m tests.e2e.storage --stall-s $(SEED1_STALL_S)

.PHONY: bench
bench: install ## What streaming costs, and could cost at least (BENCH_ARGS=--short is for CI).
	@$(RUN) python -m tests.bench.limits $(BENCH_ARGS)

.PHONY: memory-limit
memory-limit: install ## Serve from half the checkpoint's memory, in a cgroup (MEMORY_ARGS selects).
	@$(RUN) python -W ignore -m tests.bench.memory_limit $(MEMORY_ARGS)

.PHONY: lock-check
lock-check: install ## What the lock file installs on macOS arm64 and Linux, Python 3.11 to 3.13.
	@UV=$(UV) $(RUN) python -m tools.check_lock

.PHONY: wheel-check
wheel-check: install ## Build the wheel, install it alone, and run it.
	@UV=$(abspath $(UV)) tools/check_wheel.sh

.PHONY: install
install: $(filter .uv/bin/uv,$(UV)) ## Install what the lock file says into .venv/.
	@$(UV) sync --frozen --quiet

# A clone without uv on PATH gets one of its own.
.uv/bin/uv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: $(PYTHON) is missing or older than 3.11; install Python 3.11 or later, or" \
	         "name one: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "error: $(PYTHON) has no venv; on Debian and Ubuntu: apt install python3-venv" >&2; \
	    exit 1; }
	@echo "uv is not installed; putting one into .uv/"
	@rm -rf .uv
	@$(PYTHON) -m venv .uv
	@.uv/bin/pip install --quiet --disable-pip-version-check 'uv$(UV_VERSION)' || \
	  { rm -rf .uv; echo "error: pip could not install uv; is there a network?" >&2; exit 1; }
