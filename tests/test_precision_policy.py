"""Policies: how rules resolve, what they refuse, and training jobs that obey them."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from every import every
from test_influence import influence
from torch import nn
from training import ROOT, Stop, assert_same_records, model_bytes, run_job, small_data, small_job

from cpdhpc import store
from cpdhpc.config import ConfigError, validate
from cpdhpc.lab.cli import main
from cpdhpc.lab.signals import Caught, Interrupted
from cpdhpc.lab.train.checkpoint import Files
from cpdhpc.lab.train.imports import ImportedModel
from cpdhpc.lab.train.job import Job
from cpdhpc.lab.train.loop import run
from cpdhpc.lab.train.progress import Display
from cpdhpc.lab.train.setup import prepare
from cpdhpc.torch.averaging import policies_of
from cpdhpc.torch.precision import Policy, convert
from cpdhpc.torch.precision.policy import PRESETS, Sums
from cpdhpc.world.ranks import Loopback

OPTIONS: dict[str, Any] = {"accumulate": "e6m9", "chunk": 8, "rounding": "stochastic"}
PRECISION: dict[str, Any] = {  # with state and chance in each pass
    "rule": [
        {
            "layers": "*",
            "weights": "e4m3",
            "activations": {"format": "e4m3", "scaling": "delayed", "history": 4},
            "errors": {"format": "e5m2", "rounding": "stochastic", "scaling": "aps"},
            "forward": "e6m9",
            "weight_gradient": OPTIONS,
            "states": "bf16",
            "update": {"format": "bf16", "rounding": "stochastic", "master": False},
        },
        {"layers": "<last>", "weights": "e5m10", "forward": "torch"},
    ]
}


def policy(raw: dict[str, Any]) -> Policy:
    return validate(Policy, raw, "job.toml")


def test_later_rules_win_key_by_key() -> None:
    found = policy(
        {
            "rule": [
                {"layers": "*", "weights": "e4m3", "errors": "e5m2", "forward": OPTIONS},
                {"layers": "conv*", "weights": {"format": "e3m0", "rounding": "zero"}},
                {"layers": "*2", "forward": "e5m10", "wire": "e3m0"},
                {"layers": "<first>", "errors": "fp32"},
                {"layers": "<last>", "forward": "torch"},
            ]
        }
    )
    layers = ["conv1", "conv2", "fc"]
    first, second, last = (found.of(name, layers) for name in layers)
    assert first.weights is not None
    assert (first.weights.format, first.weights.rounding) == ("e3m0", "zero")
    assert first.errors is not None
    assert not first.errors.rounds
    assert first.forward == Sums(**OPTIONS)
    assert second.forward == Sums(accumulate="e5m10")
    assert second.wire == "e3m0"
    assert last.forward is not None
    assert last.forward.by_torch
    assert last.weights is not None
    assert last.weights.format == "e4m3"
    assert last.said().keys() == {"weights", "errors", "forward"}


def test_the_text_reads_back_as_the_same_policy() -> None:
    one = policy(PRECISION)
    assert validate(Policy, tomllib.loads(one.toml())["precision"], "x") == one
    job = small_job(precision=PRECISION)
    assert validate(Job, tomllib.loads(job.toml()), "x").precision == one


def rules(*given: dict[str, Any]) -> dict[str, Any]:
    return {"rule": [*given]}


@every(
    ("raw", "says"),
    [
        ({"preset": "bf61"}, "preset='bf61': did you mean bf16?"),
        (rules({"weights": "e4m3"}), "rule.0.layers: is missing"),
        (rules({"layers": "*", "weigths": "e4m3"}), "rule.0.weigths: did you mean weights?"),
        (rules({"layers": "*", "weights": "e4m33"}), "rule.0.weights.format='e4m33': "),
        (
            rules({"layers": "*", "weights": {"format": "e4m3", "roundng": "zero"}}),
            "unknown key rule.0.weights.roundng: did you mean rounding?",
        ),
        (rules({"layers": "*", "forward": "e9m9"}), "rule.0.forward.accumulate: exp=9"),
        (
            rules({"layers": "*", "forward": {"between": "e4m3"}}),
            "rule.0.forward.between='e4m3': needs chunk, of 1 or more",
        ),
        (
            rules({"layers": "*", "forward": {"acumulate": "e4m3"}}),
            "unknown key rule.0.forward.acumulate: did you mean accumulate?",
        ),
        (
            rules({"layers": "*", "forward": {"accumulate": "torch", "chunk": 3}}),
            "rule.0.forward.accumulate='torch': allows no other key",
        ),
        (rules({"layers": "*", "wire": "e4"}), "rule.0.wire='e4': known are"),
        (rules({"layers": "*", "weights": "int17"}), "with a scale also int2, int3, "),
        (rules({"layers": "cnov*", "weights": "e4m3"}), "rule.0.layers='cnov*': matches no layer"),
        (rules({"layers": "norm", "weights": "e4m3"}), "matches no layer with products: known are"),
        (rules({"layers": "*"}), "rule.0.layers='*': has no rule: allowed keys are weights"),
        (rules({"layers": "[1", "weights": "e4m3"}), "rule.0.layers='[1': a [ without its ]"),
        (rules({"layers": "[[][]!]f[]a", "weights": "e4m3"}), "a [ without its ]"),
        (rules({"layers": "[[][]!]", "weights": "e4m3"}), "matches no layer"),
        (rules({"layers": "norn", "outputs": "e4m3"}), "no layer: did you mean norm?"),
        (
            {
                "complete": True,
                **rules({"layers": "conv*", "weights": "e4m3"}, {"layers": "fc", "wire": "e4m3"}),
            },
            "precision.complete=true: no rule for fc: each layer with products needs one for its",
        ),
    ],
)
def test_one_line_says_what_is_wrong(raw: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        policy(raw).of_layers(["conv1", "conv2", "fc"], ["norm"])
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"train": {"image_grid": [2, 1]}},
            "precision: does not allow this train.image_grid: must be",
        ),
        ({"stages": {"count": 2}}, "stages.count=2: does not allow this precision"),
    ],
)
def test_what_precision_does_not_go_with(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        small_job(precision=PRECISION, **changes)


@pytest.mark.parametrize("after", [3, 6])
def test_a_job_goes_on_as_if_nothing_had_been(tmp_path: Path, after: int) -> None:
    """Scales and chance too; in an epoch and behind its end."""
    job = small_job(precision=PRECISION, train={"checkpoint_every": 1})
    (tmp_path / "a").mkdir()
    whole = run_job(job, Loopback(2), tmp_path / "a")
    told = store.read_attributes(whole.files.record)["precision"]
    assert [line.partition(":")[0] for line in told.splitlines()] == ["1", "3"]
    assert "activations={format = e4m3, scaling = delayed, history = 4}" in told
    files, caught = Files.of(tmp_path, job), Caught()
    with pytest.raises(Interrupted):
        run(prepare(job, Loopback(2), small_data(), files), caught, Stop(caught, after))
    training = prepare(job, Loopback(2), small_data(), files)
    training.resume()
    run(training, Caught(), Display(False, 1))
    assert model_bytes(files.checkpoint) == model_bytes(whole.files.checkpoint)
    assert_same_records(files.record, whole.files.record)
    plain = run_job(small_job(name="plain"), Loopback(2), tmp_path)
    assert model_bytes(plain.files.checkpoint) != model_bytes(whole.files.checkpoint)


def test_a_job_whose_rule_matches_nothing_is_refused(tmp_path: Path) -> None:
    job = small_job(precision=rules({"layers": "conv*", "weights": "e4m3"}))
    said = (
        r"small-s0: precision.rule.0.layers='conv\*': matches no layer with products: known are 1"
    )
    with pytest.raises(ConfigError, match=said):
        prepare(job, Loopback(), small_data(), Files.of(tmp_path, job))


def test_commands_print_what_a_job_file_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, preset in PRESETS.items():
        assert main(["precision", "presets", name]) == 0
        shown = capsys.readouterr().out
        assert preset.leaves_out in shown
        raw = tomllib.loads(shown)
        assert policy(raw.get("precision", {})).rules == policy({"preset": name}).rules
        assert validate(Job, {"name": "x", **raw}, name).precision.preset == ""
    assert main(["precision", "presets"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [*PRESETS]
    assert main(["precision", "presets", "fp8-hybird"]) == 2
    assert "NAME=fp8-hybird: did you mean fp8-hybrid?" in capsys.readouterr().err


def test_show_prints_a_line_for_each_layer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "job.toml"
    path.write_text(
        "model = {name = 'resnet_cifar', n = 1, width = 4}\n[precision]\n"
        "rule = [{layers = '1', weights = 'e4m3', forward = {accumulate = 'e6m9', chunk = 64}},"
        "{layers = '4*norm*', outputs = 'bf16'}, {layers = '2', outputs = 'bf16', wire = 'e3m0'}]"
    )
    assert main(["precision", "show", str(path)]) == 2
    assert "rule.1.layers='4*norm*': matches no layer" in capsys.readouterr().err
    path.write_text(path.read_text().replace("4*norm*", "<last>"))
    assert main(["precision", "show", str(path)]) == 0
    title, *rows = capsys.readouterr().out.splitlines()
    words = [row.split(maxsplit=2) for row in rows]
    assert title == "job"
    assert words[0] == ["1", "Conv2d", "weights=e4m3, forward={accumulate = e6m9, chunk = 64}"]
    assert words[1] == ["2", "BatchNorm2d", "outputs=bf16, wire=e3m0"]
    assert words[-1][1:] == ["Linear", "outputs=bf16"]
    assert {row[2] for row in words[2:-1]} == {"float32"}


def test_products_that_stay_torchs_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own_gru.py").write_text(
        "from torch import nn\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.gru, self.fc = nn.GRU(8, 4, batch_first=True), nn.Linear(4, 8)\n"
        "    def forward(self, x):\n"
        "        return self.fc(self.gru(x)[0][:, -1])\n"
    )
    job = small_job(
        precision=rules({"layers": "*", "weights": "e4m3"}), train={"epochs": 1}
    ).model_copy(update={"model": ImportedModel(imported="own_gru:Net", import_from=str(tmp_path))})
    training = prepare(job, Loopback(), small_data(), Files.of(tmp_path, job))
    run(training, Caught(), Display(True, 1))
    said = "small-s0: [precision] in 1 layers; not in gru, whose products are torch's"
    assert said in "".join(capsys.readouterr())
    assert training.provenance["precision"] == "fc: weights=e4m3\ngru: products are torch's"


def test_influence_is_of_float32_networks(tmp_path: Path) -> None:
    run_job(small_job(precision=PRECISION, train={"keep_every": 2}), Loopback(), tmp_path)
    with pytest.raises(ConfigError, match="gradients of single samples need float32"):
        influence(tmp_path, "--self")


def test_the_page_has_an_example_that_runs(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "docs" / "reference" / "precision.md").read_text()
    (example,) = (e for e in re.findall(r"```python\n(.*?)```", text, re.S) if "convert(" in e)
    exec(example, {})
    shown = capsys.readouterr().out
    assert "weights=fp16, activations=fp16, errors=e5m2, forward=torch" in shown
    (section,) = re.findall(r"```toml\n(\[precision\].*?)```", text, re.S)
    assert policy(tomllib.loads(section)["precision"]).is_complete


def test_layers_that_share_a_parameter_change_it_alike() -> None:
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False))
    model[1].weight = model[0].weight
    rules = {"layers": "0", "update": "bf16"}, {"layers": "1", "update": "e4m3"}
    with pytest.raises(ConfigError, match=r"0 and 1 share a parameter, .* rules for its update"):
        convert(model, policy({"rule": list(rules)}))
    convert(model, policy({"rule": [rules[0], {"layers": "1", "weights": "e4m3"}]}))


def test_parametrized_layers_are_refused() -> None:
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)))
    with pytest.raises(ConfigError, match="0 is parametrized: convert before"):
        convert(model, policy({"rule": [{"layers": "*", "weights": "e4m3"}]}))


def test_ranks_compare_policies_and_nothing_else_of_that_name() -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    model.policy = object()  # of a user, and at another address on each rank
    assert policies_of(model) == {}
    convert(model, policy({"rule": [{"layers": "*", "weights": "e4m3"}]}))
    assert "e4m3" in str(policies_of(model)["0"])
