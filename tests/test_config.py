"""Job files: what is refused, in one line that says what is allowed, and what comes out."""

import re
import tomllib
from dataclasses import asdict, make_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from every import every

from cpdhpc import store
from cpdhpc.collectives.method import DEFAULT
from cpdhpc.compress import LowBit
from cpdhpc.config import ConfigError, difference, dump_toml, flatten, merge, read_toml, validate
from cpdhpc.errors import ArgumentError
from cpdhpc.lab.kinds.train import TRAIN
from cpdhpc.lab.settings import override
from cpdhpc.lab.study.cases import load_study
from cpdhpc.lab.train.data import Idx
from cpdhpc.lab.train.job import Job, load
from cpdhpc.lab.train.models import LeNet, Mlp
from cpdhpc.lab.train.optimizers import OPTIMIZERS, AdamW
from cpdhpc.options import made
from cpdhpc.torch.precision import Policy

BASE = """
[model]
name = "mlp"
hidden = [16]
[train]
epochs = 3
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "job.toml"
    path.write_text(text)
    return path


def test_a_file_of_hdf5_is_named_as_such(tmp_path: Path) -> None:
    path = tmp_path / "study.h5"
    store.write(path, {}, {})
    with pytest.raises(ConfigError, match=r"study\.h5: is an HDF5 file, not TOML$"):
        read_toml(path)


def test_a_mark_of_byte_order_is_no_error(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_bytes(b"\xef\xbb\xbfx = 3\n")  # as editors of Windows write it
    assert read_toml(path) == {"x": 3}


LOWBIT, NONE = (f"[gradient]\naggregator='{name}'\n" for name in ("lowbit", "none"))
IN_ROW = "gradient={aggregator='none', algorithm='auto', machine='x'}"


@every(
    ("text", "says"),
    [
        ("[train]\nepoch = 3", "unknown key train.epoch: did you mean epochs?"),
        ("[trian]\nepochs = 3", "unknown key trian: did you mean train?"),
        ("[train]\nxyz = 3", "unknown key train.xyz: known are autocast, batch, bucket_mib"),
        ("[train]\nepochs = '3'", "train.epochs='3': should be a valid integer"),
        ("'' = 3", 'unknown key "": known are '),
        ("[train]\n'' = 3", 'unknown key train."": known are '),
        (f"[train]\nepochs = {2**63}", f"train.epochs={2**63}: should be below 2**63"),
        ("[train]\nepochs = 0", "train.epochs=0: should be greater than or equal to 1"),
        ("[train]\nepochs = true", "train.epochs=true: should be a valid integer"),
        ("[train]\nlearning_rate = 'x'", "train.learning_rate='x': should be a valid number"),
        ("[train]\nlearning_rate = inf", "train.learning_rate=inf: should be a finite number"),
        ("[schedule]\nwarmup_epochs=inf", "schedule.warmup_epochs=inf: should be a finite number"),
        ("train = 3", "train=3: should be a table"),
        (
            "train = 3\n[[compare]]\nname='a'\ntrain={batch=4}",
            "job.toml: train=3: should be a table",
        ),
        ("[model]\nname='mlp'\nhidden = 64", "model.hidden=64: should be an array"),
        ("[schedule]\ndecay = 'step'", "schedule.decay='step': needs milestones"),
        ("[schedule]\ndecay = 'step'\nmilestones = [-1, 2]", "schedule.milestones.0=-1: should be"),
        ("schedule = {decay='step', milestones=[2, 1]}", "schedule.milestones=[2.0, 1.0]: must as"),
        ("[train]\nseed = 1\nseeds = [1]", "train: seed and seeds: give one of them"),
        ("[train]\nseeds = []", "train.seeds"),
        ("[train]\nepochs = 4\nkeep_every = 9", "keep_every=9: should be up to epochs=4"),
        ("[adversarial]\nlow = 1.0\nhigh = 0.0", "low=1.0: should be below high=0.0"),
        ("[train]\nseeds = [0, -1]", "train.seeds.1=-1: should be greater than or equal to 0"),
        ("[model]\nname = 'lenett'", "model.name='lenett': did you mean lenet or resnet?"),
        ("[model]\nhidden = [3]", "model.name: is missing"),
        ("[model]\nname='mlp'\nhiden = [3]", "unknown key model.hiden: did you mean hidden?"),
        ("[model]\nname='mlp'\nhidden = [3, 'a']", "model.hidden.1='a': should be a valid integer"),
        ("[data]\nname = 'moons'", "data.name='moons': known are "),
        ("[data]\nname = 'idx'", "data.dir: is missing"),
        ("[schedule]\ndecay = 'cosin'", "schedule.decay='cosin': did you mean cosine?"),
        ("[schedule]\nwarmup_epochs = 10", "schedule.warmup_epochs=10.0: should be below"),
        ("[optimizer]\nmomentum=0.0\nnesterov=true", "nesterov=true needs momentum above 0"),
        ("[gradient]\naggregator='lowbits'", "gradient.aggregator='lowbits': did you mean lowbit"),
        ("[gradient]\naggregator = 'none'\nwire='e4m3'", "unknown key gradient.wire: known are"),
        (f"{NONE}algorithm='rin'", "algorithm='rin': did you mean ring or biring?"),
        ("[gradient]\naggregator='lowbit'\nalgorithm='mpi'", "algorithm='mpi'"),
        ("[gradient]\naggregator='lowbit'\nrounding='upwards'", "gradient.rounding='upwards'"),
        (f"{LOWBIT}algorithm='auto'\nmachine='gone.toml'", "gone.toml: cannot be read: No such"),
        (f"{LOWBIT}machine='machine.toml'", "gradient.machine: only algorithm='auto' chooses"),
        (f"{NONE}algorithm='mpi'\nmachine='machine.toml'", "gradient.machine: only algorithm='au"),
        ("[gradient]\naggregator='none'\nalgorithm='auto'\nmachine=3", "gradient.machine=3: "),
        (f"{NONE}algorithm='auto'\nmachine.alpha_s=1.0", "gradient.machine.beta_s: is missing"),
        (f"[[compare]]\nname='a'\n{IN_ROW}", "compare row a: gradient.machine: "),
        ("[train]\nseed = -1", "job.toml: train.seed=-1: should be an integer, 0 or more"),
        ("[train]\nkeep_every = 99", "job.toml: train.keep_every=99: should be up to epochs=10"),
        ("[train]\nloss_scale = 3", "job.toml: train.loss_scale=3: should be a power of two"),
        ("data = 'digits'", "job.toml: data='digits': should be a table"),
        ("[model]\nname = []", "job.toml: model.name=[]: known are "),
        ("[loss]\nname = {}", "job.toml: loss.name={}: known are "),
        ("[stages]\ncount = 2\nwire = 'zz'", "job.toml: stages.wire='zz': known are eXmY"),
        ("[formats.a]\nvalues = []", "job.toml: formats.a: the form is [formats.a] values = ["),
        *(
            (text, "job.toml: formats.a: the form is [formats.a] values = [NUMBER, ...]")
            for text in ("[formats.a]\nvalues = [0, 1]\nbits = 1", "formats.a = 'b'")
        ),
        ("[formats.a]\nvalues = [1, 2, 3]", "job.toml: formats.a: has 3 values: must be 2**bits"),
        *(
            (f"[gradient]\naggregator = '{name}'\n{given}", f"job.toml: gradient.{said}")
            for name, given, said in (
                ("lowbit", "wire = 'zz'", "wire='zz': known are eXmY"),
                ("lowbit", "wire = 'e9m9'", "wire='e9m9': exp=9, man=9: exp is 1..8"),
                ("lowbit", "wire = 'raw'", "wire='raw': is the aggregator 'none'"),
                ("lowbit", "scaling = 'til'", "scaling='til': did you mean tile?"),
                ("lowbit", "algorithm = 'rin'", "algorithm='rin': did you mean ring or biring?"),
                ("lowbit", "random_bits = 99", "random_bits=99: e4m3 allows 0..28"),
                ("lowbit", "layers = {'a*' = 'zz'}", "layers.a*: wire='zz': known are eXmY"),
                ("flexpoint", "wire = 'e4m3'", "wire='e4m3': known are int2 .. int16"),
                ("topk", "wire = 'e9m9'", "wire='e9m9': exp=9"),
                ("topk", "density = 'a'", "density='a': should be a valid number"),
                ("scalecom", "rates = {a=1}\ncosts = {a=1}", "costs: 'a' has a rate in rates"),
            )
        ),
        ("name = 'a/b'", "name='a/b'"),
        ("[[compare]]\nname='a'\ntrain.epoch=3", "compare row a: unknown key train.epoch"),
        ("[[compare]]\nname='a'\n[[compare]]\nname='a'", "compare: 2 rows are called 'a'"),
        ("compare = 3", "compare: should be one or more"),
        ("x = = 3", "is not TOML"),
        ("x = " + "[" * 2000 + "]" * 2000, "in more than 100 nested tables or lists"),
        (f"[a{'.a' * 2000}]", "in more than 100 nested tables or lists"),
        ("[train]\nthreads = 5000", "train.threads=5000: should be less than or equal to 4096"),
        ("[model]\nname='a'\nname='b'", "Cannot overwrite a value (at end of document): name='b'"),
        ("model.name='a'\nmodel.name='b'\n", "(at line 2, column 15): model.name='b'"),
        ("[model]\nname='a'\n[model]\nname='b'", ": [model]"),
        ("[[compare]]\ntrain.epochs=3", "compare row 0: name: is missing"),
        ("[[compare]]\nname='a'\n[[compare]]", "compare row 1: name: is missing"),
        ("model.import='nets'", 'model.import=\'nets\': must be "module:function", or "package.'),
        ("", "model and data are missing: the file has no keys of a job"),
        ("name = 'a'\n[[compare]]\nname = 'b'", "model and data are missing"),
        ("[train]\nseeds = [0, 1, 0]", "train.seeds=[0, 1, 0]: 0 is there twice"),
    ],
)
def test_one_line_says_what_is_wrong(tmp_path: Path, text: str, says: str) -> None:
    path = write(tmp_path, text)
    (tmp_path / "machine.toml").write_text(dump_toml({"machine": asdict(DEFAULT)}))
    with pytest.raises(ConfigError) as caught:
        load(path)
    message = str(caught.value)
    assert says in message
    assert str(path) in message
    assert "\n" not in message


ROWS = {  # table of the file -> what is laid over it, and what is left of the file's
    "model = { name = 'lenet', channels = [4, 8], hidden = 64 }": [
        ("model = { name = 'mlp' }", Mlp()),  # whose hidden are several numbers
        ("model = { name = 'mlp', hidden = [3] }", Mlp(hidden=(3,))),
        ("model = { name = 'lenet', hidden = 9 }", LeNet(channels=(4, 8), hidden=9)),
    ],
    "optimizer = { momentum = 0.5, weight_decay = 0.1 }": [  # of sgd, by default
        ("optimizer = { name = 'adamw' }", AdamW(weight_decay=0.1))
    ],
    "model = { import = 'torch.nn:Identity', width = 3 }": [("model = { name = 'mlp' }", Mlp())],
    "data = { name = 'digits', split_seed = 3 }": [
        ("data = { name = 'idx', dir = '/d' }", Idx(dir="/d"))
    ],
}


@every(("table", "change", "left"), [(t, c, left) for t, rows in ROWS.items() for c, left in rows])
def test_another_row_of_a_table_leaves_the_keys_of_the_former(
    tmp_path: Path, table: str, change: str, left: Any
) -> None:
    """By [[compare]], by --set in any order, by a sweep of a study and by --set of that."""
    key = table.partition(" ")[0]
    (job,) = load(write(tmp_path, f"{table}\n[[compare]]\nname = 'a'\n{change}"))
    assert getattr(job, key) == left
    path = write(tmp_path, f"{table}\ntrain.epochs = 3")
    factors = flatten(tomllib.loads(change))
    settings = [f"{name}={value!r}" for name, value in factors.items()]
    for order in (settings, settings[::-1]):
        assert getattr(load(path, order)[0], key) == left
    swept = {name: value for name, value in factors.items() if not isinstance(value, list)}
    assert TRAIN.fits(read_toml(path), swept, 1) is None
    study = write(tmp_path, f"kind = 'train'\njob.{table}\nsweep.'train.batch' = [8]")
    given = load_study(study, [f"job.{each}" for each in settings]).job
    assert getattr(validate(Job, given | {"name": "a"}, "study"), key) == left


def test_a_key_of_neither_row_is_still_an_error(tmp_path: Path) -> None:
    text = "model = { name = 'lenet', hiden = 64 }\n[[compare]]\nname = 'a'\nmodel.name = 'mlp'"
    with pytest.raises(ConfigError, match=r"compare row a: unknown key model\.hiden: did"):
        load(write(tmp_path, text))


@every(
    ("settings", "says"),
    [
        (["train.epocs=3"], "--set train.epocs=3: unknown key train.epocs: did you mean epochs?"),
        (["train.batch=0", "train.epochs=1"], "--set train.batch=0: train.batch=0: should be"),
        (["epochs=3"], "--set epochs=3: unknown key epochs: did you mean train.epochs?"),
        (["Train.epochs=3"], "--set Train.epochs=3: unknown key Train: did you mean train?"),
        (
            ["gradient.density=0.1"],
            "--set gradient.density=0.1: gradient.aggregator: is missing: known with density are "
            "dgc, gradientflow, lgc, oktopk, randomk, topk",
        ),
        (
            ["gradient.density=0.1", "gradient.aggregator=none"],
            "--set gradient.density=0.1: unknown key gradient.density: known are aggregator, "
            "algorithm, machine; gradientflow, lgc, topk, randomk, dgc and oktopk have density",
        ),
        (["train.seeds=[]"], "--set train.seeds=[]: train.seeds=[]: should have at least 1 item, "),
    ],
)
def test_a_wrong_setting_is_told_as_one(tmp_path: Path, settings: list[str], says: str) -> None:
    """And not as the file's, or a row's that has nothing to do with it."""
    job = write(tmp_path, "model.name = 'mlp'\n[[compare]]\nname = 'a'\n[[compare]]\nname = 'b'")
    with pytest.raises(ConfigError) as caught:
        load(job, settings)
    assert str(caught.value).startswith(says)
    study = write(tmp_path, "kind = 'train'\njob.model.name = 'mlp'\nsweep.'train.batch' = [8]")
    with pytest.raises(ConfigError, match=r"^--set train\.levl=1: unknown key train\.levl"):
        load_study(study, ["train.levl=1"])


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml: cannot be read: No such file"):
        read_toml(tmp_path / "none.toml")


def test_overrides_are_toml_and_bare_words_are_strings() -> None:
    settings = ["a.b=3", "a.c=word", "a.d=[1, 2]", "e='x=y'", "a.f=1e-3", "g=true", "h=/some/dir"]
    assert override({"a": {"b": 1, "z": 0}}, settings) == {
        "a": {"b": 3, "c": "word", "d": [1, 2], "z": 0, "f": 1e-3},
        "e": "x=y",
        "g": True,
        "h": "/some/dir",
    }


@every(
    "setting, says",
    [
        *((each, f"--set {each}: the form is key=value or table.key=value")
          for each in ("a", "=3", "a..b=3")),
        ("a.b=[1", "--set a.b=[1: is not a TOML value: Unclosed array"),
        ("x.y=3", "--set x.y=3: x is not a table"),
        ("y.x.z=3", "--set y.x.z=3: y.x is not a table"),
    ],
)  # fmt: skip
def test_overrides_of_another_form_are_refused(setting: str, says: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(says)}$"):
        override({"x": 1, "y": {"x": 1}}, [setting])


def test_numbers_may_be_typed_shorter_than_in_toml() -> None:
    given = {".1": 0.1, "-.5": -0.5, "1.": 1.0, "2.e-3": 0.002, ".": ".", "1.2.3": "1.2.3"}
    for text, value in given.items():
        assert override({}, [f"x={text}"]) == {"x": value}


def test_overrides_leave_what_they_got() -> None:
    raw = {"a": {"b": 1}}
    override(raw, ["a.b=2"])
    assert raw == {"a": {"b": 1}}
    assert merge(raw, {"a": {"c": 3}}) == {"a": {"b": 1, "c": 3}}


def test_rows_times_seeds(tmp_path: Path) -> None:
    text = BASE + "seeds = [4, 5]\n[[compare]]\nname='x'\n[[compare]]\nname='y'\ntrain.epochs=7\n"
    jobs = load(write(tmp_path, text), ["train.epochs=5"])
    assert [job.id for job in jobs] == ["x-s4", "x-s5", "y-s4", "y-s5"]
    assert [job.train.epochs for job in jobs] == [5, 5, 7, 7]
    assert [job.id for job in load(write(tmp_path, BASE))] == ["job-s0"]


def test_a_setting_that_every_row_says_itself_is_refused(tmp_path: Path) -> None:
    text = BASE + "[[compare]]\nname='x'\ntrain.epochs=7\n[[compare]]\nname='y'\ntrain.epochs=8\n"
    told = "--set train.epochs=5: has no effect: each row of compare sets its train.epochs"
    with pytest.raises(ConfigError, match=f"^{re.escape(told)}$"):
        load(write(tmp_path, text), ["train.seeds=[1]", "train.epochs=5"])


def test_tables_made_by_hand_tell_in_a_line_what_is_wrong() -> None:
    told = "Policy: unknown key rule.0.weigths: did you mean weights?"
    with pytest.raises(ConfigError, match=f"^{re.escape(told)}$"):
        Policy(rule=({"layers": "*", "weigths": "e4m3"},))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"^Sgd: momentum=3: should be less than 1$"):
        OPTIMIZERS["sgd"](momentum=3)  # type: ignore[call-arg]


def test_resolved_text_reads_back_as_the_same_job(tmp_path: Path) -> None:
    text = BASE + "seed = 9\n[gradient]\naggregator='lowbit'\nscaling='static:3'\n"
    (job,) = load(write(tmp_path, text))
    (again,) = load(write(tmp_path, job.toml()))
    assert again == job
    assert again.toml() == job.toml()


@pytest.mark.parametrize("aggregator", ["none", "lowbit"])
def test_the_machine_of_auto_is_read_beside_the_job_file(tmp_path: Path, aggregator: str) -> None:
    """And its times are part of the resolved text, which needs no other file."""
    machine = replace(DEFAULT, alpha_s=3e-6)
    (tmp_path / "machines").mkdir()
    (tmp_path / "machines" / "a.toml").write_text(dump_toml({"machine": asdict(machine)}))
    gradient = f"aggregator='{aggregator}'\nalgorithm='auto'\nmachine='machines/a.toml'\n"
    (job,) = load(write(tmp_path, f"{BASE}[gradient]\n{gradient}"))
    assert job.gradient.machine == machine
    (tmp_path / "elsewhere").mkdir()
    (again,) = load(write(tmp_path / "elsewhere", job.toml()))
    assert again == job
    other = job.toml().replace("alpha_s = 3e-06", "alpha_s = 4e-06")
    assert difference(job.toml(), other) == "gradient.machine.alpha_s"


def test_dumped_text_is_what_tomllib_reads() -> None:
    raw = {
        "a": 1,
        "t": {"s": 'q"\\\n\u00e9\U0001f600', "f": 1e-7, "l": [1, 2.5, "x"], "u": {"b": False}},
    }
    assert tomllib.loads(dump_toml(raw | {"left_out": None})) == raw


def test_difference_names_the_key() -> None:
    one, other = "a = 1\n[t]\nb = 2\nc = 3\n", "a = 1\n[t]\nb = 4\nc = 3\n"
    assert difference(one, other) == "t.b"
    assert difference(one, other, ["t.b"]) is None
    assert difference(one, one + "d = 4\n") == "t.d"


@every(
    ("table", "key"),
    [
        ("train.epoch = 3", "train.epoch"),
        ("train.epochs = 0", "train.epochs"),
        ("model = { hidden = [3] }", "model.name"),
        ("model = { name = 'lenett' }", "model.name"),
        ("model = { name = 'mlp', hiden = [3] }", "model.hiden"),
        ("model = { name = 'mlp', hidden = [3, 'a'] }", "model.hidden.1"),
        ("schedule.decay = 'step'", "schedule.decay"),
        ("gradient = { aggregator = 'lowbit', wire = 'e9m9' }", "gradient.wire"),
        (
            "gradient = { aggregator = 'lowbit', layers = { 'a*' = { wire = 'e9m9' } } }",
            "gradient.layers.a*",
        ),
        ("train = { seed = 1, seeds = [1] }", "train"),
    ],
)
def test_an_error_knows_its_key(table: str, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        validate(Job, tomllib.loads(f"name = 'a'\n{table}"), "file")
    assert caught.value.key == key


@every(
    ("options", "key"),
    [
        ({"wires": "e4m3"}, "wires"),
        ({"algorithm": 3}, "algorithm"),
        ({"wire": "e9m9"}, "wire"),
        ({"layers": {"a*": {"wire": "e9m9"}}}, "layers.a*"),
        ({"layers": {"a*": {"wire": "e4m3", "random_bits": "x"}}}, "layers.a*.random_bits"),
    ],
)
def test_an_error_of_options_knows_its_key(options: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        made(LowBit, options, "lowbit")
    assert caught.value.key == key


def test_an_argument_of_an_error_is_a_key_whatever_its_words() -> None:
    def refuse(self: object) -> None:
        raise ArgumentError("Pair", "second", 3, "first: must be below 2")

    pair = make_dataclass(
        "Pair", [("first", int), ("second", int)], namespace={"__post_init__": refuse}
    )
    for read in (made, validate):
        with pytest.raises(ConfigError, match=r"^x: second=3: first: must be below 2$") as caught:
            read(pair, {"first": 1, "second": 3}, "x")
        assert caught.value.key == "second"
