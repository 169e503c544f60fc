# `make` or `make help` says what there is, what it takes and how long. ARGS goes to the tool:
# make run VERSION=02 ARGS="--seqlen 1024 --causal", make test ARGS="-m gpu".
VERSION ?= 02
PYTHON ?= python3
PY := .venv/bin/python
QUICK := $(addprefix tests/,test_house.py catalog/test_catalog.py problem tools/test_commands.py tools/test_run_version.py) \
	$(addprefix tests/emulator/test_,memory.py parse.py races.py)

LONG := $(addprefix tests/emulator/test_,backward_mutations.py decode_mutations.py mutations.py) \
	tests/catalog/test_own_ladders.py tests/compiler/test_sass_rungs.py $(addprefix tests/studies/test_,accuracy.py ladder.py) \
	$(addprefix tests/predict/test_,ampere_model.py explain.py hopper_model.py operand_cache.py) \
	$(addprefix tests/workshop/test_,exercises.py new_version.py watch.py) \
	$(addprefix tests/rungs/test_,anchors.py backward.py configurations.py steps.py) \
	$(addprefix tests/api/test_,adopt.py architectures.py diffusers.py model_trial.py ring_processes.py transformers.py transformers_training.py) \
	$(addprefix tests/tuner/test_,forecast.py tuner_kill.py tuner_storage.py) tests/tools/test_wheel.py

PUBLIC := tests/public

.PHONY: help run test test-long test-public quick lint doctor venv dev clean

help:
	@echo 'make run VERSION=02  compile a rung, run it, check it, log it; makes .venv first, and says what that takes'
	@echo 'make venv            makes .venv alone: what running needs, without the tests'
	@echo 'make doctor          what this machine has and lacks, and what mends it'
	@echo 'make quick           a part of the tests: about a minute'
	@echo 'make test            the tests: about 9 minutes on two cores'
	@echo 'make test-long       those that take minutes each: about 16 minutes on two cores'
	@echo 'make test-public     Hopper kernels that others wrote; fetches their sources, or FLASHLADDER_PUBLIC=DIR has them'
	@echo 'make lint            ruff and mypy: about a minute'
	@echo 'make clean           removes .venv and what was built'
	@echo
	@echo 'The tests bring 1.3 GB more into .venv. ARGS="..." goes to the tool, PYTHON=... makes .venv.'

run: venv
	@$(PY) -m flashladder run $(VERSION) $(ARGS)

test: dev
	$(PY) -m pytest -n auto --dist worksteal $(addprefix --ignore=,$(LONG) $(PUBLIC)) $(ARGS)

test-long: dev
	$(PY) -m pytest -n auto --dist worksteal $(LONG) $(ARGS)

test-public: dev
	$(PY) -m pytest -n auto --dist loadgroup $(PUBLIC) $(ARGS)

quick: dev
	$(PY) -m pytest -n auto --dist worksteal $(QUICK) $(ARGS)

lint: dev
	$(PY) -m ruff check
	$(PY) -m ruff format --check
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
