# Set-up and work in one command each. Needs Python 3.11+, git and make; everything else is installed into .venv*.
PYTHON ?= python3
DATA ?= ../shared/data/trec.jsonl.gz
# How TREC's label codes read in a prompt; labels of other files pass through unchanged.
WORDS ?= DESC=description ENTY=thing HUM=person LOC=place NUM=number
INSTRUCTION ?= Questions and the kind of answer they ask for.
# What bench-voting reads: the data sets of Panda et al. The last one is taken apart further.
VOTING_DATA ?= $(addprefix ../shared/data/,sst2.jsonl.gz trec.jsonl.gz agnews.jsonl.gz)
CORPUS ?= ../shared/corpus
PIP = -q --disable-pip-version-check --no-input -c tests/constraints.txt
STAMP = pyproject.toml tests/constraints.txt

.PHONY: demo test lint leaks cassettes server-demo bench-trec bench-voting model clean

demo: .venv/.ready  ## the main job, offline: private questions in, private demonstrations out
	.venv/bin/python examples/demo.py

test: .venv-test/.ready  ## lint, types, import contracts, then every test with sockets closed
	.venv-test/bin/ruff check .
	.venv-test/bin/ruff format --check .
	.venv-test/bin/mypy
	.venv-test/bin/lint-imports
	.venv-test/bin/pytest -n 2 --cov --cov-report=term:skip-covered $(PYTEST_ARGS)
	.venv-test/bin/python tests/check_coverage.py
	.venv-test/bin/python tests/check_wheel.py
	.venv-test/bin/python tests/check_leaks.py

lint: .venv-test/.ready
	.venv-test/bin/ruff check --fix .
	.venv-test/bin/ruff format .
	.venv-test/bin/mypy
	.venv-test/bin/lint-imports

leaks: .venv-test/.ready  ## what could overhear a private call, and did not: every channel, on three versions of langchain-core
	.venv-test/bin/python tests/check_leaks.py

cassettes: .venv-test/.ready  ## record cassettes/ again, from servers on this machine (or --real, with keys: cassettes/README.md)
	.venv-test/bin/python -m tests.cassettes $(ARGS)

server-demo: .venv-test/.ready  ## private demonstrations through a llama.cpp server: chat, completions, top 20, whole vocabulary
	.venv-test/bin/python -m tests.show_server

bench-trec: .venv/.ready  ## accuracy table on TREC (or --data any file of its format): make bench-trec DATA=FILE.jsonl.gz
	.venv/bin/python benchmarks/bench_trec.py --data $(DATA) --words $(WORDS) --instruction "$(INSTRUCTION)" $(ARGS)

bench-voting: .venv/.ready  ## private votes per query: accuracy, noise, speed (or ARGS="--data FILE", ARGS=--full)
	.venv/bin/python benchmarks/bench_voting.py --data $(if $(filter file,$(origin DATA)),$(VOTING_DATA),$(DATA)) $(ARGS)

model: .venv-test/.ready  ## rebuild the tables of the embedded model from public text (same input, same bytes)
	.venv-test/bin/python -m langchain_dpicl.backends._embedded_build --corpus $(CORPUS) --out langchain_dpicl/backends/data

.venv/.ready: $(STAMP)
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install $(PIP) --upgrade 'pip>=25.1'
	.venv/bin/python -m pip install $(PIP) -e '.[plot]'
	touch $@

.venv-test/.ready: $(STAMP)
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv .venv-test
	.venv-test/bin/python -m pip install $(PIP) --upgrade 'pip>=25.1'
	.venv-test/bin/python -m pip install $(PIP) -e '.[plot]' --group test --group lint
	touch $@

clean:
	rm -rf .venv .venv-test .venv-leaks-* build dist out .coverage
