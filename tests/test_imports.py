"""Models and data of a user: a module outside of the package, trained, resumed, swept, refused."""

import json
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from every import every
from training import assert_same_records, finish, model_bytes, prepared, stop

from cpdhpc.collectives.checks import NonFiniteGradient
from cpdhpc.compress import TopK
from cpdhpc.config import ConfigError, UserError, validate
from cpdhpc.lab.cli import main
from cpdhpc.lab.report.trainings import load_run, run_groups, table
from cpdhpc.lab.study.cases import expand, load_study
from cpdhpc.lab.study.collect import collect
from cpdhpc.lab.study.folder import Folder
from cpdhpc.lab.train.job import Job, load
from cpdhpc.lab.train.losses import Diverged
from cpdhpc.lab.train.samples import MapStyle
from cpdhpc.lab.train.training import Training
from cpdhpc.world.ranks import Loopback, Ranks

THEIRS = '''
import random

import numpy as np
import torch


class Net(torch.nn.Module):
    """Colour images; batch norm and dropout; logits of 3 classes."""

    def __init__(self, width=4, dropout=0.25):
        super().__init__()
        self.body = torch.nn.Sequential(
            torch.nn.Conv2d(3, width, 3, padding=1), torch.nn.BatchNorm2d(width), torch.nn.ReLU(),
            torch.nn.Flatten(), torch.nn.Dropout(dropout), torch.nn.Linear(width * 36, 3))

    def forward(self, x):
        return self.body(x)


class Stripes(torch.utils.data.Dataset):
    """Noise with a row of ones at the class; shifted by chance, by three generators."""

    def __init__(self, n, first, augment):
        self.n, self.first, self.augment = n, first, augment

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        if i < 0 or i >= self.n:
            raise IndexError(i)
        x = torch.from_numpy(np.random.default_rng(self.first + i).random((3, 6, 6), np.float32))
        label = (self.first + i) % 3
        x[label] += 1
        if self.augment:
            x = torch.roll(x, int(torch.randint(6, ())), 2) + 0.1 * torch.rand(())
            x = x + 0.01 * random.random() + 0.01 * np.random.rand()
        return x, label


def focal(outputs, targets, power=0.0, reduction="mean"):
    """Lin et al.: samples that are right already count less."""
    each = torch.nn.functional.cross_entropy(outputs, targets, reduction="none")
    each = (1 - torch.exp(-each)) ** power * each
    return each.mean() if reduction == "mean" else each


def among(outputs, targets, k):
    return (outputs.topk(k).indices == targets[:, None]).any(1)


def data(n=40, augment=True):
    return Stripes(n, 0, augment), Stripes(20, 1000, False)


def no_length():
    return iter(range(3)), Stripes(20, 0, False)


def other_shapes():
    return [(torch.zeros(3), 0)], [(torch.zeros(4), 0)]


def flat():
    return [(torch.zeros(3), 0)] * 2, [(torch.zeros(3), 0)]


def no_pairs():
    return [torch.zeros(3)], [torch.zeros(3)]


def fails(n=40):
    raise RuntimeError("no such\\nthing")


class Broken(Stripes):
    def __getitem__(self, i):
        if i == 7:
            raise OSError("image 7 is damaged")
        return super().__getitem__(i)


def broken():
    return Broken(40, 0, False), Stripes(20, 0, False)


class Classes(Stripes):
    def __init__(self, *given):
        super().__init__(*given[:-1])
        self.label = given[-1]

    def __getitem__(self, i):
        return super().__getitem__(i)[0], self.label


def minus():
    return Classes(40, 0, False, -1), Stripes(20, 0, False)


def between():
    return Classes(40, 0, False, 0.5), Stripes(20, 0, False)


class Unsure(Stripes):
    def __len__(self):
        raise RuntimeError("no length")


def unsure():
    return Unsure(40, 0, False), Stripes(20, 0, False)


def count(outputs, targets, k):
    return len(targets)


nothing = 3


from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from cpdhpc.collectives import sparse
from cpdhpc.compress.base import Aggregator, Mean
from cpdhpc.compress.topk import TopK


@dataclass(frozen=True)
class Pushed(Aggregator):
    """A mean, times something; with momentum where it is asked for."""

    times: Annotated[float, Field(gt=0, le=1e30)] = 1.0
    heavy: bool = False

    @property
    def has_momentum(self):
        return self.heavy

    def aggregate(self, gradients, bucket, context):
        with np.errstate(over="ignore"):
            total = sparse.sum(context.world, gradients) / np.float32(context.world.ranks)
            return Mean(total * np.float32(self.times) * np.float32(self.times))


def sparser(layers=()):
    return TopK(density=0.5, exclude=tuple(layers))
'''
JOB = """
[model]
import = "theirs_{name}:Net"
width = 3

[data]
import = "theirs_{name}:data"

[loss]
import = "theirs_{name}:focal"
power = 0.5

[metric]
import = "theirs_{name}:among"
k = 2

[optimizer]
name = "lamb"

[train]
epochs = 2
batch = 12
learning_rate = 0.02
threads = 1
telemetry_every = 1
"""
ONCE = ("measure.warmup=0", "measure.max_repeats=1", "measure.min_repeats=1")


@pytest.fixture
def job_file(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A job file beside a module, whose name no other test has."""
    name = abs(hash(request.node.name))
    (tmp_path / f"theirs_{name}.py").write_text(THEIRS)
    path = tmp_path / "job.toml"
    path.write_text(JOB.format(name=name))
    return path


def module_of(job_file: Path) -> str:
    """The name of the module beside a job file."""
    return next(job_file.parent.glob("theirs_*.py")).stem


def theirs(job: Job, world: Ranks, directory: Path) -> Training:
    directory.mkdir(exist_ok=True)
    return prepared(job, world, directory, job.data.load())


def resumed(job: Job, directory: Path) -> Training:
    """A run that was stopped after 3 steps and went on to the end."""
    stop(theirs(job, Loopback(2), directory), 3)
    training = theirs(job, Loopback(2), directory)
    training.resume()
    return finish(training)


def test_a_third_partys_model_trains_stops_and_goes_on(job_file: Path, tmp_path: Path) -> None:
    """With dropout, batch norm and augmentation by chance: the same bits at each end."""
    (job,) = load(job_file)
    whole = finish(theirs(job, Loopback(2), tmp_path / "whole"))
    score = [*whole.record.rows["epochs"][-1].values()][1]
    assert score > 0.8  # two thirds are chance
    (row,) = table(run_groups([load_run(whole.files.record)])).rows
    assert row[2] == f"{score:.4g}"
    training = resumed(job, tmp_path / "parts")
    assert model_bytes(training.files.checkpoint) == model_bytes(whole.files.checkpoint)
    assert_same_records(training.files.record, whole.files.record)


def test_what_is_left_to_chance_depends_on_seed_and_sample_alone(
    job_file: Path, tmp_path: Path
) -> None:
    (job,) = load(job_file)
    source = job.data.load()
    assert isinstance(source.train, MapStyle)
    before = torch.get_rng_state()
    x, y = source.train.take(np.array([5, 3]), 9)
    assert torch.equal(torch.get_rng_state(), before)
    alone, _ = source.train.take(np.array([3]), 9)
    other, _ = source.train.take(np.array([3]), 10)
    assert torch.equal(x[1], alone[0]) and not torch.equal(alone, other)
    assert y.tolist() == [2, 0] and source.image_shape == (3, 6, 6)
    none, _ = source.train.take(np.array([], np.int64), 9)
    assert none.shape == (0, 3, 6, 6)


def sweep_of(job_file: Path, factors: str) -> Path:
    """The file of a study of a job."""
    study = job_file.parent / "study.toml"
    head = 'kind = "train"\n[train]\njob = "job.toml"\n[sweep]\nranks = [1]\n'
    study.write_text(head + factors)
    return study


def test_a_study_sweeps_their_arguments(
    job_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = sweep_of(job_file, '"model.width" = [2, 5]\n"data.n" = [30]\n"loss.power" = [1.0]\n')
    found = load_study(study)
    assert [case.factors["model.width"] for case in expand(found).cases] == [2, 5]
    powers = load_study(study, ["sweep.loss.power=[0.5, 1]"])  # the first one's type
    assert [case.factors["loss.power"] for case in expand(powers).cases] == [0.5, 1.0] * 2
    for name in ("model", "data", "loss", "metric"):
        assert found.job[name]["import_from"] == str(tmp_path.resolve())
    assert json.dumps(found.job)  # it is kept with the study
    found, folder = load_study(study, ONCE), Folder(tmp_path / "folder")
    folder.prepare(found)
    assert main(["batch", str(folder.path), "0"]) == 0
    assert f"{expand(found).cases[1].id}-s0: complete: among " in capsys.readouterr().out
    results = collect(found, folder).results
    for outcomes in (result.outcomes for _, result in results):
        assert outcomes["score"] > 0.5 and "accuracy" not in outcomes  # of two among three
        assert 0 < outcomes["data_share"] < 100
    assert len(results) == 2
    assert main(["report", str(folder.path / "study.h5")]) == 0
    assert "among" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["model.import=x"], "model.import='x': must be \"module:function\""),
        (["model.name=mlp", "model.import=a:b"], "model: has name and import: give one"),
        (["model.import=nowhere_at_all:Net"], "ModuleNotFoundError: No module named 'nowhere_at"),
        (["model.import={m}:nothing"], 'model.import="{m}:nothing": module {m} has no function'),
        (["model.depth=3"], "TypeError: Net.__init__() got an unexpected keyword argument 'depth'"),
        (["model.import={m}:data", "model.width=3"], "TypeError: data() got an unexpected"),
        (["data.import={m}:fails"], 'data.import="{m}:fails": RuntimeError: no such thing'),
        (["data.import={m}:Net"], "returned Net: must be (train, test)"),
        (["data.import={m}:no_length"], "train dataset range_iterator has no __len__"),
        (["data.import={m}:other_shapes"], "have shape (3,) for training, (4,) for the test"),
        (["data.import={m}:no_pairs"], "items do not make a pair of tensors"),
        (["data.import={m}:minus"], 'loss.import="{m}:focal": IndexError: Target -1 is out of'),
        (["data.import={m}:between"], 'loss.import="{m}:focal": RuntimeError: '),
        (["loss.power=x"], 'loss.import="{m}:focal": TypeError: unsupported operand'),
        (["loss.strength=1"], "TypeError: got an unexpected keyword argument 'strength'"),
        (["metric.import={m}:count"], "metric count: outputs float32[2, 3], targets int64[2]: "),
        (["data.import={m}:flat"], "job-s0: model: inputs float32[2, 3]: RuntimeError: "),
        (["loss.import={m}:data"], 'loss.import="{m}:data": TypeError'),
        (["metric.k=7"], 'metric.import="{m}:among": RuntimeError: selected index k out of range'),
        (["data.import={m}:unsure"], "train dataset Unsure has no length: RuntimeError: no len"),
    ],
)
def test_what_is_wrong_is_one_line(
    job_file: Path, tmp_path: Path, settings: list[str], message: str
) -> None:
    module = module_of(job_file)
    with pytest.raises(ConfigError) as caught:
        (job,) = load(job_file, [each.format(m=module) for each in settings])
        theirs(job, Loopback(1), tmp_path / "x")
    assert message.format(m=module) in str(caught.value)
    assert "\n" not in str(caught.value)


def with_gradient(job_file: Path, table: str, settings: Sequence[str] = ()) -> Job:
    """The job of a file with a compressor from the same module."""
    module = module_of(job_file)
    job_file.write_text(f'[gradient]\nimport = "{module}:{table}\n' + job_file.read_text())
    (job,) = load(job_file, settings)
    return job


def test_a_compressor_is_imported_trains_stops_and_goes_on(job_file: Path, tmp_path: Path) -> None:
    """A function that returns one of ours, whose memory is in the checkpoint."""
    job = with_gradient(job_file, 'sparser"\nlayers = ["body.0.weight"]')
    assert validate(Job, job.plain(), "again") == job
    whole = theirs(job, Loopback(2), tmp_path / "whole")
    assert isinstance(whole.reducer.aggregator, TopK)
    assert {"sent_share"} <= whole.reducer.aggregator.columns.keys()
    finish(whole)
    training = resumed(job, tmp_path / "parts")
    assert model_bytes(training.files.checkpoint) == model_bytes(whole.files.checkpoint)
    assert any(training.reducer.state)
    moved = validate(Job, job.plain() | {"gradient": job.plain()["gradient"] | {"layers": []}}, "x")
    with pytest.raises(UserError, match=r"gradient\.layers"):
        theirs(moved, Loopback(2), tmp_path / "parts").resume()


def test_a_study_sweeps_the_options_of_a_compressor(job_file: Path, tmp_path: Path) -> None:
    with_gradient(job_file, 'Pushed"')
    study = sweep_of(job_file, '"gradient.times" = [0.5, 1.0]\n')
    found, folder = load_study(study, ONCE), Folder(tmp_path / "folder")
    assert [case.factors["gradient.times"] for case in expand(found).cases] == [0.5, 1.0]
    folder.prepare(found)
    assert main(["batch", str(folder.path), "0"]) == 0
    results = collect(found, folder).results
    assert len(results) == 2 and all(result.outcomes["score"] > 0.5 for _, result in results)
    assert main(["report", str(folder.path / "study.h5")]) == 0


PLAIN = ["optimizer.name=sgd", "optimizer.momentum=0"]


@every(
    ("table", "settings", "message"),
    [
        ('Pushed"', ["gradient.times=-1"], '{m}:Pushed": times=-1: should be greater than 0'),
        ('Pushed"', ["gradient.tims=1"], '{m}:Pushed": unknown key tims: did you mean times'),
        ('Pushed"\naggregator = "none"', [], "gradient: has aggregator and import: give one"),
        ('Net"', [], "returned Net: must be a compress.Aggregator"),
        ('nothing"', [], "has no function nothing"),
        ('Pushd"', [], "has no function Pushd: did you mean Pushed?"),
        ('fails"', [], '{m}:fails": RuntimeError: no such thing'),
        ('sparser"\nlayers = ["x"]', [], "gradient.exclude: no layer is called 'x'"),
        (
            'Pushed"\nheavy = true',
            ["optimizer.name=sgd", "optimizer.momentum=0.5"],
            "and so have the means of this gradient.aggregator: write momentum = 0.0 below",
        ),
        (
            'Pushed"\nheavy = true',
            ["update.name=localsgd", *PLAIN],
            "has_momentum=True: must be False",
        ),
        ('Pushed"', ["update.name=dsgd", "optimizer.name=sgd"], "{m}:Pushed': must be 'none' with"),
        ('Pushed"', ["stages.count=2"], "stages.count=2: does not allow this gradient.aggre"),
    ],
)
def test_what_is_wrong_with_a_compressor_is_one_line(
    table: str, settings: list[str], message: str, tmp_path: Path
) -> None:
    name = abs(hash((table, *settings)))
    (tmp_path / f"theirs_{name}.py").write_text(THEIRS)
    job_file = tmp_path / "job.toml"
    job_file.write_text(JOB.format(name=name))
    with pytest.raises(ConfigError) as caught:
        theirs(with_gradient(job_file, table, settings), Loopback(2), tmp_path / "x")
    assert message.format(m=f"theirs_{name}") in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("update", "scaling"),
    [
        ("allreduce", "static"),
        ("allreduce", "dynamic"),
        ("localsgd", "static"),
        ("diloco", "static"),
    ],
)
def test_a_compressors_infinity_never_gets_into_a_model(
    job_file: Path, tmp_path: Path, update: str, scaling: str
) -> None:
    """In all rules that take the mean: times 1e60 nothing that is not 0 is finite."""
    settings = [f"update.name={update}", f"train.loss_scaling={scaling}", "gradient.times=1e30"]
    settings += ["update.period=2"] if update != "allreduce" else []
    job = with_gradient(job_file, 'Pushed"', settings)
    training = theirs(job, Loopback(2), tmp_path / "x")
    skips = scaling == "dynamic"  # each step, of which there are too few to give up
    with nullcontext() if skips else pytest.raises((NonFiniteGradient, Diverged)):
        finish(training)
    assert all(torch.isfinite(p).all() for p in training.model.parameters())


def test_built_in_models_need_to_know_the_classes(job_file: Path, tmp_path: Path) -> None:
    job_file.write_text(job_file.read_text().replace("import", 'name = "mlp" #', 1))
    job_file.write_text(job_file.read_text().replace("width = 3\n", ""))
    (job,) = load(job_file)
    with pytest.raises(ConfigError, match="classes are unknown: the training dataset needs"):
        theirs(job, Loopback(1), tmp_path / "x")


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_damaged_item_ends_the_run_with_its_name(
    job_file: Path, tmp_path: Path, ranks: int
) -> None:
    (job,) = load(job_file, [f"data.import={module_of(job_file)}:broken"])
    with pytest.raises(ConfigError, match="item 7: OSError: image 7 is damaged"):
        finish(theirs(job, Loopback(ranks), tmp_path / "x"))
