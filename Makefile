# `make` or `make help` says what there is, what it takes and how long. ARGS goes to the tool:
# make run VERSION=02 ARGS="--seqlen 1024 --causal", make test ARGS="-m gpu".
VERSION ?= 02
PYTHON ?= python3
PY := .venv/bin/python
QUICK := $(addprefix tests/,test_house.py test_examples.py catalog/test_catalog.py problem) \
	$(addprefix tests/tools/test_,commands.py run_version.py) $(addprefix tests/emulator/test_,memory.py parse.py races.py)

# Tests begin many processes. Each would compile all modules anew, and pytest all assertions.
unexport PYTHONDONTWRITEBYTECODE

PUBLIC := tests/public
PYTEST := $(PY) -m pytest -n auto --dist worksteal

.PHONY: help run test test-long test-gpu test-public quick lint doctor venv dev clean

help:
	@echo 'make run VERSION=02  compile a rung, run it, check it, log it; makes .venv first, and says what that takes'
	@echo 'make venv            makes .venv alone: what running needs, without the tests'
	@echo 'make doctor          what this machine has and lacks, and what mends it'
	@echo 'make quick           a part of the tests: about a minute'
	@echo 'make test            the tests: about 8 minutes on two cores; the first time 12, as kernels are compiled'
	@echo 'make test-long       those that take longer: about 25 minutes on two cores; of rungs that no call launches and of'
	@echo '                     mutations an eighth, of some of launched ones a quarter, which their files choose;'
	@echo '                     FLASHLADDER_TESTS=all make test-long asks all'
	@echo 'make test-gpu        what runs on a GPU before each release: about 8 minutes'
	@echo 'make test-public     what others wrote: Hopper kernels under the detector, engines that call ours; fetches their sources'
	@echo '                     and wheels, or FLASHLADDER_PUBLIC=DIR has them'
	@echo 'make lint            ruff, clang-format and mypy: about a minute'
	@echo 'make clean           removes .venv and what was built'
	@echo
	@echo 'The tests bring 1.3 GB more into .venv. ARGS="..." goes to the tool, PYTHON=... makes .venv.'

run: venv
	@$(PY) -m flashladder run $(VERSION) $(ARGS)

test: dev
	$(PYTEST) --ignore=$(PUBLIC) -m "not slow and not gpu" $(ARGS)

test-long: dev
	$(PYTEST) --ignore=$(PUBLIC) -m "slow and not gpu" $(ARGS)

test-gpu: dev
	$(PY) -m flashladder.tests.support.release

test-public: dev
	$(PY) -m pytest -n auto --dist loadgroup $(PUBLIC) $(ARGS)

quick: dev
	$(PYTEST) $(QUICK) $(ARGS)

lint: dev
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	@find common versions -path versions/private -prune -o -regex '.*\.\(cuh?\|cpp\|c\|h\)' -print0 | xargs -0 .venv/bin/clang-format --dry-run --Werror
	@mkdir -p .mypy_cache && ln -sfn .. .mypy_cache/flashladder
	$(PY) -m mypy

doctor: venv
	@$(PY) -m flashladder doctor

venv:
	@$(PYTHON) tools/bootstrap.py

dev:
	@$(PYTHON) tools/bootstrap.py dev

clean:
	rm -rf .venv build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
