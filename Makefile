# `make` tells what there is. Each target sets up what it needs; the second time that is instant.

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

export VENV ?= .venv
export PYTHON ?= python3
export URL
BIN := $(VENV)/bin
RUN := $(VENV)/.shoal-run
DEV := $(VENV)/.shoal-dev
OUT ?= crawl.jsonl
EXTRAS := flower|shoal
# Three at a time: most tests wait for servers and clocks, and two leave half of two cores idle. More would
# crowd the tests that measure a pace. What is slow because it loads the machine runs two at a time.
JOBS ?= 3
SLOW_JOBS ?= 2

.PHONY: help
help: ## Show this.
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

# -- use ------------------------------------------------------------------------------------

.PHONY: setup
setup: $(DEV) ## Make .venv with everything, tests and linters included.

.PHONY: crawl
crawl: $(RUN) ## Crawl URL=https://… into OUT=crawl.jsonl (no URL: a bundled demo site); more flags in ARGS=.
	@# No globbing, and the URL comes by the environment: it may hold & ? and *.
	@set -f; code=0; $(BIN)/shoal crawl $${URL:---demo} --out $(OUT) $(ARGS) || code=$$?; \
	if [ $$code -eq 1 ]; then echo "some URLs are dead; everything else is in $(OUT)" >&2; code=0; fi; \
	exit $$code

# -- develop --------------------------------------------------------------------------------

.PHONY: test
test: $(DEV) ## Run the tests: every promise, in six minutes.
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not slow" $(ARGS)

.PHONY: test-all
test-all: $(DEV) ## Run all tests, storms and long measurements of the pace included; those alone: ARGS="-m slow".
	SHOAL_HYPOTHESIS=whole $(BIN)/python -m pytest -n $(SLOW_JOBS) --dist worksteal --timeout 600 $(ARGS)

.PHONY: again
again: $(DEV) ## Run what failed last once more, alone.
	$(BIN)/python -m pytest -n 0 --last-failed --last-failed-no-failures none $(ARGS)

.PHONY: guides
guides: $(DEV) ## Type what README and the guides say, page by page (three minutes, as root); one: PAGES=docs/guides/redis.md.
	JOBS=$(SLOW_JOBS) $(BIN)/python scripts/run_guides.py $(PAGES)

.PHONY: contract
contract: $(DEV) ## Run the frontier contract on every backend; one: ARGS="-k Sqlite".
	SHOAL_HYPOTHESIS=whole $(BIN)/python -m pytest -n $(JOBS) --dist worksteal --timeout 600 tests/contract $(ARGS)

.PHONY: matrix
matrix: $(DEV) ## Run the contract suites and write down which backend keeps which chapter.
	SHOAL_MATRIX=docs/reference/backends.md $(BIN)/python -m pytest -n $(JOBS) --dist worksteal tests/contract

.PHONY: storm
storm: $(DEV) ## Kill workers and servers at full size, on every backend, and count (half an hour); one: ARGS="-k redis".
	SHOAL_STORM=1 $(BIN)/python -m pytest -n 0 -rP --timeout 1800 tests/flow/test_storm.py tests/flow/test_faults.py \
		tests/flow/test_many_hosts.py tests/flow/test_two_jobs.py tests/flow/test_nodes.py $(ARGS)

.PHONY: hostile
hostile: $(DEV) ## 100 honest hosts beside 429 hostile ones, and what that costs the honest (three minutes).
	SHOAL_HOSTILE=1 $(BIN)/python -m pytest -n 0 -rP tests/flow/test_hostile_hosts.py $(ARGS)

.PHONY: rabbit-storm
rabbit-storm: $(DEV) ## Bad pages, killed workers and a killed RabbitMQ at full size (a quarter of an hour).
	SHOAL_STORM=1 $(BIN)/python -m pytest -n 0 -rP tests/flow/test_rabbitmq_storm.py $(ARGS)

.PHONY: check
check: lint types test-all ## Lint, types and all tests.

.PHONY: fmt
fmt: $(DEV) ## Format the code and repair what the linter can.
	$(BIN)/ruff check --fix --quiet .
	$(BIN)/ruff format .

.PHONY: lint
lint: $(DEV) ## Style, import directions, dependencies, shell scripts.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	@# `shoal.testing` is for people who have pytest; Flower is only started, `shoal[all]` names the extras.
	$(BIN)/deptry src --per-rule-ignores "DEP004=pytest|hypothesis,DEP002=$(EXTRAS)"
	$(BIN)/shellcheck .ci/run scripts/*.sh bench/*.sh

.PHONY: types
types: $(DEV) ## Check the types.
	$(BIN)/mypy

.PHONY: docs
docs: $(DEV) ## Make the reference pages from the code.
	$(BIN)/python scripts/make_reference.py

.PHONY: bench
bench: $(DEV) ## Measure frontiers, queues, brokers and whole crawls against peers; writes bench/RESULTS.md (half an hour).
	sh bench/setup_peers.sh
	$(BIN)/python -m bench.run

.PHONY: load
load: $(DEV) ## The job service under load: 200 clients, a million items, cancelling 50,000 URLs (two minutes).
	$(BIN)/python -m bench.load
	$(BIN)/python -m bench.cancel

.PHONY: constraints
constraints: $(DEV) ## Write down the versions that are installed now.
	@head -n 2 constraints.txt >constraints.new
	@$(BIN)/python -m pip freeze --exclude-editable --all | grep -v -i -E '^(setuptools|wheel)==|^#' | sort -f >>constraints.new
	@mv constraints.new constraints.txt

.PHONY: clean
clean: ## Remove what can be made again. Your crawls in .shoal/ stay.
	rm -rf $(VENV) dist build bench/.work .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find src tests bench examples scripts -name __pycache__ -type d -prune -exec rm -rf {} +

$(RUN): pyproject.toml constraints.txt scripts/setup.sh
	@sh scripts/setup.sh run

$(DEV): pyproject.toml constraints.txt scripts/setup.sh
	@sh scripts/setup.sh dev
