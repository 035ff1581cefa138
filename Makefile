# Every target sets up what it needs: a venv in .venv, the compiled core, a plain copy of the source beside it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PLAIN := build/plain
SOURCES := $(shell find src -name '*.py' -o -name '*.pyx' -o -name '*.pxd' -o -name '*.lua' -o -name '*.yml' -o -name '*.json')
PYTEST := $(BIN)/python -m pytest -q -p no:cacheprovider
PIP := $(BIN)/python -m pip install -q --disable-pip-version-check

.PHONY: setup test test-compiled test-plain lint format bench demo docs serve soak clean

setup: $(VENV)/.ready

$(VENV)/.made:
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/.ready: $(VENV)/.made pyproject.toml setup.py $(SOURCES)
	@echo "setup: installing limitkeeper and its tools into $(VENV) (compiling the core where a C compiler is there)"
	$(PIP) -e '.[test,lint,example]'
	@$(BIN)/python -c "import limitkeeper; print('setup: limitkeeper', limitkeeper.__version__, 'compiled' if limitkeeper.compiled else 'plain (no C compiler)')"
	touch $@

# The same source without the compiled core, for the tests of the plain build.
$(PLAIN)/.ready: $(SOURCES)
	rm -rf $(PLAIN) && mkdir -p $(PLAIN)
	cd src && find limitkeeper -name '*.py' -o -name '*.lua' -o -name '*.yml' -o -name '*.json' -o -name py.typed | tar cf - -T - | tar xf - -C ../$(PLAIN)
	touch $@

test: test-compiled test-plain

# LIMITKEEPER_EXPECT: "compiled" fails when the compiled core was expected and is missing; "any" where there is no compiler.
test-compiled: setup $(PLAIN)/.ready
	LIMITKEEPER_EXPECT=$$(command -v cc >/dev/null 2>&1 && echo compiled || echo any) LIMITKEEPER_PLAIN_PATH=$(PLAIN) $(PYTEST) -n 2 tests

test-plain: setup $(PLAIN)/.ready
	LIMITKEEPER_EXPECT=plain PYTHONPATH=$(PLAIN) $(PYTEST) -n 2 tests

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup
	$(PIP) -e '.[bench]'
	$(BIN)/python benchmarks/run.py

demo: setup
	$(BIN)/python examples/demo.py

docs: setup
	$(PIP) -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "docs: open site/index.html"

# The example shop on 127.0.0.1:8000, or the next free port; PORT= and SHOP_SECONDS= are told in examples/shop/serve.py.
serve: setup
	@cd examples && exec ../$(BIN)/python -m shop.serve

soak: setup
	LIMITKEEPER_SOAK=1 $(PYTEST) -n 2 tests/laws
	$(BIN)/python tests/soak.py

clean:
	rm -rf build site out .venv src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src -name '*.so' -delete
