"""Errors about one argument keep their fields where their words or their process change."""

import pickle
from typing import Any

import pytest
from refusing import refused

from cpdhpc.errors import ArgumentError, ArgumentTypeError, ConfigError, reworded, told
from cpdhpc.methods import said_by
from cpdhpc.world.ranks import of_rank, portable


@pytest.mark.parametrize("kind", [ArgumentError, ArgumentTypeError])
@pytest.mark.parametrize("value", [3, lambda: 3])
def test_fields_outlive_other_words_and_another_process(kind: Any, value: Any) -> None:
    error = said_by("g", of_rank(2, kind("f", "a", value, "must be 4")), f"f: a={value}: no")
    error = reworded(pickle.loads(portable(error) or b""), "other words")
    with refused("g", "a") as caught:
        raise error
    assert type(error) is kind and str(error) == "other words" and caught.value.allowed[-1] == "4"
    assert caught.value.value == (3 if value == 3 else repr(value))


def test_messages() -> None:
    assert str(ArgumentError("f", "a", 3, "must be 4")) == "f: a=3: must be 4"
    assert str(ArgumentTypeError("f", "a", [], "must be 4", "a list")) == "f: a=a list: must be 4"
    for error, said in ((KeyError("x"), "here: KeyError: 'x'"), (ConfigError("as it is"),) * 2):
        with pytest.raises(ConfigError) as caught, told("here"):
            raise error
        assert str(caught.value) == str(said)


def test_errors_of_others_keep_their_type_and_words() -> None:
    assert repr(of_rank(2, OSError(2, "no"))) == "FileNotFoundError('rank 2 | [Errno 2] no')"
    assert reworded(ConfigError("x", key="k"), "y").key == "k"
    with pytest.raises(AssertionError), refused("f", "b"):
        raise ArgumentError("f", "a", 3, "must be 4")
