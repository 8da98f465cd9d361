# Everything a contributor or a build machine runs. `make help` lists it.
#
# The targets make .venv themselves. PYTHON=… names the interpreter it stands on (3.11 or newer, python3 if not said).

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules --no-print-directory
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
ready := $(VENV)/.ready
definitions := deploy/operator/crd/bases

# pyright and the Node.js it runs on come as wheels; without these it looks for newer ones, and for another Node.js.
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1
export PYRIGHT_PYTHON_GLOBAL_NODE := 0

## demo: a simulated node, the real agent and an embedded kubelet, live (as plain text without a terminal)
demo: $(ready)
	$(VENV)/bin/accelplane demo

## test: every test but the cluster's, in parallel, two for each core; fails below 90 % coverage. ARGS=… run a part, without coverage
test: export PYTHONDONTWRITEBYTECODE :=  # without compiled modules every process compiles them anew
test: $(ready)
	rm -f .coverage .coverage.*
	$(PY) -m pytest --numprocesses "$$((2 * $$(nproc)))" --maxprocesses 8 --dist worksteal --timeout 180 -m "not cluster" \
		$(or $(ARGS),--cov --cov-report term-missing:skip-covered --cov-fail-under 90)

# What a stranger may bring to a node with FPGAs gets the most.
fpga_tests := tests/unit/test_admission_fpga.py $(wildcard tests/unit/test_fpga_*.py)
fuzzing = ACCELPLANE_FUZZ=$(1) $(PY) -m pytest --numprocesses auto --maxprocesses 8 --timeout 7200 -m "fuzz and not cluster"

## fuzz: more than a million inputs for all that reads what strangers write; takes some 40 minutes. INPUTS=… for each of FPGAs
fuzz: $(ready)
	$(call fuzzing,$(or $(INPUTS),45000)) $(fpga_tests)
	$(call fuzzing,3000) tests/unit tests/contract $(addprefix --ignore ,$(fpga_tests))

## check: lint, format, types, the floors of the house, generated code; -k goes on after a fault
check: lint types floors generated

lint: $(ready)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

types: $(ready)
	$(PY) -m pyright --pythonpath $(PY)

floors: $(ready)
	$(VENV)/bin/lint-imports

generated: $(ready)
	$(PY) proto/generate.py --check
	made=$$(mktemp -d)
	trap 'rm -rf "$$made"' EXIT
	$(PY) -m accelplane.operator.crds "$$made"
	diff -ru $(definitions) "$$made" >&2 || { echo "$(definitions) is not what the types say: make crds" >&2; exit 1; }

## format: lets ruff put things right
format: $(ready)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

## proto: generates the message classes from proto/
proto: $(ready)
	$(PY) proto/generate.py

## crds: generates the operator's definitions from its types
crds: $(ready)
	$(PY) -m accelplane.operator.crds $(definitions)

## bench: measures agent, webhook and operator; a table, and JSON beside it. ARGS=… are the benchmarks' own
bench: $(ready)
	$(PY) -m benchmarks $(ARGS)

## wheel: builds dist/accelplane-….whl, the same bytes for the same commit
wheel: $(ready)
	rm -rf build dist
	export SOURCE_DATE_EPOCH=$${SOURCE_DATE_EPOCH:-$$(git log -1 --format=%ct 2>/dev/null || date +%s)}
	$(PY) -m build --quiet --wheel --no-isolation --outdir dist .
	rm -rf build

## fpga-host: builds what runs on hosts without Python, the FPGA hook and tool, into dist/fpga-sw
fpga-host: $(ready)
	$(PY) deploy/images/fpga_host.py dist/fpga-sw
	ls -l dist/fpga-sw

## kube: builds the Kubernetes programs that the cluster tests run
kube: $(ready)
	$(PY) -m tests.cluster.build

## test-cluster: the tests on real clusters, two at once, for they mostly wait; as root. ARGS=… are pytest's own
test-cluster: kube
	$(PY) -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder -m cluster $(ARGS)

## cluster: starts a real cluster with simulated GPUs and our images in it, to try things in; as root
cluster: kube
	$(PY) -m tests.cluster up --image "$$($(PY) -m tests.cluster.product_image)" $(ARGS)

## cluster-down: ends it
cluster-down: $(ready)
	$(PY) -m tests.cluster down

## lock: writes constraints.txt anew from pyproject.toml, keeping the pins that still fit. UPGRADE=1 renews them all
lock: $(VENV)/.pinned
	# the oldest Python that we support needs the most
	$(PY) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || { echo "make lock PYTHON=python3.11" >&2; exit 1; }
	$(PY) -m piptools compile --quiet --extra dev --extra operator --extra simulate --output-file constraints.txt $(if $(UPGRADE),--upgrade) \
		--generate-hashes --allow-unsafe --strip-extras --no-header \
		--no-emit-index-url --no-emit-trusted-host --no-emit-find-links pyproject.toml

## clean: removes what was built, .venv too
clean:
	rm -rf $(VENV) build dist .coverage .coverage.* .hypothesis .ruff_cache .import_linter_cache src/*.egg-info
	find src tests benchmarks examples proto -name __pycache__ -prune -exec rm -rf {} +

help:
	@sed -n 's/^## \([a-z-]*\): /\1|/p' Makefile | while IFS='|' read -r target text; do
		printf 'make %-12s %s\n' "$$target" "$$text"
	done

# The virtual environment. It is made anew when the pins change, when its Python no longer works (the system's was
# upgraded) or is another than the PYTHON asked for; our package is put in again when its metadata changes. Everything
# installed is a wheel whose hash stands in constraints.txt, setuptools, which builds our own package, among them.

runs := $(shell [ ! -e $(PY) ] || $(PY) -Ic 'import pip, sys; print(sys.version)' 2>/dev/null)
asked := $(if $(filter file,$(origin PYTHON)),$(runs),$(shell $(PYTHON) -Ic 'import sys; print(sys.version)' 2>/dev/null))
stale := $(if $(runs),$(if $(filter-out $(runs),$(asked)),stale),stale)

pip_options := --quiet --disable-pip-version-check --no-input
locked := --require-hashes --only-binary :all: --requirement constraints.txt

$(VENV)/.pinned: constraints.txt $(if $(stale),FORCE)
	@version=$$($(PYTHON) 2>/dev/null -Ic \
		'import sys; print("%d.%d" % sys.version_info[:2]); sys.exit(sys.version_info < (3, 11))') || {
		echo "Accelplane needs Python 3.11 or newer, $(PYTHON) is $${version:-not there}: make PYTHON=/path/to/python3" >&2
		exit 1
	}
	echo "Making $(VENV) with Python $$version, once: this takes half a minute." >&2
	rm -rf $(VENV)
	# Debian keeps ensurepip, without which venv makes nothing, in a package of its own.
	ensurepip() { $(PYTHON) -Ic 'import ensurepip' 2>/dev/null; }
	if ! ensurepip && $(PYTHON) -m pip --version >/dev/null 2>&1; then
		$(PYTHON) -m venv --without-pip $(VENV)
		$(PYTHON) -m pip --python $(PY) install $(pip_options) $(locked)
	else
		if ! ensurepip && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
			export DEBIAN_FRONTEND=noninteractive
			apt-get -qq update && apt-get -qq install --no-install-recommends "python$$version-venv" >/dev/null || true
		fi
		ensurepip || {
			echo "$(PYTHON) cannot make virtual environments. On Debian: apt-get install python$$version-venv" >&2
			exit 1
		}
		$(PYTHON) -m venv $(VENV)
		$(PY) -m pip install $(pip_options) $(locked)
	fi
	touch $@

$(ready): $(VENV)/.pinned pyproject.toml
	@$(PY) -m pip install $(pip_options) --no-deps --no-build-isolation --editable .
	faults=$$($(PY) -m pip --disable-pip-version-check check) || {
		echo "$$faults" >&2
		echo "pyproject.toml asks for what constraints.txt does not hold: make lock" >&2
		exit 1
	}
	touch $@

FORCE:

.PHONY: FORCE help demo test fuzz check lint types floors generated format proto crds bench wheel fpga-host kube test-cluster cluster \
	cluster-down lock clean
