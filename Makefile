# `make demo` and `make test` do all the set-up by themselves, in .venv.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/installed

.PHONY: install demo browser test test-slow check bench docs tables clean

install: $(STAMP)

# torch first: its CPU build satisfies what follows. torchvision without its dependencies: see patchloom.compat.
KERNELS := $(wildcard src/patchloom/kernels/*.cpp src/patchloom/kernels/*.h) src/patchloom/kernels/build.py
$(STAMP): pyproject.toml constraints.txt hatch_build.py $(KERNELS)
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps torchvision
	$(BIN)/python -m pip install --quiet --constraint constraints.txt hatchling editables
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable '.[dev]'
	touch $@

# a fresh folder each time, so that the demo can be run again; a network this small is faster on one thread than on two
# that wait for each other, and learns in fewer epochs at twice the rate
DEMO := .cache/demo/$(shell date +%Y%m%d-%H%M%S)
demo: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/patchloom train digits --model cait_nano --recipe cait@small img_size=16 epochs=34 lr=2e-3 --out $(DEMO)
	$(BIN)/python examples/classify_digit.py $(DEMO)

# the tests of the web page need a browser; where it can neither be found nor installed they are left out, and say so
browser:
	@command -v chromium >/dev/null || test "$$(id -u)" != 0 || ! command -v apt-get >/dev/null || \
	(apt-get update -qq && apt-get install -qq -y --no-install-recommends chromium) >/dev/null 2>&1 || true

# two processes of one thread each: on two cores nearly twice as fast as one after the other
test: $(STAMP) browser
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

test-slow: $(STAMP) browser
	$(BIN)/python -m pytest -m slow

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(STAMP)
	$(BIN)/python benchmarks/inference.py

docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "The site is in site/index.html"

# what the pages take from the registry: tables and diagrams
tables: $(STAMP)
	$(BIN)/python docs/tables.py
	$(BIN)/python docs/diagrams.py

clean:
	rm -rf .venv site build dist
