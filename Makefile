# make train   set up and train a detector on the bundled data, minutes on two CPU cores
# make test    set up and run the tests; make test-slow runs the long ones too
# make which FILE=toolkit/data/table.py   the tests about a module;  make mutants   changes lines, and sees tests fail
# make lint    ruff;  make bench   ratios against plain programs, measured in one run
# make gpu     the five scripts on a GPU, seven minutes at most; writes runs/gpu/, to send in
# make docs    the site, into site/
# make notebooks   opens them in JupyterLab;  make notebook-outputs   runs them and stores what they show

PYTHON ?= python3
BIN := .venv/$(if $(filter Windows_NT,$(OS)),Scripts,bin)
ARGS ?=

.PHONY: train test test-slow which mutants lint bench gpu docs notebooks notebook-outputs clean
.DELETE_ON_ERROR:

.venv/installed: requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.12 train")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	touch $@

# One process, so without `accelerate launch`, which adds a warning before the first line and a traceback after an error.
train: .venv/installed
	$(BIN)/python scripts/train_faster_rcnn.py $(ARGS)

# One thread a process: two test processes share two cores without getting in each other's way. Files in their order,
# not those with the fewest tests last: these are long, and one process would wait for the other. Bytecode is written,
# whatever the shell says: the processes that tests start would compile the toolkit each.
TESTING = OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=

test: .venv/installed
	$(TESTING) $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

test-slow: .venv/installed
	$(TESTING) $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m 'slow or not slow' $(ARGS)

which:
	@$(PYTHON) tests/which.py $(FILE)

mutants: .venv/installed
	$(BIN)/python tests/mutate.py $(ARGS)

lint: .venv/installed
	$(BIN)/ruff check .

bench: .venv/installed
	$(BIN)/python scripts/benchmark.py $(ARGS)

gpu: .venv/installed
	$(BIN)/python scripts/benchmark.py --only gpu --out runs/gpu $(ARGS)

docs: .venv/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict $(ARGS)

notebooks: .venv/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[notebooks]"
	$(BIN)/jupyter lab notebooks $(ARGS)

# One after another, minutes each; ARGS=05_your_detector runs that one.
notebook-outputs: .venv/installed
	$(BIN)/python tests/support/store_notebooks.py $(ARGS)

clean:
	rm -rf .venv build site *.egg-info .pytest_cache .ruff_cache
