"""Site profiles: what they may say, and the shapes that they refuse."""

from pathlib import Path
from typing import Any

import pytest
from every import every
from training import ROOT

from cpdhpc.config import ConfigError
from cpdhpc.lab.schedulers.slurm import LAUNCHERS
from cpdhpc.lab.study.site import Site, load_site


@every(
    ("text", "words"),
    [
        ("partion = 'x'", "unknown key partion: did you mean partition"),
        ("scheduler = 'slrum'", "scheduler='slrum': did you mean slurm"),
        ("launcher = 'srun'", "launcher='srun': did you mean srun-pm"),
        ("launcher = 'sbatch'", "known are " + ", ".join(sorted(LAUNCHERS))),
        ("modules = 'gcc'", "modules='gcc': should be a list"),
        ('setup = ["a\\nb"]', "should be one line"),
        ("setup = ['']", "should be one line"),
        ("partition = 'a b'", "should be one word"),
        ("directives = ['exclusive']", "should be an option of sbatch"),
        ("gpus_per_node = -1", "greater than or equal to 0"),
        ("grace_s = 30", "greater than or equal to 60"),
        ("max_time_min = 3", "leaves no minute before the last grace_s=120 seconds"),
        ("nodes = 'many'", "nodes='many': should be a valid integer"),
        ("modules = [", "is not TOML"),
        ("scheduler = 'pbs'\nqos = 'x'", "qos: PBS has none"),
        ("scheduler = 'flux'\nreservation = 'x'", "reservation: Flux has none"),
        ("scheduler = 'pbs'\nlauncher = 'srun-pmix'", "launcher='srun-pmix': "),
        ("launcher = 'aprun -n {rank}'", "has the fields {ranks} and perhaps {ppn}"),
        ("launcher = '{ranks}'", "begins with its program"),
        ("launcher = 'aprun {ranks'", "braces are for fields"),
    ],
)
def test_profiles_that_cannot_be(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_site(path)
    assert str(caught.value).startswith(f"{path}: ") and words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_profiles_that_can_be(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("modules = ['gcc']")
    assert load_site(path) == Site(name="mine", modules=("gcc",))
    local = load_site(ROOT / "slurm" / "sites" / "local.toml")
    assert local == load_site(None), "local.toml spells out the defaults"
    with pytest.raises(ConfigError, match=r"no\.toml: cannot be read"):
        load_site(tmp_path / "no.toml")


@every(
    ("shape", "given", "words"),
    [
        ((2, 4), {}, None),
        ((2, 4), {"nodes": 2, "cores_per_node": 8, "cpus_per_rank": 2}, None),
        ((3, 4), {"nodes": 2}, "3 nodes: site s gives a job 2 at most"),
        ((1, 9), {"cores_per_node": 8}, "9 ranks per node: a node of site s has 8 cores"),
        (
            (1, 5),
            {"cores_per_node": 8, "cpus_per_rank": 2},
            "5 ranks per node with 2 cores each: a node of site s has 8 cores",
        ),
        ((1, 3), {"gpus_per_node": 2}, None),
        ((1, 2, True), {"gpus_per_node": 2}, None),
        ((1, 3, True), {"gpus_per_node": 2}, "3 ranks per node: a node of site s has 2 GPUs"),
        ((1, 1, True), {}, "device gpu: site s has no GPUs (gpus_per_node = 0)"),
    ],
)
def test_shapes_that_a_site_refuses(
    shape: tuple[Any, ...], given: dict[str, Any], words: str | None
) -> None:
    assert Site(name="s", **given).refusal(*shape) == words
