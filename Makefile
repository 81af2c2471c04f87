# One command for each thing a person does here. `make help` lists them.
PYTHON ?= python3
VENV   ?= .venv
BIN     = $(CURDIR)/$(VENV)/bin
SITE    = $(CURDIR)/build/site
STAMP   = $(VENV)/.stamp
# The suite and the linters see the package as users get it: a wheel, unpacked outside the source tree.
# What pytest makes of the assertions is kept (it takes 8 s of each process), whatever the environment says.
RUN_INSTALLED = cd build && PYTHONPATH=$(SITE) PYTHONSAFEPATH=1 PYTHONDONTWRITEBYTECODE=
# One test process for each core; a file's tests stay in one process, since they share what they compiled.  Files of
# whole models come first: left to itself, xdist begins with the files that have the most tests, and the long ones with
# few tests then run alone at the end.
JOBS   ?= 2
LONG    = models packaging targets golden api frontends kernels cuda
FOLDERS = $(LONG) $(filter-out $(LONG) lint mlir,$(notdir $(patsubst %/,%,$(wildcard tests/*/))))
PYTEST  = $(BIN)/pytest -c ../pyproject.toml --rootdir=.. -q -n $(JOBS) --dist loadfile --no-loadscope-reorder
# pip compiles all 18,000 modules that it installs, one after the other: 50 s in which the second core idles.  Without it
# Python compiles the 5,000 of them that are imported, when they are, and keeps them.
INSTALL = $(BIN)/python -m pip install --quiet --no-compile
SOURCES = $(shell find qcompiler passes kernels runtime -name '*.py' -o -name '*.h' -o -name '*.cpp' -o -name '*.cuh') \
          $(wildcard qcompiler/inspect/explore/explorer.*)

.PHONY: help demo install test test-full lint lint-style lint-types fuzz bench bench-peers docs site gpu-check gpu-wheels clean

help:
	@echo "make demo       MiniLM, quantised three ways: accuracy, sizes, speed, dumps, and a run without torch"
	@echo "make test       the suite on an installed wheel (a few minutes); COSTS=1 records what each file costs"
	@echo "make test-full  everything, the slow checks and the MLIR oracle included; PART=3/8 runs the third of eight"
	@echo "                parts. What has passed for this tree is not run again"
	@echo "make fuzz       damaged and hostile files for SECONDS=300; TARGETS='qca gguf' runs these, FIRST=10000 others"
	@echo "make lint       ruff, strict mypy and import-linter on the installed wheel"
	@echo "make bench      linears, a language model and whole models on the CPU, peers in the same run (hours);"
	@echo "                WRITE=1 puts the linears' tables and plots into docs/performance.md"
	@echo "make bench-peers  installs the peers in .venv-peers; llama.cpp is compiled (10 to 20 minutes)"
	@echo "make docs       writes the generated pages of docs/"
	@echo "make site       the pages and the API reference as HTML in build/docs; a warning is an error"
	@echo "make gpu-check  everything that needs a GPU; WHEELS=folder installs from there, OUT=folder gets the JSON,"
	@echo "                PARTS=first or PARTS=second runs that part in nine minutes, BUDGET=300 in so many seconds,"
	@echo "                RESUME=folder skips what passed there, DEVICE=sim:0 runs it on the simulated GPU"
	@echo "make gpu-wheels fills WHEELS=folder with what gpu-check needs on a machine without network"

$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "no $(PYTHON) on PATH; install Python 3.11 or later (apt install python3 python3-venv)" >&2; exit 1; }
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "qcompiler needs Python 3.11 or later; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) --upgrade "pip>=24" "setuptools>=77" wheel
	$(INSTALL) -c constraints.txt torch
	$(INSTALL) -c constraints.txt -e ".[test,lint,demo]"
	@touch $@

install: $(STAMP)

$(VENV)/.stamp-mlir: $(STAMP)
	$(INSTALL) -c constraints.txt ".[mlir,iree]"
	$(INSTALL) -c constraints.txt --no-deps -e .
	@touch $@

# The wheel, unpacked into build/site: never editable, never the source tree.
build/site/.stamp: $(STAMP) $(SOURCES)
	rm -rf build/site build/lib build/dist
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir build/dist .
	$(BIN)/python -m pip install --quiet --no-deps --target build/site build/dist/*.whl
	@touch $@

demo: $(STAMP)
	$(BIN)/python examples/minilm.py --output dumps

# Programs are compiled with -Og and precompiled system headers, which changes no result and takes a fifth of the host
# compiler's time.  One in 16 kernels for the widest vectors, some of the fuzzer's programs, and the full run,
# have -O3.
FAST    = QC_OPTIMISE=g QC_CXX=$(or $(QC_CXX),$(CURDIR)/tests/support/precompiled_g++) \
          QC_PRECOMPILED=$(CURDIR)/build/headers
# COSTS=1 writes what each file cost to tests/costs_short.json (docs/testing.md); run it twice.
MEASURED = PYTHONPATH=$(SITE):$(CURDIR)/tests/support QC_FULL_RUN_RECORD=$(CURDIR)/build/short-run.json
test: build/site/.stamp
	mkdir -p build/headers
	rm -f build/short-run.json
	$(RUN_INSTALLED) $(FAST) $(if $(COSTS),$(MEASURED)) $(PYTEST) $(if $(COSTS),-p full_run) -m "not slow" \
		--hypothesis-profile=repeatable $(addprefix ../tests/,$(FOLDERS))
	$(if $(COSTS),$(BIN)/python tests/support/short_run.py --take build/short-run.json)

# All of it, or the k-th of n parts; what has passed for this tree is not run again.
PART   ?= 1/1
test-full: build/site/.stamp $(VENV)/.stamp-mlir
	$(RUN_INSTALLED) $(BIN)/python -P ../tests/support/full_run.py --part $(PART) --jobs $(JOBS) \
		$(addprefix ../tests/,$(FOLDERS) mlir)

# Three things that know nothing of each other: `make -j2 lint` runs two at once.
lint: lint-types site lint-style

lint-style: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

lint-types: build/site/.stamp
	$(BIN)/python tests/lint/check_installed.py $(SITE)

# Exits with 1 and writes build/fuzz/*.json where an input ends in anything but a QCompilerError (docs/testing.md).
fuzz: $(STAMP)
	$(BIN)/python -P tests/fuzz/files.py --seconds $(or $(SECONDS),300) --first $(or $(FIRST),0) \
		$(addprefix --target ,$(TARGETS))

# Each names the peers that are missing.  Figures stay in build/bench.
PEERS = .venv-peers
bench: $(STAMP)
	mkdir -p build/bench
	$(BIN)/python benchmarks/matmul_cpu.py --growth --json build/bench/matmul.json \
		$(if $(WRITE),--write docs/performance.md)
	$(BIN)/python benchmarks/lm_cpu.py --rounds 15 --json build/bench/lm.json \
		$(if $(wildcard $(PEERS)/bin/python),--llama-python $(PEERS)/bin/python)
	$(BIN)/python benchmarks/model_cpu.py --json build/bench/models.json

# Other projects, in an environment of their own.  torch comes first, as constrained: see constraints.txt.
bench-peers: $(PEERS)/.stamp

$(PEERS)/.stamp: benchmarks/peers.txt constraints.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --upgrade "pip>=24" "setuptools>=77" wheel
	$(PEERS)/bin/python -m pip install --quiet -c constraints.txt torch
	CMAKE_ARGS=-DGGML_NATIVE=ON $(PEERS)/bin/python -m pip install --quiet -c constraints.txt \
		--no-binary llama-cpp-python -r benchmarks/peers.txt
	@touch $@

docs: $(STAMP)
	$(BIN)/python -m qcompiler.formats.doc docs
	$(BIN)/python -m qcompiler.frontends.torch.operators > docs/operators.md
	$(BIN)/python benchmarks/kernel_resources.py > docs/kernel-resources.md
	$(BIN)/python benchmarks/hot_loops.py --output docs/hot-loops.md
	$(BIN)/python -P benchmarks/explorer_pictures.py

# The pages and the API reference as HTML. `make lint` builds it too, since a warning is an error.
site: build/site/.stamp
	$(RUN_INSTALLED) $(BIN)/sphinx-build -q -E -W --keep-going -c ../docs/site .. docs

# Works on a bare CUDA image without network and without the environment above: WHEELS holds what the image lacks.
CHECK_PYTHON = $(if $(WHEELS),$(PYTHON),$(or $(wildcard $(BIN)/python),$(PYTHON)))
gpu-check:
	$(CHECK_PYTHON) -P tests/gpu/check.py $(if $(WHEELS),--wheels $(WHEELS)) $(if $(OUT),--out $(OUT)) \
		$(if $(PARTS),--part $(PARTS)) $(if $(BUDGET),--budget $(BUDGET)) $(if $(DEVICE),--device $(DEVICE)) \
		$(if $(RESUME),--resume $(RESUME))

# Where there is a network: FOR names the Python of the machine with the GPU.
FOR ?= 3.12
gpu-wheels: $(STAMP)
	$(BIN)/python -P tests/gpu/bring.py $(or $(WHEELS),build/gpu-wheels) --python $(FOR)

clean:
	rm -rf build dumps
