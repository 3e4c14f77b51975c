# make run      set up, tokenize Python's standard library, pretrain on it, plot the loss and write code: minutes on two
#               CPU cores
# make test     set up and run the tests
# make lint     check the style
# make format   apply the style
# make docs     make a website of docs/ in build/docs; a broken link or a warning fails
# make clean    remove everything that these commands created
# For the pinned versions of constraints.txt add PIP='-c constraints.txt'.
# On a machine with GPUs add EXTRAS=test,cuda13 (or cuda12, rocm) to any command: it installs JAX with GPU support.

PYTHON ?= python3
VENV   ?= .venv
PY     := $(VENV)/bin/python
EXTRAS ?= test
PIP    ?=

DATA   ?= data/stdlib
RUN    ?= runs/stdlib
TRAIN  ?=
PROMPT ?= def read_lines(path, encoding="utf-8"):

# Python's standard library, without its tests, bundled tools and tables.
STDLIB  = $(shell $(PY) -c "import sysconfig; print(sysconfig.get_path('stdlib'))")
EXCLUDE = $(addprefix --exclude ,site-packages test tests idlelib lib2to3 turtledemo ensurepip encodings pydoc_data)

.PHONY: run test lint format docs setup clean

run: setup
	$(PY) -m scripts.tokenize --out $(DATA) $(STDLIB) --glob '*.py' $(EXCLUDE)
	$(PY) -m train stdlib --data.path $(DATA) --run $(RUN) --watch.samples-every 100 --watch.prompts '$(PROMPT)' $(TRAIN)
	$(PY) -m scripts.plot $(RUN)
	$(PY) -m infer generate --checkpoint $(RUN) --prompt '$(PROMPT)' --max-new-tokens 200 --temperature 0.6 --top-p 0.95

test: setup
	$(PY) -m pytest -n 4 --dist worksteal

lint: setup
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	git ls-files '*.cc' '*.h' '*.cu' | xargs $(VENV)/bin/clang-format --dry-run --Werror

format: setup
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .
	git ls-files '*.cc' '*.h' '*.cu' | xargs $(VENV)/bin/clang-format -i

docs:
	@$(MAKE) --no-print-directory setup EXTRAS=$(EXTRAS),docs
	$(PY) -m sphinx -q --fail-on-warning --keep-going docs build/docs
	@echo build/docs/index.html

setup: $(VENV)/.installed-$(EXTRAS)

$(VENV)/.installed-$(EXTRAS): pyproject.toml setup.py
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11))" || \
	  { echo "error: $(PYTHON) is older than 3.11; name a newer one: make PYTHON=python3.12 ..." >&2; exit 2; }
	@$(PYTHON) -c "import ensurepip" 2>/dev/null || \
	  { echo "error: $(PYTHON) has no venv module; on Debian: apt install python3-venv" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check -e '.[$(EXTRAS)]' $(PIP)
	@touch $@

clean:
	rm -rf $(VENV) $(DATA) $(RUN) *.egg-info build custom_calls/lib .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
	@rmdir $(dir $(DATA)) $(dir $(RUN)) 2>/dev/null || true  # fails if they contain something else
