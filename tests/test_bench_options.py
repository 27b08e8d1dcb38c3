"""The options of benchmarks: what they mean, and what is wrong with them."""

from __future__ import annotations

from pathlib import Path

import pytest
from every import every

from cpdhpc.bench.allreduce import run
from cpdhpc.bench.harness import parse_counts, parse_sizes
from cpdhpc.cli import parser
from cpdhpc.config import UserError
from cpdhpc.world.ranks import Loopback


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
    assert parse_sizes(text) == sizes


def test_counts() -> None:
    assert parse_counts("--threads", "2,1, 16,2") == [2, 1, 16]
    for wrong in ("", "0", "1,x", "1,,2", "-1"):
        with pytest.raises(UserError, match=f"--threads {wrong}: must be numbers, 1 or more"):
            parse_counts("--threads", wrong)


@every(
    "command, words",
    [
        ("batchnorm --channels 0", "--channels 0: must be 1 or more"),
        ("batchnorm --settings 9:4,9:9", "--settings 9:9: must be RANGE:BITS, 1..16777216"),
        ("codec --mib -1", "--mib -1: must be above 0"),
        ("codec --mib 0", "--mib 0: must be above 0"),
        ("codec --mib nan", "--mib nan: must be above 0"),
        ("codec --mib 1e9", "--mib 1e+09: must be above 0 and below"),
        ("codec --density 0", "--density 0: must be above 0 and at most 1"),
        ("codec --density nan", "--density nan: must be above 0 and at most 1"),
        ("codec --repeats 0", "--repeats 0: must be 1 or more"),
        ("codec --formats bf61", "--formats bf61: "),
        ("accuracy --values 0", "--values 0: must be 1 or more"),
        ("accuracy --ranks 4,-1", "--ranks 4,-1: must be numbers, 1 or more"),
        ("accuracy --formats e4", "'e4': known are eXmY"),
        ("layer --ranks 0", "--ranks 0: must be 1 or more"),
        ("layer --field 0", "bench layer: field=0: should be greater"),
        ("throughput --batch 0", "--batch 0: must be 1 or more"),
        ("throughput --network resnet", "--network resnet: did you mean resnet50"),
        ("throughput --methods topp", "--methods topp: "),
        ("throughput --links 1,x", "--links 1,x: must be numbers above 0, in Gb/s"),
        ("throughput --rate -1", "--rate -1: must be above 0"),
        ("throughput --bucket-mib inf", "--bucket-mib inf: must be above 0, and finite"),
        ("throughput --algorithms mpi", "--algorithms mpi: "),
        ("throughput --workers 0", "--workers 0: must be numbers, 1 or more"),
        ("predict m.toml --ranks 0", "--ranks 0: must be 1 or more"),
        ("predict m.toml --ranks 2 --ranks-per-node 0", "--ranks-per-node 0: must be 1 or more"),
    ],
)
def test_ranges(command: str, words: str) -> None:
    argv = ["bench", *command.split()]
    arguments = parser(argv).parse_args(argv)
    with pytest.raises(UserError) as caught:
        arguments.run.run(arguments)
    assert words in str(caught.value)


@every(
    "arguments, words",
    [
        (["--sizes", "6"], "--sizes 6: must be a positive multiple of 4"),
        (["--sizes", "0"], "--sizes 0: must be"),
        (["--sizes", "1MB"], "--sizes 1MB: must be a number, with one of B, KiB"),
        (["--sizes", "8:16"], "--sizes 8:16: a range is first:last:xFACTOR"),
        (["--sizes", "8:64:x1"], "FACTOR 2 or more"),
        (["--algorithms", "rings"], "--algorithms rings: did you mean ring or biring?"),
        (["--wires", "e4"], "--wires e4"),
        (["--scalings", "layer"], "--scalings layer"),
        (["--accumulate", "kahn"], "--accumulate kahn"),
        (["--algorithms", "ring", "--wires", "e4m3", "--accumulate", "kahan"], "nothing to do"),
        (["--wires", ","], "nothing to do: no names are given"),
        (["--baselines", "nccl"], "--baselines nccl"),
        (["--repeats", "0"], "--repeats 0: must be 1 or more"),
        (["--warmup", "-1"], "--warmup -1: must be 0 or more"),
        (["--out", "nowhere/x.h5"], "--out nowhere/x.h5: nowhere is no directory"),
        (["--calls", "again"], "--calls again: did you mean plain?"),
        (["--calls", ","], "--calls ,: no names are given"),
        (["--link", "0"], "--link 0: must be above 0"),
        (["--predict", "none.toml"], "none.toml: cannot be read"),
    ],
)
def test_what_the_user_can_mend(
    arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as caught:
        argv = ["bench", "allreduce", "--baselines", "mpi", *arguments]
        run(parser(argv).parse_args(argv), Loopback(1))
    assert words in str(caught.value)
