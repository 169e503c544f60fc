# make run VERSION=02 runs a rung, make test the tests, make quick the quick ones, make test-long those that take minutes,
# make test-public those of kernels of others, whose sources it fetches (or FLASHLADDER_PUBLIC=DIR names a folder of
# clones); they first make .venv when it is missing or out of date. ARGS goes to the tool: make run VERSION=02 ARGS="--seqlen 1024
# --causal", make test ARGS="-m gpu", make test-long ARGS="-m gpu".
VERSION ?= 02
PYTHON ?= python3
PY := .venv/bin/python
QUICK := $(addprefix tests/,test_house.py catalog/test_catalog.py problem tools/test_commands.py tools/test_run_version.py) \
	$(addprefix tests/emulator/test_,memory.py parse.py races.py)

LONG := tests/emulator/test_mutations.py tests/catalog/test_own_ladders.py tests/studies/test_ladder.py \
	tests/compiler/test_sass_rungs.py \
	$(addprefix tests/predict/test_,ampere_model.py explain.py hopper_model.py operand_cache.py) \
	$(addprefix tests/workshop/test_,exercises.py new_version.py watch.py) \
	$(addprefix tests/rungs/test_,anchors.py configurations.py steps.py trusting.py) \
	$(addprefix tests/api/test_,adopt.py diffusers.py ring_processes.py transformers.py) \
	$(addprefix tests/tuner/test_,forecast.py tuner_kill.py tuner_storage.py) tests/tools/test_wheel.py

PUBLIC := tests/public

.PHONY: run test test-long test-public quick lint doctor venv dev clean

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
