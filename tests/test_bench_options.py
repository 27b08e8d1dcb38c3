"""The options of benchmarks: what they mean, and what is wrong with them."""

from dataclasses import asdict
from pathlib import Path

import pytest
from every import every

from cpdhpc.collectives.method import DEFAULT
from cpdhpc.collectives.predict import ALIKE
from cpdhpc.collectives.schedules import SCHEDULES
from cpdhpc.config import UserError, dump_toml
from cpdhpc.lab.cli import main
from cpdhpc.lab.kinds import flags


@every(
    "text, sizes",
    [
        ("8", [8]),
        ("1MiB, 16KiB", [1 << 20, 16 << 10]),
        ("8:64:x2", [8, 16, 32, 64]),
        ("4B:1KiB:x100,1GiB", [4, 400, 1 << 30]),
    ],
)
def test_sizes(text: str, sizes: list[int]) -> None:
    assert flags.sizes(text) == sizes


def test_counts() -> None:
    assert flags.counts("2,1, 16,2") == [2, 1, 16] and flags.shape("3,2,2") == [3, 2, 2]
    for wrong in ("", "0", "1,x", "1,,2", "-1"):
        with pytest.raises(UserError, match=f"^{wrong}: must be numbers, 1 or more"):
            flags.counts(wrong)


def test_auto_has_a_row_of_the_algorithm_that_it_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = tmp_path / "m.toml"
    machine.write_text(dump_toml({"machine": asdict(DEFAULT)}))
    names = ",".join(SCHEDULES)
    words = ["--ranks", "8", "--sizes", "8,64MiB", "--wires", "raw"]
    assert main(["bench", "predict", str(machine), *words, "--algorithms", f"{names},auto"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line[0] != "#"]
    for size in ("8", str(64 << 20)):
        of_size = {row[1]: row for row in rows if row[0] == size}
        (auto,) = (name for name in of_size if name.startswith("auto="))
        taken = of_size.pop(auto)
        assert taken[2:8] == of_size[auto.removeprefix("auto=")][2:8]
        best = min(float(row[5]) for row in of_size.values())
        assert float(taken[5]) <= ALIKE * best + 0.1  # microseconds, of which one digit is shown
    assert main(["bench", "predict", str(machine), *words, "--algorithms", "auto"]) == 0


@every(
    "words, said",
    [
        ("bench batchnorm --channels 0", "--channels 0: must be 1 or more"),
        ("bench batchnorm --settings 9:4,9:9", "--settings 9:9: must be RANGE:BITS, 1..16777216"),
        ("bench codec --mib -1", "--mib -1: must be above 0"),
        ("bench codec --mib 0", "--mib 0: must be above 0"),
        ("bench codec --mib nan", "--mib nan: must be above 0"),
        ("bench codec --mib 1e9", "--mib 1e9: must be above 0 and below"),
        ("bench codec --mib x", "--mib x: must be a number"),
        ("bench codec --density 0", "--density 0: must be above 0 and at most 1"),
        ("bench codec --density nan", "--density nan: must be above 0 and at most 1"),
        ("bench codec --repeats 0", "--repeats 0: must be 1 or more"),
        ("bench codec --repeats 1.5", "--repeats 1.5: must be an integer"),
        ("bench codec --formats bf61", "--formats bf61: "),
        ("bench codec --clones x86", "--clones x86: known are"),
        ("bench accuracy --values 0", "--values 0: must be 1 or more"),
        ("bench accuracy --ranks 4,-1", "--ranks 4,-1: must be numbers, 1 or more"),
        ("bench accuracy --formats e4", "--formats e4: known are eXmY"),
        ("bench accuracy --seeds 0", "--seeds 0: must be 1 or more"),
        ("bench accuracy --ways ring:kahan", "--ways ring:kahan: accumulate='kahan': known are"),
        ("bench accuracy --ways rings", "--ways rings: "),
        ("bench accuracy --scalings aps,layer", "--scalings layer: known are aps, "),
        ("bench accuracy --data none", "--data none: did you mean noise?"),
        ("bench accuracy --csv no/such/a.csv", "--csv no/such/a.csv: no/such is no directory"),
        ("bench layer --ranks 0", "--ranks 0: must be 1 or more"),
        ("bench layer --field 0", "--field 0: must be 1 or more"),
        ("bench optimizer --threads 0", "--threads 0: must be 1 or more"),
        ("bench optimizer --widths 0,x", "--widths 0,x: must be numbers, 1 or more"),
        ("bench optimizer --warmup -1", "--warmup -1: must be 0 or more"),
        ("bench throughput --batch 0", "--batch 0: must be 1 or more"),
        ("bench throughput --network resnet", "--network resnet: did you mean resnet50"),
        ("bench throughput --methods topp", "--methods topp: did you mean"),
        ("bench throughput --links 1,x", "--links 1,x: must be numbers above 0, in Gb/s"),
        ("bench throughput --rate -1", "--rate -1: must be above 0"),
        ("bench throughput --bucket-mib inf", "--bucket-mib inf: must be above 0, and finite"),
        ("bench throughput --algorithms mpi", "--algorithms mpi: "),
        ("bench throughput --workers 0", "--workers 0: must be numbers, 1 or more"),
        ("bench predict m.toml --ranks 0", "--ranks 0: must be 1 or more"),
        ("bench predict m.toml --ranks 2 --ranks-per-node 0", "--ranks-per-node 0: must be 1 or"),
        ("bench allreduce --sizes 6", "--sizes 6: must be a positive multiple of 4"),
        ("bench allreduce --sizes 0", "--sizes 0: must be"),
        ("bench allreduce --sizes 1MB", "--sizes 1MB: must be a number, with one of B, KiB"),
        ("bench allreduce --sizes 8:16", "--sizes 8:16: a range is first:last:xFACTOR"),
        ("bench allreduce --sizes 8:64:x1", "FACTOR 2 or more"),
        ("bench allreduce --algorithms rings", "--algorithms rings: did you mean ring or biring?"),
        ("bench allreduce --wires e4", "--wires e4"),
        ("bench allreduce --scalings layer", "--scalings layer"),
        ("bench allreduce --accumulate kahn", "--accumulate kahn"),
        ("bench allreduce --algorithms ring --wires e4m3 --accumulate kahan", "nothing to do"),
        ("bench allreduce --wires int8", "to do: scaling='tile': wire='int8' needs shifts that"),
        ("bench allreduce --wires ,", "nothing to do: no names are given"),
        ("bench allreduce --baselines nccl", "--baselines nccl"),
        ("bench allreduce --repeats 0", "--repeats 0: must be 1 or more"),
        ("bench allreduce --warmup -1", "--warmup -1: must be 0 or more"),
        ("bench allreduce --out no/x.h5 --baselines mpi", "--out no/x.h5: no is no directory"),
        ("bench allreduce --calls again", "--calls again: did you mean plain?"),
        ("bench allreduce --calls , --baselines mpi", "--calls ,: no names are given"),
        ("bench allreduce --link 0", "--link 0: must be above 0"),
        ("bench allreduce --predict none.toml", "none.toml: cannot be read"),
        ("bench codec --threads 99999", "--threads 99999: must be up to 1024"),
        ("bench codec --out {}", "--out {}: is a directory: must be a file in one"),
        ("bench accuracy --png {}/no/x.png", "--png {}/no/x.png: {}/no is no directory that can"),
        ("bench throughput --png {}/x.txt", "--png {}/x.txt: must end in one of ."),
        ("bench accuracy --values 99999999999999", "not enough memory: Unable to allocate"),
        ("bench throughput --machine {}/none", "{}/none: cannot be read: No such file"),
        ("bench compress --methods topk:density", "topk:density: the form is NAME:OPTION=VALUE"),
        ("bench accuracy --formats E4M3", "--formats E4M3: did you mean e4m3?"),
        ("darray show --shape 99999999999999999999,8", "must have fewer than 2**63 cells"),
        ("darray show --shape 8,8 --png {}", "--png {}: is a directory"),
        ("darray show --shape 8 --dtype Float32", "dtype='Float32': did you mean float32?"),
        ("autoencoder x.toml --png {}/x", "--png {}/x: must end in one of ."),
        ("train inputs/study_smoke.toml", "study_smoke.toml: is a study, for the command study"),
        ("train inputs/cots_digits.toml", "is a job of the command autoencoder: must be a job of"),
        ("study plan inputs/train_digits.toml", "is a job of the command train: must be a study"),
        ("train slurm/sites/local.toml", "is the profile of a site, for --site: must be a job"),
        (
            "study plan inputs/study_smoke.toml --site inputs/train_digits.toml",
            "train_digits.toml: is a job of the command train: must be the profile of a site",
        ),
        ("bench predict inputs/train_digits.toml --ranks 4", "must be a machine's speeds, of"),
        ("precision record inputs/train_digits.toml --tensors q", "--tensors q: record.tensors.0="),
        (
            "bench halo --ways q",
            "cpdhpc, 'cpdhpc, copied', packed, subarray, 'subarray, persistent'",
        ),
        ("examples inputs/train_digits.toml", "inputs: cannot be written: Not a directory"),
        ("train inputs/train_digits.toml --set train.lr=1", "did you mean learning_rate?"),
        ("autoencoder inputs/cots_digits.toml --set layer.maps=3", "is not a table, but several"),
        ("study plan inputs/study_smoke.toml --set name=a/b", "name='a/b': should begin with a l"),
        ("influence {} --test 0:3", "{}: has no records of runs"),
    ],
)
def test_wrong_inputs_are_one_line(
    words: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before the work that the command would do; and no traceback."""
    assert main(words.replace("{}", str(tmp_path)).split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said.replace("{}", str(tmp_path)) in line
    reasons = line.partition("to do: ")[2].split("; ")
    assert len(reasons) == len({*reasons})


def test_empty_words_and_negative_ones(capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in (
        (["train", "x.toml", "--out", ""], "--out is empty: a variable of the shell"),
        (["darray", "show", "--shape", "-8,8"], "begins with - after =, for example --option=-1"),
    ):
        with pytest.raises(SystemExit):
            main(words)
        assert said in capsys.readouterr().err
