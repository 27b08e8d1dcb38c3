"""Site files that write themselves, from stand-ins that answer as Slurm's manuals say."""

from pathlib import Path
from typing import Any

import pytest
from every import every
from training import ROOT

from cpdhpc.config import UserError
from cpdhpc.lab.cli import main
from cpdhpc.lab.schedulers.slurm_site import gpus_of, minutes
from cpdhpc.lab.study.discover import discover
from cpdhpc.lab.study.site import Site, load_site

SINFO = "cpu|40|2:64:1|257000|(null)\nfat|2|4:16:2|3000000+|(null)\n"
SINFO += "gpu|8|2:32:1|512000|gpu:a100:4(S:0-1),nvme:1\ngpu|2|2:16:1|256000|gpu:v100:2\n"
SCONTROL = """
if [ "$2" = config ]; then
    echo "ClusterName             = big"
    echo "MaxArraySize            = 4001"
    echo "JobRequeue              = 0"
    exit 0
fi
echo "PartitionName=cpu Default=YES MaxNodes=16 MaxTime=2-00:00:00 State=UP TotalNodes=40"
echo "PartitionName=fat Default=NO MaxNodes=UNLIMITED MaxTime=UNLIMITED State=DOWN TotalNodes=2"
echo "PartitionName=gpu Default=NO MaxNodes=UNLIMITED MaxTime=08:30:00 State=UP TotalNodes=10"
"""
PROGRAMS = {
    "sinfo": f"cat <<'END'\n{SINFO}END",
    "scontrol": SCONTROL,
    "srun": 'echo "MPI plugin types are..." >&2; echo "	pmix" >&2; echo "	pmi2" >&2',
    "sacctmgr": "echo mine; echo mine",
}


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with the stand-ins, which is all of PATH but for the shell's own."""
    (tmp_path / "bin").mkdir()
    for name, text in PROGRAMS.items():
        write(tmp_path, name, text)
    for name in ("cat", "sh", "bash"):
        (tmp_path / "bin" / name).symlink_to(f"/bin/{name}")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("LOADEDMODULES", "gcc/13:openmpi/5.0")
    return tmp_path


def write(directory: Path, name: str, text: str) -> None:
    """A program in the place of one of Slurm's."""
    path = directory / "bin" / name
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


CPU: dict[str, Any] = {
    **{"partition": "cpu", "account": "mine", "nodes": 16, "cores_per_node": 128},
    **{"gpus_per_node": 0, "max_time_min": 2880, "max_array": 4001, "max_requeues": 0},
    **{"launcher": "srun-pmix", "modules": ("gcc/13", "openmpi/5.0")},
}
GPU = CPU | {"partition": "gpu", "nodes": 10, "cores_per_node": 64, "gpus_per_node": 4}
GPU |= {"max_time_min": 510}
FAT = CPU | {"partition": "fat", "nodes": 2, "cores_per_node": 64, "max_time_min": None}


@every(
    ("partition", "wanted", "notes"),
    [
        (None, CPU, ["#   gpu: 8 x 64 cores, 4 GPUs, 512000 MiB; 2 x 32 cores, 2 GPUs"]),
        ("gpu", GPU, ["# its nodes differ: these are the 8 of 10 of one sort"]),
        ("fat", FAT, ["# 2 threads a core", "# max_time_min: the partition has no limit of time"]),
    ],
)
def test_a_cluster_is_written_down(
    partition: str | None, wanted: dict[str, Any], notes: list[str], cluster: Path
) -> None:
    text = discover(partition)
    for note in notes:
        assert note in text, text
    assert ("no limit of time" in text) == (wanted["max_time_min"] is None)
    path = cluster / "mine.toml"
    path.write_text(text)
    assert load_site(path) == Site(name="mine", **wanted)


def test_what_is_not_known_is_a_comment(cluster: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("srun", "sacctmgr"):
        write(cluster, name, "echo 'slurm_load: Unable to contact' >&2; exit 1")
    write(cluster, "scontrol", f'[ "$2" != config ] || exit 1\n{SCONTROL}')
    monkeypatch.delenv("LOADEDMODULES")
    text = discover()
    for key in ("account", "qos", "max_array", "launcher", "modules"):
        assert f"\n# {key}: " in text and f"\n{key} = " not in text, key
    path = cluster / "mine.toml"
    path.write_text(text)
    assert load_site(path).nodes == 16


def test_the_mpi_on_the_path_says_the_launcher(cluster: Path) -> None:
    write(cluster, "mpiexec", 'echo "HYDRA build details:"')
    assert '\nlauncher = "mpiexec"\n' in discover()
    write(cluster, "mpirun", 'echo "mpirun (Open MPI) 5.0.8"')
    assert '\nlauncher = "mpirun"\n' in discover()


def test_a_machine_without_slurm_is_written_down(
    cluster: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (cluster / "bin" / "sinfo").unlink()
    write(cluster, "nvidia-smi", "echo 'GPU 0: X (UUID: a)'; echo 'GPU 1: X (UUID: b)'")
    path = cluster / "mine.toml"
    assert main(["study", "site", "discover", "--out", str(path)]) == 0
    assert (
        f"{path}:\n# What this machine says; Slurm: sinfo is not on PATH" in capsys.readouterr().out
    )
    site = load_site(path)
    assert (site.nodes, site.gpus_per_node) == (1, 2) and site.cores_per_node >= 1
    assert main(["study", "site", "discover", "--out", str(path)]) == 2
    assert "exists: name another file" in capsys.readouterr().err
    study = ROOT / "inputs" / "study_smoke.toml"
    assert main(["study", "plan", str(study), "--site", str(path)]) == 0
    with pytest.raises(UserError, match="--partition x: sinfo is not on PATH"):
        discover("x")


def test_an_unknown_partition_is_an_error(cluster: Path) -> None:
    with pytest.raises(UserError, match=r"--partition gpus: did you mean gpu\?"):
        discover("gpus")


def test_words_of_slurm_are_understood() -> None:
    for gres, gpus in (
        ("(null)", 0),
        ("gpu:4", 4),
        ("gpu", 1),
        ("gpu:a100:4(S:0-1)", 4),
        ("gpu:a:2(S:0,1),gpu:b:1,mps:100", 3),
    ):
        assert gpus_of(gres) == gpus, gres
    for text, limit in (
        ("UNLIMITED", None),
        ("infinite", None),
        ("01:30:00", 90),
        ("1-00:00:30", 1440),
    ):
        assert minutes(text) == limit, text
