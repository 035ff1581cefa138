# Every target sets up what it needs: a venv in .venv, the compiled core, a plain copy of the source beside it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PLAIN := build/plain
SOURCES := $(shell find src -name '*.py' -o -name '*.pyx' -o -name '*.pxd' -o -name '*.lua' -o -name '*.yml' -o -name '*.json' -o -path '*/dashboard/*')
PYTEST := $(BIN)/python -m pytest -q -o cache_dir=build/tests
STARTED := $(shell date +%s)
SECONDS_SO_FAR = $$(($$(date +%s) - $(STARTED)))
COVERAGE := 93
# One more than the usual two cores: many tests wait for a server or a process.
JOBS := 3
# Tests of pages, examples and conventions: the coverage of the package does not depend on them.
IGNORED := $(addprefix --ignore=tests/,circuit_breaker conventions database demo docs first_programs shop)
PIP := $(BIN)/python -m pip install -q --disable-pip-version-check
# Python keeps what it compiles, also where the environment forbids it: every test process would compile all tests again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: setup help test test-all lint format bench demo docs serve shop soak faults clean

# One stamp for each step, so that an edit repeats only what it must: .made (environment), .linked (the package), .ready (compiled),
# .tools (dependencies of tests, linters and examples, which `make serve` does not need).
setup: $(VENV)/.tools $(VENV)/.ready

# The first clause of each row of the table in CONTRIBUTING.md.
help:
	@sed -n 's/^| `\(make [a-z-]*\)` | \([^;:]*[^;: |]\).*/\1\t\2/p' CONTRIBUTING.md | expand -t 16

$(VENV)/.made:
	@echo "setup: environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@touch $@

# The package is linked, not built: compiling is a step of its own, because pip hides its progress.
$(VENV)/.linked: $(VENV)/.made pyproject.toml
	@echo "setup: what building needs"
	@$(BIN)/python .ci/install_extras.py
	@LIMITKEEPER_DISABLE_COMPILED=1 $(PIP) --no-build-isolation --no-deps -e .
	@touch $@

$(VENV)/.tools: $(VENV)/.linked
	@echo "setup: dependencies of tests, linters and examples"
	@$(BIN)/python .ci/install_extras.py test lint example
	@touch $@

$(VENV)/.ready: $(VENV)/.linked setup.py $(SOURCES)
	@echo "setup: compiling what has changed"
	@$(BIN)/python setup.py -q build_ext --inplace
	@$(BIN)/python -c "import limitkeeper; print('setup: limitkeeper', limitkeeper.__version__, 'compiled' if limitkeeper.compiled else 'as plain Python (not compiled)', 'in $(SECONDS_SO_FAR) s')"
	@touch $@

# What `make serve`, `make docs` and `make bench` need besides: extras of pyproject.toml, joined by "+".
$(VENV)/.extra-%: $(VENV)/.linked
	@echo "setup: dependencies of '$*'"
	@$(BIN)/python .ci/install_extras.py $(subst +, ,$*)
	@touch $@

# The same source without the compiled core, for the tests of the plain build.
$(PLAIN)/.ready: $(SOURCES)
	rm -rf $(PLAIN) && mkdir -p $(PLAIN)
	cd src && find limitkeeper -name '*.py' -o -name '*.lua' -o -name '*.yml' -o -name '*.json' -o -name '*.html' -o -name '*.css' -o -name '*.js' -o -name py.typed | tar cf - -T - | tar xf - -C ../$(PLAIN)
	touch $@

# LIMITKEEPER_EXPECT: "compiled" fails when the compiled core was expected and is missing; "any" where there is no compiler; "plain"
# runs the tests whose subject is compiled on the plain source (tests/conftest.py, ON_BOTH_BUILDS).
COMPILED = LIMITKEEPER_EXPECT=$$(command -v cc >/dev/null 2>&1 && echo compiled || echo any) LIMITKEEPER_PLAIN_PATH=$(PLAIN)
UNCOMPILED = PYTHONPATH=$(PLAIN)
# Runs tests, with an environment and options. Those that fail run once more, one at a time: real servers and processes may need a
# quieter machine; a defect fails again.
define run_tests
@rm -rf build/tests
$(1) $(PYTEST) -n $(JOBS) --durations=25 --durations-min=2 $(2) tests || { test $$? = 1 && echo "tests: those that failed, once more" && \
  $(1) $(PYTEST) --last-failed --last-failed-no-failures none $(2) tests; }
endef

# Everything that guards behaviour, in less than 5 minutes on 2 cores.
test: setup $(PLAIN)/.ready
	$(call run_tests,LIMITKEEPER_EFFORT=0.05 $(COMPILED),-m "not slow")
	$(call run_tests,LIMITKEEPER_EFFORT=0.05 LIMITKEEPER_EXPECT=plain $(UNCOMPILED),-m "not slow")

# The same with all matrices, fault runs and installations, on the compiled build; then a sample on the plain build, for coverage.
test-all: setup $(PLAIN)/.ready
	@rm -f build/.coverage*
	$(call run_tests,LIMITKEEPER_EFFORT=0.3 $(COMPILED),-m "not soak")
	$(call run_tests,LIMITKEEPER_EFFORT=0.05 LIMITKEEPER_SAMPLE=3 LIMITKEEPER_EXPECT=any $(UNCOMPILED),-m "not slow and not untraced" $(IGNORED) --cov --cov-append --cov-report=)
	$(BIN)/coverage report --skip-covered --fail-under=$(COVERAGE)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup $(VENV)/.extra-bench
	$(BIN)/python benchmarks/run.py

# The algorithms, then the live flash sale: about two minutes. ARGS=--no-live leaves it out.
demo: setup
	@$(BIN)/python examples/demo.py $(ARGS)

docs: setup $(VENV)/.extra-docs docs/pictures/dashboard.png
	$(BIN)/python benchmarks/quoted_figures.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "docs: open site/index.html"

# A screenshot, taken again when the page has changed; where Chromium is missing, the old one stays.
docs/pictures/dashboard.png: $(wildcard src/limitkeeper/service/dashboard/*) | setup
	$(BIN)/python docs/pictures/dashboard.py
	@touch $@

# The decision service with an example policy: HTTP on 127.0.0.1:7070, the Redis protocol on 7071, the dashboard on 7073. ARGS="--workers 2" adds options.
serve: $(VENV)/.extra-service+dashboard+redis $(VENV)/.ready
	@exec $(BIN)/python -m limitkeeper serve examples/service/limitkeeper.yaml $(ARGS)

# The example shop on 127.0.0.1:8000, or the next free port; examples/shop/serve.py describes PORT= and SHOP_SECONDS=.
shop: setup
	@cd examples && exec ../$(BIN)/python -m shop.serve

soak: setup
	LIMITKEEPER_SOAK=1 $(PYTEST) -n 2 tests/laws tests/stores/test_conservation.py
	LIMITKEEPER_SOAK=1 $(PYTEST) -n 2 -m "hypothesis and not soak" tests
	$(PYTEST) -n 2 -m soak tests
	LIMITKEEPER_SOAK=1 $(PYTEST) -n 2 tests/service -k "random_bytes or general_path or idle_connections"
	$(BIN)/python tests/soak.py
	$(BIN)/python -m limitkeeper.simulate.faults --count 10000

# Fault schedules of the stores in virtual time (docs/fault-schedules.md): ARGS="--mode leased --seed 7" runs one.
faults: setup
	@$(BIN)/python -m limitkeeper.simulate.faults $(ARGS)

clean:
	rm -rf build site out .venv src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src -name '*.so' -delete
