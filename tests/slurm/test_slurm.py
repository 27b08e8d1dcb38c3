"""Studies and scripts under a real Slurm: launchers, arrays, failures, requeues, status."""

from pathlib import Path

import h5py
import pytest
from gpu_driver import two_gpus_in
from lab import Lab, Mpi, logs
from training import ROOT

from cpdhpc.lab.study.folder import Folder, recorded
from cpdhpc.lab.study_data.study_file import load_study_file

pytestmark = pytest.mark.slurm
ONE = """
kind = "allreduce"
[sweep]
nodes = 2
ppn = 2
size_bytes = "64KiB"
algorithm = "ring"
wire = "e4m3"
[measure]
warmup = 1
min_repeats = 5
max_repeats = 5
"""
TWELVE = """
name = "twelve"
kind = "allreduce"
[sweep]
nodes = [1, 2]
size_bytes = ["4KiB", "64KiB", "1MiB"]
algorithm = "direct"
wire = ["raw", "e4m3"]
[measure]
warmup = 1
min_repeats = 5
max_repeats = 5
[run]
bundle = "case"
throttle = 3
"""
LONG = """
name = "long"
kind = "allreduce"
[sweep]
nodes = [1, 2]
size_bytes = "4KiB"
[measure]
min_repeats = 1000000
max_repeats = 1000000
[run]
throttle = 1
"""
TRAIN = """
[model]
name = "mlp"
hidden = [16]
[gradient]
aggregator = "lowbit"
wire = "e4m3"
[train]
epochs = 60
batch = 64
learning_rate = 0.1
threads = 1
checkpoint_every = 1000
"""
STUDY_OF_TRAIN = """
name = "training"
kind = "train"
[sweep]
ppn = 2
seed = 0
[train]
job = "train.toml"
"""
# Open MPI 5 under srun may die in MPI_Init: open-mpi/ompi issue 12495, docs/reference/sites.md
DIES_IN_INIT = "mca_pml_ob1_recv_frag_callback_match"
WAYS = ("mpirun", "srun-pmix", "mpiexec", "srun-pmi2")


@pytest.fixture(scope="module")
def ways(lab: Lab, openmpi: Mpi | str, mpich: Mpi | str) -> dict[str, Folder | str]:
    """The same case on 2 x 2 ranks by all ways, all in the queue at once; or why not."""
    study = lab.file("one.toml", ONE)
    found: dict[str, Folder | str] = {}
    for way in WAYS:
        mpi = openmpi if way in ("mpirun", "srun-pmix") else mpich
        if way == "srun-pmix" and not lab.apart:
            found[way] = "nodes share a hostname: Open MPI under srun takes each rank for a node"
        elif isinstance(mpi, str):
            found[way] = mpi
        else:
            found[way] = lab.submit(study, lab.site(mpi, way), f"by-{way}")
    if isinstance(openmpi, Mpi):
        found["wrong"] = lab.submit(study, lab.site(openmpi, "srun-pmi2"), "by-wrong")
    for way, folder in found.items():
        if isinstance(folder, Folder):
            lab.finish(folder)
            if way == "srun-pmix" and DIES_IN_INIT in logs(folder):  # before it is our program
                lab.submit(study, lab.site(openmpi, way), f"by-{way}")
                lab.finish(folder)
    return found


@pytest.mark.parametrize("way", WAYS)
def test_ranks_are_where_they_were_asked_for(
    lab: Lab, ways: dict[str, Folder | str], way: str
) -> None:
    folder = ways[way]
    if isinstance(folder, str):
        pytest.skip(folder)
    assert "1 cases: 1 finished" in lab.study("status", str(folder.path)), logs(folder)
    with h5py.File(folder.study_file) as file:
        assert file.attrs["status"] == "complete"
        assert file["samples/ranks"][:].tolist() == [4]
        hosts = file["environment/hosts"].asstr()[0].split()
        library = file["environment/mpi_library"].asstr()[0]
    assert ("Open MPI" in library) == (way in ("mpirun", "srun-pmix"))
    if lab.apart:
        assert len(hosts) == 2 and set(hosts) < {"n1", "n2", "n3", "n4"}


OWN_GPU = """
kind = "command"
[sweep]
nodes = [1, 2]
ppn = [1, 2]
bind = "gpu"
[command]
argv = ["sh", "-c", "echo gpu $CUDA_VISIBLE_DEVICES"]
[measure]
warmup = 0
block = 1
min_repeats = 1
max_repeats = 1
[run]
bundle = "nested"
"""


def test_each_rank_has_a_gpu_of_its_own(lab: Lab, openmpi: Mpi | str) -> None:
    """All shapes in one job of 2 x 2 ranks: by srun's options, and by the line of sh."""
    if isinstance(openmpi, str) or not lab.apart:
        pytest.skip("needs Open MPI, and nodes with GPUs, which only root can make")
    driver = two_gpus_in(lab.directory)
    study = lab.file("own_gpu.toml", OWN_GPU)
    setup = [f"export LD_LIBRARY_PATH={driver}"]
    ways = ("srun-pmi2", "mpirun")
    folders = [
        lab.submit(study, lab.site(openmpi, way, 2, setup), f"own-gpu-{way}") for way in ways
    ]
    for folder in folders:
        lab.finish(folder)
        assert "4 cases: 4 finished" in lab.study("status", str(folder.path)), logs(folder)
        file = load_study_file(folder.study_file)
        for point in file.points:
            where = file.environments[int(point.outcomes["environment"])]
            first, second = "0000:a0:00.0", "0000:a1:00.0"
            seen = f"{first} | {second}" if point.factors["ppn"] == 2 else first
            assert where["placement"].endswith(f"GPUs {seen}"), where
            assert len(where["hosts"].split()) == point.factors["nodes"]


def test_the_wrong_launcher_is_an_error_with_its_cure(
    lab: Lab, ways: dict[str, Folder | str], openmpi: Mpi | str
) -> None:
    if isinstance(openmpi, str):
        pytest.skip(openmpi)
    folder = ways["wrong"]
    assert isinstance(folder, Folder)
    assert not list(folder.cases.glob("*.h5"))
    said = logs(folder)
    assert "every process is alone" in said and "srun --mpi=pmix" in said
    shown = lab.study("status", str(folder.path))
    assert "1 cases: 1 failed" in shown and "FAILED, exit code" in shown
    assert "    | cpdhpc: error: batch: MPI has 1 process" in shown


def test_the_script_of_all_reduces(lab: Lab, openmpi: Mpi | str) -> None:
    if isinstance(openmpi, str):
        pytest.skip(openmpi)
    study = str(ROOT / "inputs" / "study_allreduce_strong.toml")
    small = ["--set", "sweep.size_bytes=4KiB", "--set", "measure.max_repeats=10"]
    script = str(ROOT / "slurm" / "allreduce_scaling.sbatch")
    options = ["--nodes=2", "--ntasks-per-node=2", "--output=all.log"]
    # Twice with other settings, at the same time: each has a folder of its own.
    other = [*small, "--set", "measure.relative=0.5"]
    jobs = [
        int(lab.call("sbatch", "--parsable", *options, script, study, *given))
        for given in (small, other)
    ]
    states = lab.wait(jobs)
    said = (lab.directory / "all.log").read_text()
    assert {state.exit_code for state in states.values()} == {0}, said
    paths = sorted((lab.directory / "results").glob("allreduce_scaling-2x2-*"))
    assert len(paths) == 2 and all((path / "report.html").exists() for path in paths), said
    folder = Folder(paths[0])
    with h5py.File(folder.study_file) as file:
        assert file.attrs["status"] == "complete"
        shapes = zip(
            *(file[f"samples/{name}"][:].tolist() for name in ("nodes", "ppn")), strict=True
        )
        assert sorted(set(shapes)) == [(1, 1), (1, 2), (2, 2)]
        assert len(set(file["samples/job_id"].asstr()[:])) == 1  # all in one job


def test_three_ranks_and_one_are_an_error(lab: Lab, openmpi: Mpi | str) -> None:
    if isinstance(openmpi, str):
        pytest.skip(openmpi)
    folder = Path(
        lab.study("freeze", str(lab.file("one.toml", ONE)), "--set", "name=uneven").strip()
    )
    line = f"mpirun --bind-to none -n 4 {openmpi.python} -m cpdhpc batch {folder} 0"
    script = lab.file("uneven.sbatch", f"#!/bin/bash\n{line}\n")
    options = ["--nodes=2", "--ntasks=4", "--output=uneven.log"]  # four processors a node
    job = int(lab.call("sbatch", "--parsable", *options, str(script)))
    assert {state.exit_code for state in lab.wait([job]).values()} == {2}
    said = (lab.directory / "uneven.log").read_text()
    assert "MPI has 3 + 1 processes, by nodes" in said and "--ntasks-per-node=2" in said


def test_an_array_with_a_failing_case(lab: Lab, openmpi: Mpi | str) -> None:
    if isinstance(openmpi, str):
        pytest.skip(openmpi)
    study = lab.file("twelve.toml", TWELVE)
    folder = Folder(Path(lab.study("freeze", str(study)).strip()))
    folder = Folder(lab.directory / folder.path)
    bad = folder.cases / f"{case_of(lab, study)}.h5"
    bad.mkdir()  # its file cannot be written
    lab.submit(study, lab.site(openmpi, "mpirun"), "twelve")
    assert [len(job.batches) for job in lab.finish(folder)] == [6, 6, 0]
    with h5py.File(folder.study_file) as file:
        assert file.attrs["status"] == "partial"
        assert len(file["samples/point"]) == 11
    assert lab.call("sacct", status=1) == ""  # there is no accounting
    shown = lab.study("status", str(folder.path))
    assert "12 cases: 11 finished, 1 failed" in shown
    assert "FAILED, exit code" in shown and "is a directory" in shown

    bad.rmdir()
    before = {path: path.stat().st_mtime_ns for path in folder.cases.glob("*.h5")}
    assert len(before) == 11
    lab.study("resume", str(folder.path))
    assert [len(job.batches) for job in lab.finish(folder)[3:]] == [1, 0]
    assert before == {path: path.stat().st_mtime_ns for path in before}
    with h5py.File(folder.study_file) as file:
        assert file.attrs["status"] == "complete"
        assert len(file["samples/point"]) == 12
    assert "12 cases: 12 finished" in lab.study("status", str(folder.path))
    assert "all cases are finished" in lab.study("submit", str(folder.path))


def case_of(lab: Lab, study: Path) -> str:
    """The id of one case of a study, by plan."""
    shown = lab.study("plan", str(study))
    return next(word for word in shown.split() if word.startswith("2x1-64KiB-direct-e4m3"))


def bits_of(path: Path) -> dict[str, bytes]:
    """The bits of all numbers of a checkpoint, but of times and of what left a rank.

    How much leaves a rank depends on where the others are: shared memory takes a few words more.
    """
    found: dict[str, bytes] = {}

    def visit(name: str, item: object) -> None:
        if not isinstance(item, h5py.Dataset) or item.dtype.kind not in "iufb":
            return
        if "time" not in name and name != "steps/wire_bytes":
            found[name] = item[()].tobytes()

    with h5py.File(path) as file:
        file.visititems(visit)
    assert any(name.startswith("model") for name in found)
    return found


def test_training_goes_on_after_usr1_with_the_same_bits(lab: Lab, openmpi: Mpi | str) -> None:
    if isinstance(openmpi, str):
        pytest.skip(openmpi)
    job_file = lab.file("train.toml", TRAIN)
    # By the script: two nodes, the signal to the batch shell, which forwards it to mpirun.
    shape = ["--nodes=2", "--ntasks-per-node=1"]
    script = str(ROOT / "slurm" / "train.sbatch")
    alone = int(lab.call("sbatch", "--parsable", *shape, script, str(job_file)))
    log = lab.directory / f"train-{alone}.log"
    lab.until(log, "epoch 2 of")
    lab.interrupt(log, "--batch", str(alone))

    # By the study: two ranks of a node as a step of srun, which gets the signal itself.
    way, to = ("srun-pmix", []) if lab.apart else ("mpirun", ["--batch"])
    study = lab.file("training.toml", STUDY_OF_TRAIN)
    folder = lab.submit(study, lab.site(openmpi, way), "training")
    [in_study, _] = recorded(folder)
    lab.until(in_study.log(folder, 0), "epoch 2 of")
    lab.interrupt(in_study.log(folder, 0), *to, in_study.shown(0))

    # While they wait in the queue, the same without a signal.
    ranks = [str(ROOT / "slurm" / "mpirun-local"), "2"]
    lab.call(*ranks, "python", "-m", "cpdhpc", "train", "train.toml", "--out", "undisturbed")
    lab.wait([alone])
    lab.finish(folder)
    for job in (alone, in_study.number):
        assert "Restarts=1 " in lab.call("scontrol", "--oneliner", "show", "job", str(job))
    assert "1 cases: 1 finished" in lab.study("status", str(folder.path)), logs(folder)

    undisturbed = bits_of(lab.directory / "undisturbed" / "train-s0.checkpoint.h5")
    assert bits_of(lab.directory / "results" / "train" / "train-s0.checkpoint.h5") == undisturbed
    assert not list((folder.path / "work").iterdir()), "no checkpoint of what is finished"
    with (
        h5py.File(folder.study_file) as study_file,
        h5py.File(lab.directory / "undisturbed" / "train-s0.h5") as record,
    ):
        loss, same = study_file["training/test_loss"][0], record["epochs/test_loss"][:]
        assert loss.tobytes() == same.tobytes()
        # Two processes, each of them cold for the two steps of [measure] warmup.
        assert study_file["samples/is_warmup"][0].sum() == 4


def test_a_job_that_must_not_requeue_stays_stopped(lab: Lab, openmpi: Mpi | str) -> None:
    """As docs/reference/checkpoints.md says under "Signals"."""
    if isinstance(openmpi, str):
        pytest.skip(openmpi)
    script = [str(ROOT / "slurm" / "train.sbatch"), str(lab.file("stopped.toml", TRAIN))]
    job = int(lab.call("sbatch", "--parsable", "--ntasks-per-node=1", *script))
    log = lab.directory / f"train-{job}.log"
    lab.until(log, "epoch 2 of")
    lab.call("scontrol", "update", f"JobId={job}", "Requeue=0")
    lab.interrupt(log, "--batch", str(job))
    lab.wait([job])
    ended = lab.call("scontrol", "--oneliner", "show", "job", str(job))
    assert "JobState=FAILED" in ended and "Restarts=0 " in ended and "ExitCode=85:0" in ended
    assert "cannot be requeued from here: submit it again to go on" in log.read_text()
    assert (lab.directory / "results" / "stopped" / "stopped-s0.checkpoint.h5").exists()


def test_cancel_ends_the_jobs_of_a_study(lab: Lab, openmpi: Mpi | str) -> None:
    if isinstance(openmpi, str):
        pytest.skip(openmpi)
    other = int(lab.call("sbatch", "--parsable", "--wrap", "sleep 60", "--output=/dev/null"))
    study = lab.file("long.toml", LONG)
    folder = lab.submit(study, lab.site(openmpi, "mpirun"), "long")
    first, second, last = recorded(folder)
    lab.until_running(first.number)  # the other waits, as the study has throttle = 1
    assert "1 pending" in lab.study("status", str(folder.path), "--summary").splitlines()[-1]
    said = lab.study("cancel", str(folder.path)).splitlines()
    assert said == [f"job {job.number}, {job.name}: cancelled" for job in (first, second, last)]
    lab.wait([job.number for job in (first, second, last)])
    assert "no job of it waits or runs" in lab.study("cancel", str(folder.path))
    assert "JobState=CANCELLED" not in lab.call("scontrol", "show", "job", str(other))
    lab.call("scancel", str(other))
