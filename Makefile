# Set-up and work in one command each. Needs Python 3.11+, git and make; everything else is installed into .venv*.
PYTHON ?= python3
DATA ?= ../shared/data/trec.jsonl.gz
# How TREC's label codes read in a prompt; labels of other files pass through unchanged.
WORDS ?= DESC=description ENTY=thing HUM=person LOC=place NUM=number
INSTRUCTION ?= Questions and the kind of answer they ask for.
# What bench-voting reads: the data sets of Panda et al. The last one is taken apart further.
VOTING_DATA ?= $(addprefix ../shared/data/,sst2.jsonl.gz trec.jsonl.gz agnews.jsonl.gz)
# What bench-embedded asks, beside the public tasks of CORPUS: nothing of the model was chosen on these.
EMBEDDED_DATA ?= $(addprefix ../shared/data/,agnews.jsonl.gz dbpedia.jsonl.gz trec.jsonl.gz amazon.jsonl.gz)
# What bench-pate reads: the data sets of Duan et al., and for three of them public inputs of another data set.
PATE_DATA ?= $(addprefix ../shared/data/,sst2.jsonl.gz trec.jsonl.gz dbpedia.jsonl.gz agnews.jsonl.gz)
PATE_PUBLIC ?= sst2=../shared/data/ood_imdb.jsonl.gz trec=../shared/data/ood_qqp_questions.jsonl.gz dbpedia=../shared/data/agnews.jsonl.gz
# What bench-soft-prompts reads; its base model is trained on the public text of CORPUS and of SOFT_PUBLIC.
SOFT_PUBLIC ?= ../shared/data
SOFT_DATA ?= $(addprefix ../shared/data/,sst2.jsonl.gz trec.jsonl.gz agnews.jsonl.gz)
# What the tables are about: labelled texts, and texts with a slot to fill.
TABLES_DATA ?= $(addprefix ../shared/data/,trec.jsonl.gz agnews.jsonl.gz dbpedia.jsonl.gz sst2.jsonl.gz amazon.jsonl.gz mit_g.jsonl.gz mit_d.jsonl.gz)
# What bench-mechanisms reads.
MECHANISM_DATA ?= $(addprefix ../shared/data/,trec.jsonl.gz agnews.jsonl.gz)
# What bench-membership attacks.
MEMBERSHIP_DATA ?= $(addprefix ../shared/data/,agnews.jsonl.gz trec.jsonl.gz sst2.jsonl.gz)
# What bench-evolution reads: texts that vote, and the public ones that they choose among.
EVOLUTION_DATA ?= ../shared/data/trec.jsonl.gz
EVOLUTION_PUBLIC ?= ../shared/data/ood_qqp_questions.jsonl.gz
# What bench-documents writes anew (invented questions to a bank first), and what bench-retrieval asks.
DOCUMENTS_DATA ?= bank $(addprefix ../shared/data/,agnews.jsonl.gz trec.jsonl.gz)
RETRIEVAL_DATA ?= ../shared/data/agnews.jsonl.gz
FACTS_DATA ?= $(addprefix ../shared/data/,agnews.jsonl.gz dbpedia.jsonl.gz trec.jsonl.gz)
# Recorded votes of a real model, which bench-recorded replays.
RECORDED_VOTES ?= ../shared/data/recorded_votes.json
# The folder of the data sets that bench-rehearse plans for.
REHEARSE_DATA ?= ../shared/data
CORPUS ?= ../shared/corpus
WORDNET ?= /usr/share/wordnet
# Environments beside that of the tests take the newest versions that pyproject.toml allows, and the torch of the tests.
PIP = -q --disable-pip-version-check --no-input --no-compile -c tests/torch.txt
# The environment of the tests is installed from tests/constraints.txt: every package at one version, by its hashes.
LOCKED = -q --disable-pip-version-check --no-input --no-compile --require-hashes --no-deps -r
STAMP = pyproject.toml tests/torch.txt

.PHONY: demo test planted audit steady check-tests check-benches check-rest check-source check-wheel check-leaks lint house leaks leaks-observers providers faults protocol windows mutation fuzz cassettes lock server-demo bench bench-recorded bench-rehearse bench-trec bench-embedded bench-voting bench-pate bench-mechanisms bench-local bench-soft-prompts bench-membership bench-evolution bench-documents bench-retrieval bench-facts bench-ledger bench-evaluate bench-growing bench-ray tables notebooks postgres model docs release-check pictures clean

demo: .venv/.ready  ## the main job, offline: private questions in, private demonstrations out
	.venv/bin/python examples/demo.py

# Many processes import the same: what one compiles, the others find.
test leaks leaks-observers providers: export PYTHONDONTWRITEBYTECODE =

test:  ## the wheel, then every test with sockets closed; lint, types, import contracts, secrets and the leak table beside them
	$(MAKE) --no-print-directory -j 4 postgres check-wheel .venv-test/.ready
	@$(MAKE) --no-print-directory -j 2 --keep-going check-tests check-rest || { echo; grep -B 30 '\*\*\*' out/check-rest.txt; exit 1; }

# Three workers for two processors: a fifth of the time a test waits for a server, another process or the disk.
check-tests: .venv-test/.ready
	.venv-test/bin/pytest -n 3 --dist worksteal -m "not planted and not audited and not benches" --cov --cov-report=term:skip-covered $(PYTEST_ARGS)
	.venv-test/bin/python tests/check_coverage.py

# In what the tests leave of the processors while they wait for servers and processes; shown in one piece, as tests report too.
check-rest: .venv-test/.ready
	@mkdir -p out
	@nice -n 10 $(MAKE) --no-print-directory check-source check-leaks > out/check-rest.txt 2>&1; \
	ended=$$?; echo; cat out/check-rest.txt; exit $$ended

check-benches: .venv-test/.ready  ## what the benchmarks measure and print, on small data
	.venv-test/bin/pytest -n 2 --dist worksteal -m benches $(PYTEST_ARGS)

planted: .venv-test/.ready postgres  ## bugs planted on purpose: every one has to turn a test red
	.venv-test/bin/pytest -n 2 --dist worksteal -m "planted and not audited" $(PYTEST_ARGS)

audit: .venv-test/.ready postgres  ## every audit of the package, with every planted bug: caught / planted, false alarms (or ARGS="--only token")
	.venv-test/bin/python tests/check_audit.py -n 2 $(ARGS)

# What loads the processors comes with the system, as PostgreSQL does.
steady: .venv-test/.ready postgres  ## the whole suite ten times, in random orders, on busy processors; failures by test; continues where it stopped (or ARGS="--runs 1")
	@command -v stress-ng > /dev/null || { \
	  test "$$(id -u)" = 0 && command -v apt-get > /dev/null && apt-get -qq update && \
	  DEBIAN_FRONTEND=noninteractive apt-get -qq -y --no-install-recommends install stress-ng > /dev/null; \
	} || { echo "stress-ng is not installed and cannot be from here: install it"; exit 1; }
	.venv-test/bin/python tests/check_steady.py $(ARGS)

check-source: .venv-test/.ready
	.venv-test/bin/ruff check .
	.venv-test/bin/ruff format --check .
	.venv-test/bin/mypy
	.venv-test/bin/basedpyright --pythonpath .venv-test/bin/python
	.venv-test/bin/lint-imports
	.venv-test/bin/python tests/check_secrets.py
	.venv-test/bin/python -m tests.check_style

# Makes its own environment, while that of the tests is made.
check-wheel:  ## the README's install and code, in an empty environment
	$(PYTHON) tests/check_wheel.py

check-leaks: .venv-test/.ready  ## every channel of the leak table, on the lowest langchain-core
	.venv-test/bin/python tests/check_leaks.py --lowest

lint: .venv-test/.ready
	.venv-test/bin/ruff check --fix .
	.venv-test/bin/ruff format .
	.venv-test/bin/mypy
	.venv-test/bin/basedpyright --pythonpath .venv-test/bin/python
	.venv-test/bin/lint-imports
	.venv-test/bin/python -m tests.check_style

house: .venv-test/.ready  ## lines, files, circles, core, import times, each beside its goal (or ARGS=--list, ARGS=--strict)
	.venv-test/bin/python tests/check_house.py $(ARGS)

leaks: .venv-test/.ready  ## what could overhear a private call, and did not: every channel, on three versions of langchain-core
	.venv-test/bin/python tests/check_leaks.py

leaks-observers: .venv-test/.ready  ## observability packages beside private calls, each in an environment of its own: what they saw (or ARGS="--only braintrust")
	.venv-test/bin/python tests/check_observers.py $(ARGS)

providers: .venv-test/.ready  ## LangChain's classes of providers, newest and floor, each in an environment of its own: do they vote, do they write (or ARGS="--only ollama --write")
	.venv-test/bin/python tests/check_providers.py $(ARGS)

faults: .venv-test/.ready postgres  ## what a durable ledger meets: contention, kill -9, torn logs, full disks, bit rot, restored copies; counts (or ARGS="--only L2 --few")
	.venv-test/bin/python tests/check_faults.py $(ARGS)

protocol: .venv-test/.ready  ## the ledger's protocol: every state of the full scenes, every planted mistake, random schedules of the real writer (or ARGS="--only anchor --small")
	.venv-test/bin/python tests/check_protocol.py $(ARGS)

windows: .venv-test/.ready  ## a ledger of windows under 100,000 random schedules, against an oracle that shares no rule with it (or ARGS="--schedules 5000")
	.venv-test/bin/python tests/check_windows.py $(ARGS)

mutation: .venv-test/.ready  ## the 19 privacy bugs of published code, then small changes of langchain_dpicl/privacy: who notices (or ARGS=--all, ARGS="--again")
	.venv-test/bin/python -m pip install $(PIP) --group mutation
	.venv-test/bin/python tests/check_mutation.py $(ARGS)

fuzz: .venv-test/.ready  ## files of every kind, changed at random: readers raise our errors, or read what was written (or CASES=200000, SEED=...)
	FUZZ_CASES=$(or $(CASES),20000) FUZZ_SEED=$(or $(SEED),0) .venv-test/bin/pytest -q -s --timeout 7200 tests/unit_tests/test_fuzzed_files.py

notebooks: .venv/.ready  ## examples/notebooks on real kernels, whole; what came out, as notebooks and pages, is in out/notebooks (or ARGS=quickstart)
	.venv/bin/python -m pip install $(PIP) --group notebooks
	.venv/bin/python -m tests.notebooks $(ARGS)

cassettes: .venv-test/.ready  ## record cassettes/ again, from servers on this machine (or --real, with keys: cassettes/README.md)
	.venv-test/bin/python -m tests.cassettes $(ARGS)

server-demo: .venv-test/.ready  ## private demonstrations through a llama.cpp server: chat, completions, top 20, whole vocabulary
	.venv-test/bin/python -m tests.show_server

bench: .venv-bench/.ready  ## every goal about speed in ten minutes: goal, ours, anchor of the same run, ratio, verdict (or ARGS="--parts voting api")
	.venv-bench/bin/python benchmarks/bench_speed.py $(ARGS)

bench-recorded: .venv/.ready  ## recorded votes of a real model through private releases: do the planner's chances come true? (or DATA=FILE.json)
	.venv/bin/python benchmarks/bench_recorded.py --data $(if $(filter file,$(origin DATA)),$(RECORDED_VOTES),$(DATA)) $(ARGS)

bench-rehearse: .venv/.ready  ## does a plan or a rehearsal say what comes out, and is it right to spend? (or ARGS="--sets agnews --parts defaults")
	.venv/bin/python benchmarks/bench_rehearse.py --data $(REHEARSE_DATA) $(ARGS)

bench-trec: .venv/.ready  ## accuracy table on TREC (or --data any file of its format): make bench-trec DATA=FILE.jsonl.gz
	.venv/bin/python benchmarks/bench_trec.py --data $(DATA) --words $(WORDS) --instruction "$(INSTRUCTION)" $(ARGS)

bench-voting: .venv/.ready  ## private votes per query: accuracy, noise, speed (or ARGS="--data FILE", ARGS=--full)
	.venv/bin/python benchmarks/bench_voting.py --data $(if $(filter file,$(origin DATA)),$(VOTING_DATA),$(DATA)) $(ARGS)

bench-embedded: .venv/.ready  ## the embedded model: labels, rows that are alike, leaks, nearest texts, private writing, speed (or EMBEDDED_DATA=FILE, ARGS="--parts labels")
	.venv/bin/python benchmarks/bench_embedded.py --data $(EMBEDDED_DATA) $(if $(wildcard $(CORPUS)),--corpus $(CORPUS)) $(ARGS)

bench-pate: .venv/.ready  ## PromptPATE: honest epsilons, students against zero-shot and the best private prompt (or ARGS="--data FILE --public FILE", ARGS=--full)
	.venv/bin/python benchmarks/bench_pate.py $(if $(filter file,$(origin DATA)),--data $(PATE_DATA) --public $(PATE_PUBLIC),--data $(DATA)) $(ARGS)

bench-mechanisms: .venv/.ready  ## mechanisms of generation at equal epsilon on TREC and AGNews: accuracy, distance of the text (or ARGS)
	.venv/bin/python benchmarks/bench_mechanisms.py --data $(if $(filter file,$(origin DATA)),$(MECHANISM_DATA),$(DATA)) --words $(WORDS) $(ARGS)

bench-local: .venv-bench/.ready  ## a local model, side by side: re-prefill per token, invink, plain generate, memory (or ARGS=--full, ARGS="--device cuda")
	.venv-bench/bin/python benchmarks/bench_local.py --data $(DATA) $(ARGS)

bench-soft-prompts: .venv-bench/.ready  ## soft prompts and prefixes under DP-SGD: accuracy by epsilon, speed and memory beside peft and Opacus (or ARGS="--parts speed")
	.venv-bench/bin/python benchmarks/bench_soft_prompts.py --data $(if $(filter file,$(origin DATA)),$(SOFT_DATA),$(DATA)) --corpus $(CORPUS) --public $(SOFT_PUBLIC) $(ARGS)

tables: .venv-bench/.ready  ## every method on every data set, and what it costs; says its time first, continues where it stopped (or ARGS="--quick", ARGS="--ablations", ARGS="--show --write")
	.venv-bench/bin/python benchmarks/bench_tables.py --data $(if $(filter file,$(origin DATA)),$(TABLES_DATA),$(DATA)) $(ARGS)

bench-membership: .venv/.ready  ## membership inference: prompts of real records and every component (or DATA=FILE, ARGS="--parts prompts")
	.venv/bin/python benchmarks/bench_membership.py --data $(if $(filter file,$(origin DATA)),$(MEMBERSHIP_DATA),$(DATA)) $(ARGS)

bench-evolution: .venv/.ready  ## what the noisy votes of private evolution choose from public text (or ARGS="--rounds 1 --runs 3", EVOLUTION_DATA=FILE EVOLUTION_PUBLIC=FILE)
	.venv/bin/python benchmarks/bench_evolution.py --data $(EVOLUTION_DATA) --public $(EVOLUTION_PUBLIC) $(ARGS)

bench-documents: .venv/.ready  ## synthetic documents: topics found by epsilon, and what a retriever over the texts finds (or DATA=FILE)
	.venv/bin/python benchmarks/bench_documents.py --data $(if $(filter file,$(origin DATA)),$(DOCUMENTS_DATA),$(DATA)) $(ARGS)

bench-retrieval: .venv/.ready  ## votes of retrieved documents beside votes of a random sample at equal epsilon (or DATA=FILE)
	.venv/bin/python benchmarks/bench_retrieval.py --data $(if $(filter file,$(origin DATA)),$(RETRIEVAL_DATA),$(DATA)) $(ARGS)

bench-facts: .venv/.ready  ## facts that only the private corpus has: words, pairs, texts and votes that answer (or ARGS=--full)
	.venv/bin/python benchmarks/bench_facts.py $(ARGS)
	.venv/bin/python benchmarks/bench_facts.py --data $(if $(filter file,$(origin DATA)),$(FACTS_DATA),$(DATA))

bench-ledger: .venv-test/.ready postgres  ## what a durable ledger costs: pairs per second and waits at 1, 8, 64 processes (or ARGS="--seconds 20")
	.venv-test/bin/python benchmarks/bench_ledger.py $(ARGS)

bench-evaluate: .venv-test/.ready  ## what an evaluation under privacy costs: interval, choice and time, with goals (or ARGS="--records 200")
	.venv-test/bin/python benchmarks/bench_evaluate.py $(ARGS)

bench-growing: .venv-test/.ready  ## data that grows: noise for the same promise under four ways to pay, and the time of a reservation (or ARGS="--reservations 1000000")
	.venv-test/bin/python benchmarks/bench_growing.py $(ARGS)

bench-ray: .venv-test/.ready postgres  ## texts per second at 1, 2, 4 workers of a Ray cluster, with a model that makes one wait (or ARGS="--items 96")
	.venv-test/bin/python benchmarks/bench_ray.py $(ARGS)

# Ledgers in PostgreSQL are tested on a real server, which each test process starts for itself. Where none can be
# installed those tests are skipped and say so; on CI they fail.
postgres:
	@command -v postgres > /dev/null || ls /usr/lib/postgresql/*/bin/initdb > /dev/null 2>&1 || { \
	  test "$$(id -u)" = 0 && command -v apt-get > /dev/null && apt-get -qq update && \
	  DEBIAN_FRONTEND=noninteractive apt-get -qq -y --no-install-recommends install postgresql > /dev/null; \
	} || echo "PostgreSQL is not installed and cannot be from here: its tests will be skipped (on CI they fail)"

# The numbers of the planner's page, anew when the package changed.
out/planner.json: docs/tools/planner.py $(shell find langchain_dpicl -name '*.py') | .venv/.ready
	.venv/bin/python docs/tools/planner.py --out $@

# A browser comes with the system, as PostgreSQL does; CHROMIUM=/path/to/one names another.
docs: .venv-docs/.ready notebooks out/planner.json  ## the site, into out/site, with the notebooks and what comes out of them; a broken link stops it, and what headless Chromium finds: tables too wide for a phone, text on text, searches that miss, what some readers cannot read
	@command -v $(or $(CHROMIUM),chromium) > /dev/null || { \
	  test "$$(id -u)" = 0 && command -v apt-get > /dev/null && apt-get -qq update && \
	  DEBIAN_FRONTEND=noninteractive apt-get -qq -y --no-install-recommends install chromium > /dev/null; \
	} || echo "Chromium is not installed and cannot be from here: the check of the site will look for another one"
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict
	@echo "out/site/index.html"
	.venv-docs/bin/python docs/tools/check_site.py

# Beside the tests of the wheel: a release is what a user installs.
release-check: check-wheel .venv-release/.ready  ## all of a release but the upload: two builds that are the same, metadata, versions, bill of materials; into out/release (or ARGS="--tag v0.1.0")
	.venv-release/bin/python tests/check_release.py $(ARGS)

pictures: .venv/.ready  ## draw the pictures of the pages anew (docs/pictures)
	.venv/bin/python docs/tools/pictures.py

model: .venv-test/.ready  ## rebuild the tables of the embedded model from public text (same input, same bytes)
	@test -f $(WORDNET)/data.noun || { \
	  test "$$(id -u)" = 0 && command -v apt-get > /dev/null && apt-get -qq update && \
	  DEBIAN_FRONTEND=noninteractive apt-get -qq -y --no-install-recommends install wordnet-base > /dev/null; \
	} || { echo "WordNet is not in $(WORDNET) and cannot be installed from here: install wordnet-base"; exit 1; }
	OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1 .venv-test/bin/python benchmarks/build_embedded.py --corpus $(CORPUS) --wordnet $(WORDNET) --out langchain_dpicl/backends/data

.venv/.ready: $(STAMP)
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install $(PIP) --upgrade 'pip>=25.1'
	.venv/bin/python -m pip install $(PIP) -e '.[plot]'
	touch $@

# pip first, because it installs the others: the halves of the lock and torch side by side, as pip itself waits for one
# file after the other. torch comes without hashes: some machines have a file of their own for it, and what it needs
# differs with the file. The build backend is in the lock, so nothing else is fetched to build.
.venv-test/.ready: .venv-test/.half-0 .venv-test/.half-1 .venv-test/.torch
	.venv-test/bin/python -m pip install $(PIP) torch
	.venv-test/bin/python -m pip install $(PIP) --no-deps --no-build-isolation -e .
	.venv-test/bin/python -m pip check
	touch $@

.venv-test/.half-%: .venv-test/.pip
	awk '/^[a-z]/ { package++ } package % 2 == $*' tests/constraints.txt > .venv-test/half-$*.txt
	.venv-test/bin/python -m pip install $(LOCKED) .venv-test/half-$*.txt
	touch $@

.venv-test/.torch: .venv-test/.pip
	.venv-test/bin/python -m pip install $(PIP) --no-deps torch
	touch $@

.venv-test/.pip: $(STAMP) tests/constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv .venv-test
	sed -n '/^pip==/,/[^\\]$$/p' tests/constraints.txt > .venv-test/pip.txt
	.venv-test/bin/python -m pip install $(LOCKED) .venv-test/pip.txt
	touch $@

lock: .venv-lock/.ready  ## tests/constraints.txt anew: the newest version of every package of the tests, for Python 3.11 and newer, with hashes
	.venv-lock/bin/uv pip compile pyproject.toml tests/lock.in --extra plot --group test --group lint --excludes tests/torch.txt \
	  --universal --python-version 3.11 --no-config --upgrade --generate-hashes \
	  --no-header --no-annotate --quiet --output-file tests/constraints.txt

.venv-lock/.ready:
	$(PYTHON) -m venv .venv-lock
	.venv-lock/bin/python -m pip install $(PIP) uv
	touch $@

.venv-docs/.ready: $(STAMP)
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install $(PIP) --upgrade 'pip>=25.1'
	.venv-docs/bin/python -m pip install $(PIP) --group docs
	.venv-docs/bin/python -m pip install $(PIP) --no-deps --group accessibility
	touch $@

# What builds a release is from the lock, in an environment of its own: nothing that comes without hashes runs there.
.venv-release/.ready: $(STAMP) tests/constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv .venv-release
	.venv-release/bin/python -m pip install $(PIP) --upgrade 'pip>=25.1'
	.venv-release/bin/python -m pip install $(PIP) --group release
	$(PYTHON) -m venv .venv-release/build
	sed -n -E '/^(hatchling|packaging|pathspec|pluggy|tomlkit|trove-classifiers)==/,/[^\\]$$/p' tests/constraints.txt > .venv-release/build.txt
	.venv-release/build/bin/python -m pip install $(LOCKED) .venv-release/build.txt
	.venv-release/build/bin/python -m pip check
	touch $@

.venv-bench/.ready: $(STAMP)
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv .venv-bench
	.venv-bench/bin/python -m pip install $(PIP) --upgrade 'pip>=25.1'
	.venv-bench/bin/python -m pip install $(PIP) -e '.[hf,plot,grammar,openai]' pandas accelerate opacus peft
	.venv-bench/bin/python -m pip install $(PIP) --no-deps invink
	touch $@

clean:
	rm -rf .venv .venv-test .venv-bench .venv-docs .venv-release .venv-lock .venv-leaks-* .venv-providers-* build dist out .coverage
