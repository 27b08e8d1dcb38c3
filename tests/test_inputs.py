"""Every file in inputs/ runs, made small."""

from pathlib import Path

import pytest
from training import ROOT, write_idx

from cpdhpc.config import read_toml
from cpdhpc.lab.cli import main
from cpdhpc.lab.study.cases import expand, load_study
from cpdhpc.lab.study.collect import collect
from cpdhpc.lab.study.folder import Folder
from cpdhpc.lab.train.job import load

INPUTS = [
    path
    for name in ("claim_*", "train_*", "mnist_waiting")
    for path in sorted((ROOT / "inputs").glob(f"{name}.toml"))
    if "kind" not in read_toml(path)
]
NARROW = {  # rows that differ in other things than sizes of layers and numbers of samples
    "claim_accumulators": ["model.hidden=[8]"],
    "claim_decentlam": ["data.test_share=0.9"],
    "claim_layer_parallel": ["model.blocks=4"],
    "claim_precision": ["model.hidden=[8]"],
    "claim_tracin": ["data.of.test_share=0.9", "train.batch=90"],
    "train_methods": ["model.hidden=[8, 8]"],
    "train_text": ["data.stride=100", "model.width=4", "model.hidden=8"],
}
SMALL = (
    *("train.epochs=1", "train.seeds=[0]", "train.threads=1", "train.batch=700"),
    "schedule.warmup_epochs=0",
)
THEIR_OWN = {  # what the rows of a file say themselves
    "claim_autowu": "schedule.warmup_epochs=0",
    "claim_decentlam": "train.batch=700",
    "claim_tracin": "train.seeds=[0]",
}


@pytest.mark.parametrize("path", INPUTS, ids=lambda path: path.stem)
def test_inputs_run(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_idx(tmp_path)
    settings = [each for each in SMALL if each != THEIR_OWN.get(path.stem)]
    if path.stem == "train_digits_spatial":  # one process cannot share images
        rows = path.read_text().replace("[2, 1]", "[1, 1]").replace("[2, 2]", "[1, 1]")
        path = tmp_path / path.name
        path.write_text(rows)
    settings += NARROW.get(path.stem, [])
    if "mnist" in path.stem:
        settings.append(f"data.dir={tmp_path}")
    arguments = [word for setting in settings for word in ("--set", setting)]
    assert main(["train", str(path), "--out", str(tmp_path / "out"), *arguments]) == 0
    shown = capsys.readouterr().out
    rows = {job.name for job in load(path)}
    assert {line.split()[0] for line in shown.splitlines() if line.split()} >= rows


STUDIES = [
    path
    for name in ("bits_*", "claim_*", "study_*")
    for path in sorted((ROOT / "inputs").glob(f"{name}.toml"))
    if "kind" in read_toml(path)
]
QUICK = (
    *("sweep.ranks=[1]", "measure.warmup=0", "measure.block=1"),
    *("measure.min_repeats=1", "measure.max_repeats=1"),
)
ONE_EPOCH = ("sweep.train.epochs=1", "sweep.schedule.warmup_epochs=0")
SHORT = {  # further settings, by study
    "bits_against_batch": (
        *("job.schedule.warmup_epochs=0", "sweep.seed=[0]"),
        "zip=[{train={batch=[512],virtual_ranks=[16],epochs=[1]}}]",
        *('sweep.gradient.wire=["", "e3m0"]', 'sweep.gradient.accumulate=["", "grow"]'),
    ),
    "claim_legw": (
        *("job.train.epochs=2", "sweep.seed=[0]", "sweep.train.batch=[256]"),
        "sweep.train.learning_rate=[0.1]",
    ),
    "claim_optimizers": (
        *("job.train.epochs=2", "sweep.seed=[0]", "sweep.train.batch=[700]"),
        "constraints=['train.learning_rate == 0.3']",
    ),
    "study_batch": (
        *("sweep.ppn=[1]", "job.train.epochs=2", "sweep.seed=[0]", "sweep.train.batch=[32, 600]"),
        "constraints=['train.batch == 600']",
    ),
    "claim_critical_batch": (
        *("sweep.seed=[0]", "zip=[{train={batch=[144, 432],epochs=[1, 2]}}]"),
        "sweep.train.learning_rate=[0.1, 0.2]",
    ),
    "study_autoencoder": ("sweep.image=40",),
    "study_command": ("sweep.bytes=[1024, 4096, 65536]",),
    "study_codec": ('sweep.size_bytes=["4KiB", "16KiB", "64KiB"]',),
    "study_autoencoder_weak": ("sweep.image=[24,32,40]",),
    "study_train_strong": (*ONE_EPOCH, "sweep.train.batch=700"),
    "study_train_weak": (*ONE_EPOCH, "weak.train.batch=700"),
}


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_studies_run(path: Path, tmp_path: Path) -> None:
    """The cases of one rank, a repeat or an epoch each, as a job measures them."""
    study = load_study(path, [*QUICK, *SHORT.get(path.stem, ())])
    folder, cases = Folder(tmp_path / "x"), expand(study).cases
    folder.prepare(study)
    measured_by = "programs" if study.of_kind.starts_ranks else "batch"
    assert main([measured_by, str(folder.path), "0"]) == 0
    assert len(collect(study, folder).results) == len(cases) >= 3


def test_the_quickstart_compares_what_the_readme_promises() -> None:
    jobs = load(ROOT / "inputs" / "train_digits.toml")
    assert len(jobs) == 27
    assert {job.seed for job in jobs} == {0, 1, 2}
