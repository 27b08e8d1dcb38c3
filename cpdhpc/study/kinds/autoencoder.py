"""The autoencoder split over ranks: what may be varied, as plain data for login nodes."""

from __future__ import annotations

from ..factors import Factor, Factors, Kind, Value, at_least, one_of

RATE = 1e9  # FLOP/s of a rank: a slow one, as the estimate is an upper one


def _positive(text: str, default: int | None) -> Factor:
    return Factor(text, int, default=default, check=at_least(1))


def _blocks(of: Factors) -> int:
    return (int(of["image"]) - int(of["field"])) // int(of["step"]) + 1


def _used(given: Factors) -> dict[str, Value]:
    """Return the factors. Raises ValueError where the image is too small. See Kind.used."""
    if int(given["field"]) > int(given["image"]):
        raise ValueError(f"field={given['field']}: more than image={given['image']}")
    if int(given["pool"]) > _blocks(given):
        raise ValueError(f"pool={given['pool']}: more than the {_blocks(given)} blocks there are")
    return dict(given)


def _fits(used: Factors, ranks: int) -> str | None:
    blocks = _blocks(used) ** 2
    return None if ranks <= blocks else f"{blocks} blocks of filters are fewer than {ranks} ranks"


def _time_s(used: Factors, ranks: int, repeats: int) -> float:
    inputs = int(used["field"]) ** 2 * int(used["channels"])
    parameters = _blocks(used) ** 2 * int(used["maps"]) * inputs
    return repeats * (1e-2 + 10 * parameters * int(used["batch"]) / RATE / ranks)


AUTOENCODER = Kind(
    factors={
        "image": _positive("side of the images, pixels", 200),
        "channels": _positive("values of a pixel", 3),
        "field": _positive("side of a receptive field, pixels", 10),
        "step": _positive("from one block of filters to the next, pixels", 4),
        "maps": _positive("filters of a block", None),
        "pool": _positive("side of a pool, blocks", 3),
        "batch": _positive("images of an iteration", 96),
        "threads": Factor(
            "threads of torch of a rank; 0: the cores it owns", int, default=0, check=at_least(0)
        ),
        "dtype": Factor("numbers", str, default="float32", check=one_of(("float32", "float64"))),
    },
    work="maps",
    used=_used,
    fits=_fits,
    time_s=_time_s,
    sample="an iteration of training: forward, backward, update and the ranks' agreement on it",
    measuring="cpdhpc.measure.autoencoder",
)
