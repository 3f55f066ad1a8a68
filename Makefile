PYTHON ?= python3
# Each other Python has an environment of its own: make test PYTHON=python3.13, or a path such as /opt/bin/python.
version := import sys; print("%d.%d" % sys.version_info[:2])
VENV   := .venv$(if $(filter-out python3,$(PYTHON)),-python$(shell $(PYTHON) -c '$(version)'))
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install -q --disable-pip-version-check
ORACLES := .oracles/0.21.1/ready .oracles/0.24.2/ready .oracles/grain/ready \
	.oracles/kappadata-0.0.8/ready .oracles/kappadata-1.4.15/ready .oracles/megatron-core-0.16.1/ready

RIVALS := aiohttp obstore s3fs gcsfs tensorstore grain webdataset streaming litdata granular kappadata spdl datago \
	energon lance lhotse s3torchconnector
# A build for the CPU: the plain name brings gigabytes of CUDA.
TORCH  ?= torch==2.13.0

.PHONY: demo test test-slow slow-list test-full test-drivers lint docs docs-links release-check bench bench-quick faults soak redis chromium azurite servers screenshots clean

demo: $(VENV)/demo
	$(BIN)/granular demo

# Three processes for two cores, as some tests wait: for timeouts, and for servers to start. The plugins of hypothesis
# are those of other packages: each process would import trio for one.
test: export HYPOTHESIS_NO_PLUGINS = 1
test: $(VENV)/test $(ORACLES) redis chromium azurite
	$(BIN)/python -m pytest -n 3 --dist worksteal -m 'not slow' $(ARGS)

# What takes long and rarely breaks: tests/slow.txt. slow-list writes that anew, from a run of all tests.
test-slow: export HYPOTHESIS_NO_PLUGINS = 1
test-slow: $(VENV)/test $(ORACLES) redis chromium azurite
	$(BIN)/python -m pytest -n 3 --dist worksteal -m slow $(ARGS)

slow-list: override ARGS += -m '' --write-slow
slow-list: test

# The large tables of cases in full: otherwise tests run a cover of their pairs (tests/support/tables.py).
test-full: export GRANULAR_FULL_TABLES = 1
test-full: override ARGS += -m '' --timeout=3600 -o faulthandler_timeout=4000
test-full: test

# Trainings that Lightning, Accelerate, the HF Trainer, torchdata, Ray Train and Orbax drive. Tests of one program share it.
test-drivers: $(VENV)/drivers
	$(BIN)/python -m pytest -n 2 --dist loadgroup tests/drivers $(ARGS)

# What mypy sees depends on what is installed, so it is given all of it.
lint: $(VENV)/test $(VENV)/lint
	$(BIN)/ruff check granular tests benchmarks examples docs/conf.py docs/_site .ci
	$(BIN)/ruff format --check granular tests benchmarks examples docs/conf.py docs/_site .ci
	$(BIN)/mypy

# The documentation site, in build/docs. Warnings are errors, and links within the site must lead somewhere; docs-links
# checks those to other sites, which takes a network.
docs: $(VENV)/docs chromium
	$(BIN)/python -m sphinx -q -j auto -W --keep-going -d build/docs-cache docs build/docs
	$(BIN)/python docs/_site/check.py build/docs

docs-links: $(VENV)/docs
	$(BIN)/python -m sphinx -q -W --keep-going -d build/docs-cache -b linkcheck docs build/docs-links

# Builds sdist and wheel, checks them, and installs the wheel with no extra and with each alone, on each Python that is found.
release-check:
	$(PYTHON) .ci/release_check.py $(ARGS)

bench: $(VENV)/bench $(RIVALS:%=.rivals/%/ready) servers
	$(BIN)/python -m benchmarks $(ARGS)

bench-quick: $(VENV)/bench $(RIVALS:%=.rivals/%/ready) servers
	$(BIN)/python -m benchmarks --quick $(ARGS)

# What becomes of reads at every fault, beside others; and an hour of reads at 1 % faults.
faults: $(VENV)/bench .rivals/s3fs/ready .rivals/gcsfs/ready .rivals/obstore/ready
	$(BIN)/python -m benchmarks.faults $(ARGS)

soak: $(VENV)/bench
	$(BIN)/python -m benchmarks.soak $(ARGS)

# What the tests need and PyPI does not have: a server, and a browser for the page of `granular view`.
redis:
	@command -v redis-server > /dev/null || (apt-get update -q && apt-get install -qy --no-install-recommends redis-server)

chromium:
	@command -v chromedriver > /dev/null || \
		(apt-get update -q && apt-get install -qy --no-install-recommends chromium chromium-driver)

# Azure Blob Storage, from npm.
azurite: .azurite/ready

.azurite/ready: Makefile
	@command -v npm > /dev/null || (apt-get update -q && apt-get install -qy --no-install-recommends nodejs npm)
	npm install --prefix .azurite --silent --ignore-scripts --no-audit --no-fund --no-save azurite@3.37.0
	touch $@

# The pictures of the page of `granular view` in docs/screenshots.
screenshots: $(VENV)/test chromium
	$(BIN)/python -m tests.view.screenshots

# What the benchmarks measure against comes from Debian; SPDL takes the libraries of FFmpeg from there.
servers:
	@command -v wrk > /dev/null && command -v ffmpeg > /dev/null && test -e /usr/lib/nginx/modules/ngx_http_lua_module.so || \
		(apt-get update -q && apt-get install -qy --no-install-recommends nginx-light libnginx-mod-http-lua wrk ffmpeg)

clean:
	rm -rf .venv .venv-* .oracles .rivals .azurite .mypy_cache .pytest_cache .ruff_cache build dist

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/demo: pyproject.toml | $(BIN)/python
	$(PIP) -e '.[all]'
	touch $@

$(VENV)/test: pyproject.toml | $(BIN)/python
	$(BIN)/python -c 'import torch' 2> /dev/null || $(PIP) '$(TORCH)'
	$(PIP) -e '.[all,test]'
	touch $@

# Behind the test environment, whose torch is a build for the CPU that satisfies all of them.
$(VENV)/drivers: pyproject.toml $(VENV)/test
	$(PIP) -e '.[drivers]'
	touch $@

$(VENV)/bench: pyproject.toml | $(BIN)/python
	$(BIN)/python -c 'import torch' 2> /dev/null || $(PIP) '$(TORCH)'
	$(PIP) -e '.[bench]'
	touch $@

$(VENV)/docs: pyproject.toml | $(BIN)/python
	$(PIP) -e '.[docs]'
	touch $@

$(VENV)/lint: pyproject.toml | $(BIN)/python
	$(PIP) -e '.[lint]'
	touch $@

# The published releases, each in an environment of its own: what they write, we read, and the other way round; and
# Grain, whose orders ours are.
.oracles/%/ready: Makefile
	$(PYTHON) -m venv .oracles/$*
	.oracles/$*/bin/python -m pip install -q --disable-pip-version-check $(or $(oracle_$*),granular==$* pillow av)
	touch $@

oracle_grain := grain==0.2.18

# Pure Python over the torch of the tests.
.oracles/kappadata-%/ready: Makefile | $(BIN)/python
	$(PIP) --no-deps --target .oracles/kappadata-$* kappadata==$*
	touch $@

# One build for every Python: what is compiled in it is not imported.
.oracles/megatron-core-%/ready: Makefile | $(BIN)/python
	$(PIP) --no-deps --python-version 3.11 --platform manylinux_2_28_x86_64 --only-binary=:all: \
		--target .oracles/megatron-core-$* megatron-core==$*
	touch $@

# Who is measured beside us, each in an environment of its own.
aiohttp     := aiohttp uvloop
obstore     := obstore uvloop
s3fs        := s3fs
gcsfs       := gcsfs
tensorstore := tensorstore
grain       := grain array_record pyarrow pillow
webdataset  := $(TORCH) webdataset numpy
streaming   := $(TORCH) mosaicml-streaming
litdata     := $(TORCH) litdata boto3
granular    := granular==0.24.2 elements pillow av
kappadata   := $(TORCH) numpy
spdl        := spdl spdl-io numpy
datago      := datago numpy
energon     := $(TORCH) megatron-energon webdataset numpy
lance       := pylance numpy
lhotse      := $(TORCH) lhotse urllib3
s3torchconnector := $(TORCH) s3torchconnector
# What it requires has no build for the CPU, and its caches do not need it.
bare_kappadata := kappadata

.rivals/%/ready: Makefile
	$(PYTHON) -m venv .rivals/$*
	@# One after the other, so that a torch that is there is not replaced.
	for package in $($*); do .rivals/$*/bin/python -m pip install -q --disable-pip-version-check $$package || exit 1; done
	@$(if $(bare_$*),.rivals/$*/bin/python -m pip install -q --disable-pip-version-check --no-deps $(bare_$*))
	touch $@
