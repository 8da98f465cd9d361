# Commands for contributors and for continuous integration. `make help` lists them.
#
# The targets create .venv themselves. PYTHON=… selects the interpreter (3.11 or newer; default: python3).

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
# The packages of browser tests and of the documentation site are installed when a target needs them.
extra := $(VENV)/.extra
# Module that makes CustomResourceDefinitions, and their directory.
definitions := accelplane.operator.crds:deploy/operator/crd/bases accelplane.onload.crds:deploy/onload/config/crd/bases

# pyright and its Node.js are pinned wheels. These variables disable the search for newer versions and for another Node.js.
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1
export PYRIGHT_PYTHON_GLOBAL_NODE := 0

## demo: run the real agent on a simulated node with an embedded kubelet (plain text without a terminal)
demo: $(ready)
	$(VENV)/bin/accelplane demo

## demo-fleet: serve the fleet page with a simulated cluster of 200 nodes; prints the address. ARGS=… are passed on
demo-fleet: $(ready)
	@exec $(VENV)/bin/accelplane fleet demo $(ARGS)

## test: run all tests except cluster and browser tests, two per core. ARGS=… are passed to pytest
test: export PYTHONDONTWRITEBYTECODE :=  # without compiled modules every process compiles them anew
test: $(ready)
	rm -f .coverage .coverage.*
	$(PY) -m pytest --numprocesses "$$((2 * $$(nproc)))" --maxprocesses 8 --dist worksteal --timeout 180 \
		--ignore tests/cluster --ignore tests/browser -m "not cluster and not browser" $(ARGS)

## coverage: run the same tests and fail below 90 % coverage. Tracing nearly doubles the processor time
coverage:
	$(MAKE) test ARGS="--cov --cov-report term-missing:skip-covered --cov-fail-under 90 $(ARGS)"

## test-browser: test the fleet page and the documentation site in Chromium (Debian's package chromium). ARGS=… are passed to pytest
test-browser: $(extra)
	$(PY) -m pytest --tb native -m browser $(or $(ARGS),tests/browser)

# Untrusted FPGA input gets the largest number of examples.
fpga_tests := tests/unit/test_admission_fpga.py $(wildcard tests/unit/test_fpga_*.py)
fuzzing = ACCELPLANE_FUZZ=$(1) $(PY) -m pytest --numprocesses auto --maxprocesses 8 --timeout 7200 -m "fuzz and not cluster and not browser"

## fuzz: run the property tests of parsers with over a million inputs, about 40 minutes. INPUTS=… per FPGA test
fuzz: $(ready)
	$(call fuzzing,$(or $(INPUTS),45000)) $(fpga_tests)
	$(call fuzzing,3000) tests/unit tests/contract $(addprefix --ignore ,$(fpga_tests))

## churn: 20,000 random operations on an agent in virtual time, about a minute. ARGS="--seed 1 --operations 1000"
churn: $(ready)
	$(PY) tests/contract/churn.py $(ARGS)

## check: lint, format, types, import layers, generated code; -k continues after a failure
check: lint types layers generated

lint: $(ready)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

types: $(ready)
	$(PY) -m pyright --pythonpath $(PY)

layers: $(ready)
	$(VENV)/bin/lint-imports

generated: $(ready)
	$(PY) proto/generate.py --check
	made=$$(mktemp -d)
	trap 'rm -rf "$$made"' EXIT
	for each in $(definitions); do
		$(PY) -m "$${each%:*}" "$$made/$${each%:*}"
		diff -ru "$${each#*:}" "$$made/$${each%:*}" >&2 || { echo "$${each#*:}: differs from the types in models.py; run make crds" >&2; exit 1; }
	done
	$(PY) -B deploy/monitoring/source "$$made/deploy"
	(cd "$$made/deploy" && find . -type f) | while read -r file; do
		diff -u "deploy/$$file" "$$made/deploy/$$file" >&2 || { echo "deploy/$$file: differs from its source; run make monitoring" >&2; exit 1; }
	done

## version: change the version of the package, and of images and charts in manifests, demos and docs: make version TO=1.0.1
version: $(ready)
	$(PY) -m release.version $(TO)

# Without IMAGES the bundles have tags instead of digests.
images_of_bundles = $(if $(IMAGES),--images "$(IMAGES)")

## bundle: bundles for OLM of both operators, dist/bundles/PACKAGE. IMAGES=images.json REGISTRY=… CHANNELS=a,b DEFAULT_CHANNEL=a REPOSITORY=URL
bundle: $(ready)
	$(PY) -m release bundle --out "$(or $(OUT),dist/bundles)" $(images_of_bundles) $(if $(REGISTRY),--registry "$(REGISTRY)") \
		--channels "$(CHANNELS)" --default-channel "$(DEFAULT_CHANNEL)" --repository "$(REPOSITORY)"

## bundle-build: images of the bundles as OCI image layouts, dist/bundles/PACKAGE-bundle
bundle-build: $(ready)
	$(PY) -m release bundle-build --out "$(or $(OUT),dist/bundles)"

## catalog: file-based catalog of the bundles, dist/bundles/catalog; OLDER=DIR is the catalog to add to
catalog: $(ready)
	$(PY) -m release catalog --out "$(or $(OUT),dist/bundles)" $(if $(REGISTRY),--registry "$(REGISTRY)") \
		$(if $(OLDER),--older "$(OLDER)")

## release-key: a key for signatures of releases, KEY and KEY.pub; RELEASE_KEY_PASSWORD encrypts it
release-key: $(ready)
	$(PY) -m release key "$(KEY)"

## release: a signed release in the new directory OUT: VERSION=… OUT=DIR KEY=FILE REGISTRY=… [PUSH=1] [IMAGES=DIR] [DRAFT=1]
release: $(ready)
	$(PY) -m release build --version "$(VERSION)" --out "$(OUT)" --key "$(KEY)" $(if $(REGISTRY),--registry "$(REGISTRY)") \
		$(if $(PUSH),--push) $(if $(IMAGES),--prebuilt "$(IMAGES)") $(if $(PLATFORMS),--platforms "$(PLATFORMS)") \
		$(if $(DRAFT),--draft) $(if $(CA_FILE),--ca-file "$(CA_FILE)")

## push-release: push a complete release to its registry, also to continue after an error: OUT=DIR
push-release: $(ready)
	$(PY) -m release push "$(OUT)" $(if $(CA_FILE),--ca-file "$(CA_FILE)")

## verify-release: check a release as its users would: OUT=DIR KEY=FILE.pub VERSION=… [REGISTRY=…] [DRAFT=1]
verify-release: $(ready)
	$(PY) -m release verify "$(OUT)" --key "$(KEY)" --version "$(VERSION)" $(if $(DRAFT),--draft) \
		$(if $(REGISTRY),--registry "$(REGISTRY)") $(if $(CA_FILE),--ca-file "$(CA_FILE)")

## sbom-tools: install the validators of bills of materials, which the tests use, into .venv/sbom
sbom-tools: $(ready)
	$(PY) -m venv --without-pip $(VENV)/sbom
	$(PY) -m pip --python $(VENV)/sbom/bin/python install $(pip_options) $(locked_options) --requirement constraints-sbom.txt

## format: apply ruff fixes and formatting
format: $(ready)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

## proto: generate the message classes from proto/
proto: $(ready)
	$(PY) proto/generate.py

## pci-names: generate the names of accelerators from the PCI ID database: make pci-names DATABASE=/usr/share/misc/pci.ids
pci-names: $(ready)
	$(PY) tools/pcinames.py $(DATABASE)

## crds: generate the CustomResourceDefinitions from operator/models.py and onload/models.py
crds: $(ready)
	for each in $(definitions); do $(PY) -m "$${each%:*}" "$${each#*:}"; done

## monitoring: generate the dashboards, the PrometheusRule and the copies in the chart
monitoring: $(ready)
	$(PY) -B deploy/monitoring/source deploy

## bench: measure agent, webhook and operator; prints a table and writes JSON. ARGS=… are passed to the benchmarks
bench: $(ready)
	$(PY) -m benchmarks $(ARGS)

## wheel: build dist/accelplane-….whl, reproducibly
wheel: $(ready)
	rm -rf build dist/accelplane-*.whl
	export SOURCE_DATE_EPOCH=$${SOURCE_DATE_EPOCH:-$$(git log -1 --format=%ct 2>/dev/null || date +%s)}
	$(PY) -m build --quiet --wheel --no-isolation --outdir dist .
	rm -rf build

## docs: build the documentation site of this version into dist/docs. OUT=DIR REPOSITORY=URL (for links to files)
docs: $(extra)
	NO_MKDOCS_2_WARNING=true $(PY) -m website "$(or $(OUT),dist/docs)" $(if $(REPOSITORY),--repository "$(REPOSITORY)")

## docs-check: build the documentation site into a temporary directory: broken links and missing pages are errors
docs-check: $(extra)
	made=$$(mktemp -d)
	trap 'rm -rf "$$made"' EXIT
	$(MAKE) docs OUT="$$made"

## images: build OCI image layouts for amd64 and arm64 into dist/images, without an engine. OUT=, PLATFORMS=, IMAGES= (names)
images: $(ready)
	$(PY) deploy/images/images.py $(or $(OUT),dist/images) $(if $(PLATFORMS),--platforms $(PLATFORMS)) $(if $(IMAGES),--images $(IMAGES))

## images-lock: update the pinned Debian packages of the images and of the demo images
images-lock: $(ready)
	$(PY) deploy/images/debian.py update
	$(PY) deploy/images/demo_images.py update

## demo-images: build images of demo workloads for amd64 into dist/demo-images. OUT=, IMAGES= (names), SOURCES= (files)
demo-images: $(ready)
	$(PY) deploy/images/demo_images.py build $(or $(OUT),dist/demo-images) $(if $(IMAGES),--images $(IMAGES)) \
		$(foreach source,$(SOURCES),--source $(source))

## fpga-host: build the FPGA hook and tool, which run on hosts without Python, into dist/fpga-sw
fpga-host: $(ready)
	$(PY) deploy/images/fpga_host.py dist/fpga-sw
	ls -l dist/fpga-sw

# The version of Kubernetes for kube, cluster and test-cluster: one of VERSIONS in tests/cluster/build.py.
kube test-cluster cluster: export ACCELPLANE_KUBERNETES := $(or $(VERSION),$(ACCELPLANE_KUBERNETES))

## kube: build the Kubernetes programs for the cluster tests. VERSION=1.34
kube: $(ready)
	$(PY) -m tests.cluster.build

## tools: build other programs of the tests, whose modules are in tests/cluster/tools: make tools TOOLS="helm"
tools: $(ready)
	$(PY) -m tests.cluster.build $(TOOLS)

## test-cluster: run the cluster tests, three files at a time on two cores; needs root. VERSION=1.34 ARGS=… (to pytest)
test-cluster: kube
	$(PY) -m pytest --numprocesses "$$((($$(nproc) * 3 + 1) / 2))" --maxprocesses 6 --dist loadfile \
		--no-loadscope-reorder -p tests.cluster.distribution -m cluster $(ARGS)

## test-versions: run scenarios on each version of Kubernetes and update docs/versions.md; VERSIONS="1.31 1.34" ARGS=…
test-versions: $(ready)
	$(PY) -m tests.cluster.versions $(VERSIONS) $(ARGS)

## cluster: start a real cluster with simulated GPUs and our images; needs root. VERSION=1.34
cluster: kube
	$(PY) -m tests.cluster up --image "$$($(PY) -m tests.cluster.product_image)" $(ARGS)

## cluster-down: stop that cluster
cluster-down: $(ready)
	$(PY) -m tests.cluster down

## lock: update constraints.txt from pyproject.toml, keeping valid pins. UPGRADE=1 updates all pins
lock: $(VENV)/.pinned
	# The oldest supported Python needs the most packages.
	$(PY) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || { echo "make lock PYTHON=python3.11" >&2; exit 1; }
	compile=($(PY) -m piptools compile --quiet $(if $(UPGRADE),--upgrade) --generate-hashes --allow-unsafe --strip-extras \
		--no-header --no-emit-index-url --no-emit-trusted-host --no-emit-find-links pyproject.toml)
	"$${compile[@]}" --extra dev --extra operator --extra simulate --output-file constraints.txt
	"$${compile[@]}" --extra browser --extra site --constraint constraints.txt --output-file constraints-extra.txt
	printf '%s\n' 'cyclonedx-python-lib[json-validation]' spdx-tools | \
		"$${compile[@]/pyproject.toml/-}" --output-file constraints-sbom.txt

## clean: remove all build results and .venv
clean:
	rm -rf $(VENV) build dist .coverage .coverage.* .hypothesis .ruff_cache .import_linter_cache src/*.egg-info
	find src tests benchmarks examples proto -name __pycache__ -prune -exec rm -rf {} +

help:
	@sed -n 's/^## \([a-z-]*\): /\1|/p' Makefile | while IFS='|' read -r target text; do
		printf 'make %-12s %s\n' "$$target" "$$text"
	done

# The virtual environment. It is recreated when the pins change, when its Python no longer runs (system upgrade), or when
# PYTHON names another interpreter. The package is reinstalled when its metadata changes. All distributions, setuptools
# included, are wheels whose hashes are in constraints.txt.

runs := $(shell [ ! -e $(PY) ] || $(PY) -Ic 'import pip, sys; print(sys.version)' 2>/dev/null)
asked := $(if $(filter file,$(origin PYTHON)),$(runs),$(shell $(PYTHON) -Ic 'import sys; print(sys.version)' 2>/dev/null))
stale := $(if $(and $(runs),$(asked)),$(if $(filter-out $(runs),$(asked)),stale),stale)

pip_options := --quiet --disable-pip-version-check --no-input
# constraints.txt is complete. Without --no-deps, old versions of pip reject a pinned distribution that another one requires
# with an extra (coverage[toml]) as soon as a newer version is published.
locked_options := --require-hashes --no-deps --only-binary :all:
locked := $(locked_options) --requirement constraints.txt

$(VENV)/.pinned: constraints.txt $(if $(stale),FORCE)
	@version=$$($(PYTHON) 2>/dev/null -Ic \
		'import sys; print("%d.%d" % sys.version_info[:2]); sys.exit(sys.version_info < (3, 11))') || {
		echo "$(PYTHON): found version $${version:-none}, expected 3.11 or newer; run make PYTHON=/path/to/python3" >&2
		exit 1
	}
	echo "Creating $(VENV) with Python $$version. This takes about 30 seconds." >&2
	rm -rf $(VENV)
	# Debian ships ensurepip, which venv needs, in a separate package.
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
			echo "$(PYTHON): module ensurepip is missing; on Debian run apt-get install python$$version-venv" >&2
			exit 1
		}
		$(PYTHON) -m venv $(VENV)
		$(PY) -m pip install $(pip_options) $(locked)
	fi
	touch $@

$(ready): $(VENV)/.pinned pyproject.toml
	@$(PY) -m pip install $(pip_options) --no-deps --no-build-isolation --editable .
	problems=$$($(PY) -m pip --disable-pip-version-check check) || {
		echo "$$problems" >&2
		echo "constraints.txt does not satisfy pyproject.toml; run make lock" >&2
		exit 1
	}
	touch $@

$(extra): constraints-extra.txt $(ready)
	@$(PY) -m pip install $(pip_options) $(locked_options) --requirement $<
	touch $@

FORCE:

.PHONY: FORCE help lint types layers generated $(shell sed -n 's/^## \([a-z-]*\): .*/\1/p' Makefile)
