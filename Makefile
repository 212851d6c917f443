# Everything that one does with a checkout. `make` alone says what there is; each target sets up .venv by itself.

PYTHON ?= python3
SEEDS ?= 500
WORKERS ?= 3
KILLS ?= 200
PEERS ?= ray,nixl,mooncake,monarch
# The engines, trainers and cluster managers whose tests `make integrations` runs.
NAMES ?= $(patsubst tests/integrations/%.txt,%,$(wildcard tests/integrations/*.txt))
UPDATES ?= 2000
ROUNDS ?= 50
RESPONSES ?= 300
SECONDS ?= 300
HOSTS ?= 1
SEEDS_CUT ?= 3
SEEDS_RL ?= 3
DEVICE ?= cpu
REPORT ?= gpu-report.md
# The commit of the release before this one.
RELEASE ?= 7ff7cd1
# Such as handlers.rounds, or --again for those that have survived or hung; empty is all.
MODULES ?=

# What `make pythons` tries. It looks on the PATH, and among those of pyenv.
VERSIONS ?= 3.11 3.12 3.13
VENV ?= .venv
# What `make slow` draws its examples from: print what failed again with the one that it named.
SEED ?= $(shell od -An -N4 -tu4 /dev/urandom | tr -d ' ')
SEED := $(SEED)
AGAIN := { echo "its examples were of SEED=$(SEED): 'make slow SEED=$(SEED)' draws them again" >&2; exit 1; }

# What draws the site's diagrams, in the browser of who reads it.
MERMAID := 11.12.0

BIN := $(VENV)/bin
# Written last, so that an installation that broke off is done again.
READY := $(VENV)/.ready
# Three workers keep two cores busy, since a third of what the tests take is waiting; a file's tests stay together and share its
# hub, all that uses the session's hubs is in one worker (tests/conftest.py), and the files begin in its order: xdist's own is
# by how many tests a file has, and the long ones have few.
SIDE_BY_SIDE := -n $(WORKERS) --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help venv demo demo-rl test long slow wheel pythons check format sim bugs compose systemd bench bench-peers soak chaos late-bytes torn-reads rollout-exact rollout-matrix rollout-replay rollout-storm matrix partition crowds mixed cluster gpu mutants docs site serve integrations

help: ## say what there is
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv: $(READY) ## make .venv with all that the rest needs (PYTHON=python3: any from 3.11 on)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "TensorHub needs Python 3.11 or newer, and '$(PYTHON)' is not one: name one, as in 'make venv PYTHON=python3.12'" >&2; \
	  exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "'$(PYTHON)' lacks ensurepip: install its venv package (on Debian 'apt install python3-venv') and try again" >&2; \
	  exit 1; }
	@echo "setting up $(VENV); this takes a minute or two, and is done again only when the dependencies change"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]' -c constraints.txt
	@touch $@

demo: $(READY) ## a whole hub on this machine: train, publish, replicate, and check every byte
	@$(BIN)/tensorhub demo

demo-rl: $(READY) ## a small model learns undisturbed and with kills, SEEDS_RL=3: ten minutes; DEVICE=cuda on a GPU
	@$(BIN)/python -m benchmarks.demo_rl --seeds $(SEEDS_RL) --device $(DEVICE)

test: $(READY) ## the tests, in five minutes on two cores (WORKERS=3); `make long`, `make slow` and a GPU run the others
	@$(BIN)/python -m pytest $(SIDE_BY_SIDE) -m "not long and not slow and not gpu"

long: $(READY) ## tests that take some seconds each, most of them of a hub of their own: four minutes, and CI runs them too
	@$(BIN)/python -m pytest $(SIDE_BY_SIDE) -m "long and not slow and not gpu"

slow: $(READY) ## the tests that take longer still, with new examples (SEED=: by lot); some need root or Docker
	@echo "'make slow SEED=$(SEED)' draws the same examples again"
	@$(BIN)/python -m pytest --hypothesis-profile=anew --hypothesis-seed=$(SEED) -m "slow and not gpu" || $(AGAIN)
	@$(BIN)/python -m pytest --hypothesis-profile=thorough --hypothesis-seed=$(SEED) -m "not slow" tests/property || $(AGAIN)

integrations: $(NAMES:%=.venv-%/.ready) ## the tests with engines and trainers of others (NAMES=trl), each in an environment of its own
	@for name in $(NAMES); do \
	  echo "with $$name:"; .venv-$$name/bin/python -m pytest -W default tests/integrations/$$name || exit 1; \
	done

.venv-%/.ready: tests/integrations/%.txt pyproject.toml
	@echo "setting up .venv-$*; this takes minutes, and is done again only when what it needs changes"
	@$(PYTHON) -m venv .venv-$*
	@.venv-$*/bin/python -m pip install --quiet --disable-pip-version-check -e . -r $<
	@test ! -f $(<:.txt=.remove) || .venv-$*/bin/python -m pip uninstall --quiet --yes -r $(<:.txt=.remove)
	@test ! -f $(<:.txt=.no-deps) || .venv-$*/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r $(<:.txt=.no-deps)
	@touch $@

wheel: $(READY) ## the wheel in empty environments: the base installation alone, and the demo with the README's extras
	@$(BIN)/python -m pytest tests/wheel

pythons: ## `make test long` on each Python of VERSIONS="3.11 3.12 3.13" that is here, each in an environment of its own
	@passed=; for version in $(VERSIONS); do \
	  here=; for python in python$$version $${PYENV_ROOT:-$$HOME/.pyenv}/versions/$$version.*/bin/python; do \
	    $$python -c 'import ensurepip, venv' 2>/dev/null || continue; \
	    here=1; echo "Python $$version: $$python"; \
	    $(MAKE) --no-print-directory test long VENV=.venv-$$version PYTHON=$$python || exit 1; \
	    passed="$$passed $$version"; break; \
	  done; \
	  test -n "$$here" || echo "Python $$version is not here, and left out"; \
	done; \
	test -n "$$passed" || { echo "none of these Pythons is here: $(VERSIONS)" >&2; exit 1; }; \
	echo "the tests pass on$$passed"

check: $(READY) ## lint, format, types and architecture
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo

format: $(READY) ## put the code into its format, and mend what ruff can mend
	@$(BIN)/ruff check --fix-only --quiet .
	@$(BIN)/ruff format .

sim: $(READY) ## the production cores under SEEDS=500 seeds of simulated trouble
	@$(BIN)/python -m tensorhub_simulator --seeds $(SEEDS)
	@$(BIN)/python -m tensorhub_simulator.rollouts --seeds $(SEEDS)

bugs: $(READY) ## each planted bug in turn: which of SEEDS=500 seeds finds it, and how
	@$(BIN)/python -m tensorhub_simulator --bugs --seeds $(SEEDS)
	@$(BIN)/python -m tensorhub_simulator.rollouts --bugs --seeds $(SEEDS)

compose: $(READY) ## docker-compose.yml in the Docker engine of this machine: built, up, the demo, down and up again
	@$(BIN)/python -m pytest tests/deployment/test_compose.py tests/deployment/test_compose_cluster.py -s

systemd: $(READY) ## the units in a booted copy of this machine: killed, hung, stopped during a read (as root)
	@$(BIN)/python -m pytest tests/deployment/test_systemd.py -s

bench: $(READY) ## TensorHub and the physical limit, from one run
	@$(BIN)/python -m benchmarks

bench-peers: $(READY) ## the same with PEERS=ray,nixl,mooncake,monarch, each in an environment of its own
	@$(BIN)/python -m benchmarks --peers $(PEERS)

soak: $(READY) ## UPDATES=2000 in a row over each transport: does anything grow?
	@$(BIN)/python -m benchmarks.soak --updates $(UPDATES)

chaos: $(READY) ## KILLS=200 real processes killed at any moment of a transfer; HOSTS=2 over ucxx
	@$(BIN)/python -m tests.chaos.kills --kills $(KILLS) --hosts $(HOSTS)

late-bytes: $(READY) ## ROUNDS=50 sources stopped in mid-read over ucxx, woken after the commit: not a byte may change
	@$(BIN)/python -m tests.chaos.late_bytes --rounds $(ROUNDS)

torn-reads: $(READY) ## SECONDS=300 of a trainer that overwrites while four readers fetch; then without the drain
	@$(BIN)/python -m tests.chaos.torn_reads --seconds $(SECONDS)
	@$(BIN)/python -m tests.chaos.torn_reads --seconds 30 --no-drain

rollout-exact: $(READY) ## responses of killed and moved runners, bit for bit (RESPONSES=300); then with versions that come meanwhile
	@$(BIN)/python -m tests.chaos.rollout_exact --responses $(RESPONSES)
	@$(BIN)/python -m tests.chaos.rollout_exact --responses $(RESPONSES) --publishes 20

rollout-replay: $(READY) ## responses of killed runners and of versions that come meanwhile, each scored again by `tensorhub replay`
	@$(BIN)/python -m tests.chaos.rollout_replay

rollout-storm: $(READY) ## KILLS=200 processes killed in one job of rollouts: what came, twice, lost, stale, and how long
	@$(BIN)/python -m tests.chaos.rollout_storm --kills $(KILLS)

rollout-matrix: $(READY) ## each process of rollouts killed or stopped before, during and after generation; then 50 runners
	@$(BIN)/python -m tests.chaos.rollout_matrix
	@$(BIN)/python -m tests.chaos.rollout_matrix --first-token 50

matrix: $(READY) ## each process killed or stopped before, during and after the bytes, over each transport: a table
	@$(BIN)/python -m tests.chaos.matrix

crowds: $(READY) ## a thousand shards, calls and readers at one agent, killed or stopped meanwhile; a hundred jobs at once
	@$(BIN)/python -m tests.chaos.crowds shards
	@$(BIN)/python -m tests.chaos.crowds calls
	@$(BIN)/python -m tests.chaos.crowds readers --install in-place
	@$(BIN)/python -m tests.chaos.crowds readers --install staged
	@$(BIN)/python -m tests.chaos.crowds readers --install mapped
	@$(BIN)/python -m tests.chaos.crowds jobs

mixed: $(READY) ## the release before (RELEASE=7ff7cd1) and this one in one hub: upgraded part by part, and rolled back
	@$(BIN)/python -m tests.mixed.mixed --release $(RELEASE)

cluster: $(READY) ## a hub on three nodes of NATS: each is killed and stopped, so are two at once, and the registries
	@$(BIN)/python -m pytest tests/integration/bus/test_cluster.py tests/integration/test_cluster.py
	@$(BIN)/python -m tests.chaos.cluster

partition: $(READY) ## SEEDS_CUT=3 hubs whose two hosts are cut apart and healed in mid-transfer; needs root
	@$(BIN)/python -m tests.partition.partition --seeds $(SEEDS_CUT)

gpu: $(READY) ## on a machine with a GPU: its tests, compute-sanitizer on the kernels, the benchmarks; one report (REPORT=gpu-report.md)
	@$(BIN)/python -m tools.gpu --report $(REPORT)

mutants: $(READY) ## small changes to catalog, planner and transfer, or to MODULES=handlers.rounds: does a test notice?
	@$(BIN)/python -m tests.mutation.run $(MODULES)

docs: $(READY) ## write again what docs/ holds that is generated from the code
	@$(BIN)/python -m tools.docs.settings_page < docs/operate/settings.md > docs/operate/settings.md.new
	@mv docs/operate/settings.md.new docs/operate/settings.md
	@$(BIN)/python -m tools.docs.metrics_page < docs/operate/metrics.md > docs/operate/metrics.md.new
	@mv docs/operate/metrics.md.new docs/operate/metrics.md
	@$(BIN)/python -m tools.docs.asyncapi > docs/reference/asyncapi.json.new
	@mv docs/reference/asyncapi.json.new docs/reference/asyncapi.json
	@$(BIN)/python -m tools.docs.protocol_page
	@$(BIN)/python -m tools.docs.peers_chart

site: $(READY) .site/mermaid-$(MERMAID).js ## docs/ as a site, in site/, with every link checked; it loads nothing from outside
	@NO_MKDOCS_2_WARNING=true $(BIN)/python -m mkdocs build --quiet --clean
	@$(BIN)/python -m tools.docs.links site

serve: $(READY) .site/mermaid-$(MERMAID).js ## the site at http://127.0.0.1:8000, built again whenever a page changes
	@NO_MKDOCS_2_WARNING=true $(BIN)/python -m mkdocs serve

.site/mermaid-$(MERMAID).js:
	@command -v npm > /dev/null || { echo "the site's diagrams need npm once, to fetch Mermaid (on Debian 'apt install npm')" >&2; exit 1; }
	@mkdir -p .site && cd .site && npm pack --silent mermaid@$(MERMAID) > /dev/null
	@cd .site && tar -xzf mermaid-$(MERMAID).tgz --strip-components=2 package/dist/mermaid.min.js
	@cd .site && rm mermaid-$(MERMAID).tgz && mv mermaid.min.js mermaid-$(MERMAID).js
