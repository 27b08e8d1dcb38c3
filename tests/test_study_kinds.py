"""What login nodes know of kinds is what the real tables say."""

from typing import Any

import numpy as np
import pytest
from every import every
from pydantic import TypeAdapter

from cpdhpc.collectives.allreduce import Allreduce
from cpdhpc.collectives.checks import check_world
from cpdhpc.collectives.method import UNITS
from cpdhpc.collectives.rank_program import ACCUMULATES as REAL_ACCUMULATES
from cpdhpc.collectives.schedules import SCHEDULES
from cpdhpc.config import OneOf
from cpdhpc.formats import NAMED, NAMED_WIRES
from cpdhpc.lab.kinds import KINDS
from cpdhpc.lab.kinds.allreduce_cases import BASELINES as REAL_BASELINES
from cpdhpc.lab.study_data import ABSENT
from cpdhpc.lab.train.job import Job
from cpdhpc.methods import ACCUMULATES, ALGORITHMS, BASELINES, MEMCPY
from cpdhpc.world.ranks import Loopback

WIRES = ("raw", "e4m3", "e2m1fn", "e5m2", "int4", "ternary", "mxfp4")


def test_names_are_those_of_the_tables() -> None:
    assert set(SCHEDULES) == set(ALGORITHMS)
    assert set(ACCUMULATES) == set(REAL_ACCUMULATES)
    names = {name if w == "raw" else f"{name}-{w}" for name, ws in BASELINES.items() for w in ws}
    assert names | {MEMCPY} == set(REAL_BASELINES)


@every("wire", ["raw", *NAMED_WIRES, *NAMED, "e4m3", "e2m1fn", "e1m1"])
def test_wires_that_exist_are_known(wire: str) -> None:
    Allreduce(wire)
    assert KINDS["allreduce"].factors["wire"].parse(wire) == wire


@every("wire", ["e9m9", "int1", "float", "", "e4", "mxfp5"])
def test_wires_that_do_not_exist_are_refused(wire: str) -> None:
    with pytest.raises(ValueError):
        Allreduce(wire)
    with pytest.raises(ValueError):
        KINDS["allreduce"].factors["wire"].parse(wire)


@every(
    "algorithm, wire, scaling, way, used",
    [
        ("ring", "e4m3", "", "", ("tile", "grow")),
        ("ring", "e4m3", "static:3", "exact", ("static:3", "exact")),
        ("ring", "e4m3", "", "exact", ("aps", "exact")),
        ("ring", "e4m3", "static:4000", "", "static:4000"),
        ("ring", "mxfp4", "", "", ("block32", "grow")),
        ("ring", "posit8es1", "", "", ("tile", "requantise")),
        ("ring", "mxfp4", "tile", "", "mxfp4"),
        ("ring", "int4", "", "", ("aps", "exact")),
        ("ring", "int4", "tile", "", "tile"),
        ("ring", "posit8es1", "", "exact", "exact sums are of floating-point formats"),
        ("tree", "e2m1fn", "none", "", ("none", "requantise")),
        ("tree", "e2m1fn", "", "grow", "grow"),
        ("direct", "e5m2", "block16", "", ("block16", "float32")),
        ("hier", "ternary", "", "", ("aps", "exact")),
    ],
)
def test_what_a_method_in_few_bits_uses(
    algorithm: str, wire: str, scaling: str, way: str, used: Any
) -> None:
    given = {"size_bytes": 64, "algorithm": algorithm, "wire": wire}
    choices = {"value_scaling": scaling, "accumulate": way}
    if isinstance(used, str):
        with pytest.raises(ValueError, match=f"^{algorithm}: .*{used}"):
            KINDS["allreduce"].used(given | choices)
    else:
        expected = given | dict(zip(choices, used, strict=True))
        assert [*KINDS["allreduce"].used(given | choices).items()] == [*expected.items()]


@every(
    "factors, used_call",
    [
        ({}, None),
        ({"call": "plain"}, None),
        ({"call": "prepared"}, "prepared"),
        ({"call": "prepared", "collective": "all_gather"}, "prepared"),
        ({"call": "shared"}, "shared"),
        ({"call": "graphs", "device": "gpu"}, "graphs"),
        ({"call": "graphs"}, "call graphs takes no arrays of device cpu"),
        ({"call": "shared", "collective": "all_gather"}, "called plain or prepared, not shared"),
        ({"call": "prepared", "algorithm": "mpi"}, None),
    ],
)
def test_how_a_case_is_called(factors: dict[str, str], used_call: str | None) -> None:
    kind = KINDS["allreduce"]
    unused = {"value_scaling": ABSENT, "accumulate": ABSENT}
    given = {"size_bytes": 64, "algorithm": "ring", "wire": "raw", **unused, **factors}
    if used_call is not None and " " in used_call:
        with pytest.raises(ValueError, match=used_call):
            kind.used(given)
    else:
        assert kind.used(given).get("call") == used_call


@every(
    "factors, used",
    [
        ({"operation": "memcpy", "format": "e4m3", "density": 0.1}, {"operation": "memcpy"}),
        ({"operation": "gather"}, {"operation": "gather", "density": 0.01}),
        (
            {"operation": "hop", "format": "e4m3", "threads": 2, "clone": "portable"},
            {"operation": "hop", "format": "e4m3", "threads": 2, "clone": "portable"},
        ),
        ({"operation": "hop"}, "operation hop needs a format"),
        ({"operation": "gather", "device": "gpu"}, "gather is of the CPU, not of device gpu"),
        ({"operation": "memcpy", "threads": 2, "device": "gpu"}, "threads is of the CPU"),
    ],
)
def test_what_an_operation_of_the_codec_uses(factors: dict[str, Any], used: Any) -> None:
    unused = dict.fromkeys(("format", "density", "threads", "clone"), ABSENT)
    given = {"size_bytes": 64, **unused, **factors}
    if isinstance(used, str):
        with pytest.raises(ValueError, match=used):
            KINDS["codec"].used(given)
    else:
        assert KINDS["codec"].used(given) == {"size_bytes": 64, **used}


@every("ranks", [2, 17_476, 17_477])
def test_exact_sums_that_are_too_wide_are_impossible(ranks: int) -> None:
    used = {"size_bytes": 4, "algorithm": "tree", "wire": "e4m3", "accumulate": "exact"}
    reason = KINDS["allreduce"].fits({}, used, ranks)
    xs = [np.ones(1, np.float32)] * ranks
    method = Allreduce("e4m3", "tree", accumulate="exact")
    if reason is None:
        check_world(method, Loopback(ranks))
        return
    assert reason == f"exact sums of {ranks} ranks in e4m3 take 33 bits, more than 32"
    with pytest.raises(ValueError, match="take 33 bits"):
        method.run(Loopback(ranks), xs)


def keys(schema: dict, definitions: dict, prefix: str = "") -> dict[str, set[str]]:
    """Every dotted key of a model with the JSON types it may have, over all members of unions."""
    found: dict[str, set[str]] = {}
    for name, each in schema.get("properties", {}).items():
        members = [each, *each.get("oneOf", []), *each.get("anyOf", [])]
        for member in members:
            if "$ref" in member:
                inner = definitions[member["$ref"].rpartition("/")[2]]
                for key, types in keys(inner, definitions, f"{prefix}{name}.").items():
                    found.setdefault(key, set()).update(types)
            elif "type" in member or "const" in member:
                found.setdefault(prefix + name, set()).add(member.get("type", "string"))
    return found


def keys_of_a_job() -> dict[str, set[str]]:
    """Every dotted key of a job, over all rows of the tables that it names."""
    found = keys(Job.model_json_schema(), Job.model_json_schema()["$defs"])
    for name, field in Job.model_fields.items():
        for table in (each for each in field.metadata if isinstance(each, OneOf)):
            found.pop(name, None)
            for row in table.known.values():
                schema = TypeAdapter(row).json_schema()
                for key, types in keys(schema, schema.get("$defs", {}), f"{name}.").items():
                    found.setdefault(key, set()).update(types)
    return found


def test_factors_of_training_are_keys_of_a_job() -> None:
    words = {int: "integer", float: "number", str: "string", bool: "boolean"}
    real = keys_of_a_job()
    factors = dict(KINDS["train"].factors)
    assert factors.pop("seed").type is int and "train.seeds" in real
    for name, factor in factors.items():
        assert words[factor.type] in real[name], name
    no_scalars = {"array"}
    plain = {name for name, types in real.items() if types - no_scalars - {"null"}}
    further = KINDS["train"].further
    left_out = {name for name in plain - set(factors) if further(name, 1, {}) is None}
    assert left_out == {
        "name",
        "train.telemetry_every",
        "train.checkpoint_every",
        "train.timeout_s",
        "train.keep_every",
        "train.settings",  # the keys that it sets are factors
        *(f"gradient.machine.{name}" for name in UNITS),
    }


@every("name", KINDS.keys() - {"command"})  # whose studies name it
def test_the_work_of_a_kind_is_a_factor(name: str) -> None:
    assert KINDS[name].work in KINDS[name].factors
