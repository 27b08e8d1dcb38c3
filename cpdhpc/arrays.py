"""Arrays in small formats for NumPy, CuPy and torch: rounded, as codes, as bits, in blocks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from .errors import ArgumentError
from .formats import (
    IN_BLOCKS,
    SHARED,
    Cast,
    Format,
    Microscaling,
    Overflow,
    Rounding,
    TwoScales,
    named,
    packed_bytes,
    parse_format,
    shift_count,
    wire_scaling,
)
from .methods import check_integer, said_by
from .ops import backend_of, misread, type_name
from .randomness import check_key, random_key

CODE_DTYPES = ("uint8", "uint16", "uint32")


def quantize(
    x: Any,
    fmt: str | Format,
    rounding: Rounding = "nearest",
    overflow: Overflow | None = None,
    *,
    shift: int = 0,
    seed: int = 0,
    random_bits: int = 0,
) -> Any:
    """Return the numbers of a format that x rounds to, as a new array (CPD's float_quantize).

    x: float32, any shape; NumPy array, CuPy array or torch tensor on the CPU; not changed. The
        gradient of a tensor passes through unchanged (Bengio et al., arXiv 1308.3432), even if
        values saturate; precision.quantize rounds it too
    fmt: a FloatFormat or TableFormat or its name: "e5m2", "e4m3fn", "bf16", "posit8es1", ...
    rounding, overflow, random_bits: as in Cast
    shift: round x * 2**shift and divide again: moves the range of the format, exactly
    seed: selects the random bits of rounding "stochastic"; the same seed gives the same result
    Returns float32 of x's kind and shape. NaN stays NaN and infinity stays infinity, or becomes
    NaN in formats without it (e4m3fn).
    Raises TypeError if x is something else; ValueError for an unknown format or word, a shift
    outside the format's shift_min..shift_max, and if x holds NaN or infinity and the format
    can hold neither (e2m1fn), or NaN and the format has only infinity (man = 0).
    """
    cast = _cast("quantize", fmt, rounding, overflow, shift, random_bits)

    def rounded(x: Any) -> Any:
        flat, restore = _flat("quantize", "x", x, ("float32",))
        codes = _encode("quantize", flat, cast, shift, seed)
        return restore(backend_of(flat).decode(codes, cast.fmt, shift))

    if not is_tensor(x):
        return rounded(x)
    from .ops.tensors import straight_through

    return straight_through(x, rounded)


def encode(
    x: Any,
    fmt: str | Format,
    rounding: Rounding = "nearest",
    overflow: Overflow | None = None,
    *,
    shift: int = 0,
    seed: int = 0,
    random_bits: int = 0,
) -> Any:
    """Return the code of each x * 2**shift, one integer each.

    x: float32, any shape; it and the other arguments and errors as for quantize; TypeError for a
        tensor that requires a gradient, as codes have none
    Returns x's kind and shape: uint8 for formats up to 8 bits, uint16 up to 16, else uint32.
    """
    cast = _cast("encode", fmt, rounding, overflow, shift, random_bits)
    flat, restore = _flat("encode", "x", x, ("float32",))
    codes = _encode("encode", flat, cast, shift, seed)
    return restore(codes.astype(_code_dtype(cast.fmt.bits)))


def decode(codes: Any, fmt: str | Format, shift: int = 0) -> Any:
    """Return the number of each code times 2**-shift.

    codes: uint8, uint16 or uint32, any shape; NumPy array, CuPy array or torch tensor on the CPU
    fmt, shift: the same as for encode
    Returns float32 of the kind and shape of codes.
    Raises TypeError if codes is something else; ValueError for an unknown format, a shift out
    of range, and codes that do not fit into the format's bits.
    """
    cast = _cast("decode", fmt, "nearest", None, shift)
    flat, restore = _flat("decode", "codes", codes, CODE_DTYPES)
    wide = _checked_codes("decode", flat, cast.fmt.bits)
    return restore(backend_of(flat).decode(wide, cast.fmt, shift))


def pack(codes: Any, bits: int) -> Any:
    """Return codes packed to a width in bits, in whole tiles of 1024 values: the bytes that travel.

    codes: uint8, uint16 or uint32, any shape, taken flat; bits: 1..32
    Returns uint8[ceil(n / 1024) * 128 * bits] of the kind of codes.
    Raises TypeError if codes is something else; ValueError for bits out of range and codes
    of 2**bits or more.
    """
    _check_bits("pack", bits)
    flat, restore = _flat("pack", "codes", codes, CODE_DTYPES)
    packed = backend_of(flat).pack(_checked_codes("pack", flat, bits), bits)
    return restore(packed, packed.shape)


def unpack(packed: Any, bits: int, n: int) -> Any:
    """Return the n codes in an array made by pack.

    packed: uint8[ceil(n / 1024) * 128 * bits]; bits: 1..32; n: the number of codes
    Returns uint8[n] for bits up to 8, uint16[n] up to 16, else uint32[n], of the kind of packed.
    Raises TypeError if packed is something else; ValueError if bits or n is out of range
    or packed does not have the size for them.
    """
    _check_bits("unpack", bits)
    flat, restore = _flat("unpack", "packed", packed, ("uint8",))
    check_integer("unpack", "n", n)
    if n < 0:
        raise ArgumentError("unpack", "n", n, "a number of codes, 0 or more, is allowed")
    if flat.size != packed_bytes(n, bits):
        raise ValueError(
            f"unpack: packed has {flat.size} bytes: "
            f"n={n} codes of {bits} bits take {packed_bytes(n, bits)}"
        )
    codes = backend_of(flat).unpack(flat, bits, n)
    return restore(codes.astype(_code_dtype(bits)), (n,))


class Blocks(NamedTuple):
    """Elements in blocks that share a scale, as other libraries keep them.

    elements: uint8[..., k * bits / 8], in order, the lowest bits first: of 4 bits two in a byte,
        the first in its lower half
    scales: uint8[..., k / block]: of mxfp* E8M0, blocks of 32; of nvfp4 codes of e4m3fn, of 16
    scale: of nvfp4 float32[1], by which all is multiplied; None of mxfp*
    """

    elements: Any
    scales: Any
    scale: Any = None


def pack_blocks(x: Any, fmt: str, rounding: Rounding = "nearest", *, seed: int = 0) -> Blocks:
    """Return x in a format whose neighbours share scales, along its last axis.

    x: float32[..., k], k a multiple of 32, of nvfp4 of 16; NumPy array, CuPy array or torch tensor
        on the CPU
    fmt: "mxfp8", "mxfp8-e5m2", "mxfp6", "mxfp6-e3m2", "mxfp4" or "nvfp4"; seed: as for quantize
    Returns arrays of x's kind. A block with NaN or infinity has the scale NaN.
    Raises TypeError where x is something else; ValueError for another format or k.
    Source: OCP Microscaling Formats v1.0; of nvfp4 NVIDIA, arXiv 2509.25149.
    """
    kind, block = _blocked("pack_blocks", fmt)
    flat, restore = _flat("pack_blocks", "x", x, ("float32",))
    shape, n = tuple(x.shape), flat.size
    if not shape or shape[-1] % block:
        allowed = f"the last axis must be a multiple of {block}"
        raise ArgumentError("pack_blocks", "x.shape", shape, allowed)
    check_key("pack_blocks", "seed", seed)
    ops, scale, key = backend_of(flat), None, random_key(seed)

    def room(size: int, dtype: type[np.generic] = np.uint8) -> Any:
        return np.empty_like(flat, dtype, shape=(size,))

    if isinstance(kind, TwoScales):
        words, scales, scale = room(n // 2), room(n // block), room(1, np.float32)
        ops.encode_two_scales(flat, Cast(kind, rounding), words, scales, scale, key=key)
        scale = restore(scale, (1,))
    else:  # whole tiles, of which the last may be longer than x
        words, scales = room(packed_bytes(n, kind.bits)), room(shift_count(n, block))
        ops.encode_tiles(flat, Cast(kind, rounding), words, scales, fit=True, key=key)
    row = shape[-1] * kind.bits // 8
    return Blocks(
        restore(words[: n * kind.bits // 8], (*shape[:-1], row)),
        restore(scales[: n // block], (*shape[:-1], shape[-1] // block)),
        scale,
    )


def unpack_blocks(elements: Any, scales: Any, fmt: str, scale: Any = None) -> Any:
    """Return the numbers of blocks, of pack_blocks or another library: float32[..., k].

    elements, scales, scale: as of Blocks, of one kind, arrays of ml_dtypes by .view(np.uint8);
        fmt: as for pack_blocks. Scales lie in the order of the blocks: those that hardware wants
        shuffled are to be put back first. A number of nvfp4 is element * (scale of the block *
        scale), and each product is rounded to float32
    Raises TypeError where they are something else; ValueError for another format, and sizes that
    do not belong together.
    """
    kind, block = _blocked("unpack_blocks", fmt)
    words, restore = _flat("unpack_blocks", "elements", elements, ("uint8",))
    factors, _ = _flat("unpack_blocks", "scales", scales, ("uint8",))
    row, n = tuple(elements.shape), words.size * 8 // kind.bits
    count = tuple(scales.shape)
    if not row or row[:-1] != count[:-1] or row[-1] * 8 != count[-1] * block * kind.bits:
        raise ValueError(
            f"unpack_blocks: elements of shape {list(row)}, scales of {list(count)}: {fmt} has "
            f"{block * kind.bits // 8} bytes of elements for each scale of {block}"
        )
    if (scale is not None) != isinstance(kind, TwoScales):
        allowed = "a float32[1] is needed" if scale is None else "mxfp* have none"
        raise ArgumentError("unpack_blocks", "scale", scale, f"{fmt}: {allowed}")
    ops, out = backend_of(words), np.empty_like(words, np.float32, shape=(n,))
    if isinstance(kind, TwoScales):
        of_all, _ = _flat("unpack_blocks", "scale", scale, ("float32",))
        ops.decode_two_scales(words, factors, of_all, out)
    else:
        tile_words = np.zeros_like(words, shape=(packed_bytes(n, kind.bits),))
        tile_scales = np.zeros_like(words, shape=(shift_count(n, block),))
        tile_words[: words.size], tile_scales[: factors.size] = words, factors
        ops.decode_tiles(tile_words, tile_scales, kind, out)
    return restore(out, (*row[:-1], count[-1] * block))


def _blocked(function: str, fmt: str) -> tuple[Microscaling | TwoScales, int]:
    """Return the format of a name whose neighbours share scales, and how many do."""
    if not isinstance(fmt, str) or fmt not in IN_BLOCKS:
        raise ArgumentError(function, "fmt", fmt, f"must be one of {', '.join(IN_BLOCKS)}")
    return IN_BLOCKS[fmt], SHARED[wire_scaling(fmt)]


def _cast(
    function: str,
    fmt: str | Format,
    rounding: Rounding,
    overflow: Overflow | None,
    shift: int,
    random_bits: int = 0,
) -> Cast:
    """The checked Cast; a shift is exact only within the limits of the format."""
    try:
        cast = Cast(parse_format(fmt), rounding, overflow, random_bits)
    except (TypeError, ValueError) as error:
        raise said_by(function, error) from None
    check_integer(function, "shift", shift)
    low, high = cast.fmt.shift_min, cast.fmt.shift_max
    if not low <= shift <= high:
        allowed = f"{named(fmt)} allows {low}..{high}, where it is exact"
        raise ArgumentError(function, "shift", shift, allowed)
    return cast


def _encode(function: str, x: Any, cast: Cast, shift: int, seed: int) -> Any:
    """Encode a flat array, unless it holds values that the format would turn into other numbers."""
    fmt = cast.fmt
    check_key(function, "seed", seed)
    if not fmt.has_nan and bool((x != x).any()):
        raise ValueError(f"{function}: x holds NaN, and {fmt.name} has no code for it")
    if not fmt.carries_nonfinite and bool((abs(x) == np.inf).any()):
        raise ValueError(f"{function}: x holds infinity, and {fmt.name} has no code for it")
    return backend_of(x).encode(x, cast, shift, random_key(seed))


def _code_dtype(bits: int) -> type[np.unsignedinteger[Any]]:
    return np.uint8 if bits <= 8 else np.uint16 if bits <= 16 else np.uint32


def _check_bits(function: str, bits: int) -> None:
    check_integer(function, "bits", bits)
    if not 1 <= bits <= 32:
        raise ArgumentError(function, "bits", bits, "1..32 is allowed")


def _checked_codes(function: str, codes: Any, bits: int) -> Any:
    """codes as uint32, all of them below 2**bits."""
    wide = codes.astype(np.uint32)
    if wide.size and int(wide.max()) >> bits:
        raise ValueError(
            f"{function}: codes: {int(wide.max())} is too large: "
            f"{bits} bits allow 0..{(1 << bits) - 1}"
        )
    return wide


def flat_floats(function: str, argument: str, array: Any) -> tuple[Any, Callable[..., Any]]:
    """Return a float32 array flat, as NumPy's or CuPy's, and a function that restores its kind.

    Raises TypeError, naming the function and the argument, for anything else.
    """
    return _flat(function, argument, array, ("float32",))


def is_tensor(x: Any) -> bool:
    """Whether x is a tensor of torch; torch is then already loaded, so it is not imported here."""
    return isinstance(x, getattr(sys.modules.get("torch"), "Tensor", ()))


def memory_of(what: str, tensor: Any) -> Any:
    """Return the memory of a tensor on the CPU as a NumPy array.

    Raises TypeError if its gradient would be lost, or it has no such memory.
    """
    if tensor.requires_grad and sys.modules["torch"].is_grad_enabled():
        raise TypeError(
            f"{what} requires a gradient, which would be lost: pass its .detach(), or call within "
            "torch.no_grad(); cpdhpc.quantize passes gradients through"
        )
    try:
        check_dense(what, tensor)
        return tensor.detach().resolve_neg().numpy()
    except RuntimeError:  # raised for DTensor, for example, or within torch.func.vmap
        raise _no_memory(what, tensor) from None


def check_dense(what: str, tensor: Any) -> None:
    """Raise TypeError unless a tensor's values lie in memory according to its shape and strides."""
    if str(tensor.layout) != "torch.strided" or tensor.is_nested:
        raise _no_memory(what, tensor)


def _no_memory(what: str, tensor: Any) -> TypeError:
    kind = "nested" if tensor.is_nested else tensor.layout
    return TypeError(
        f"{what} is {type_name(tensor)} of {kind}, whose values are not in memory of its own: "
        "should be a dense tensor"
    )


def check_floats(function: str, argument: str, array: Any) -> None:
    """Raise TypeError, naming both, unless this is a float32 array that flat_floats may take."""
    _check_array(function, argument, array, ("float32",))


def _check_array(function: str, argument: str, array: Any, dtypes: tuple[str, ...]) -> None:
    of_torch = is_tensor(array)
    kind = type(array).__module__.partition(".")[0]
    is_array = of_torch or kind == "cupy" or isinstance(array, np.ndarray)
    came = str(getattr(array, "dtype", "")).removeprefix("torch.") if is_array else ""
    place = array.device.type if of_torch else "cpu"
    if came not in dtypes or place != "cpu":
        name = type_name(array)
        raise TypeError(
            f"{function}: {argument} is {name}{f' of {came}' if came else ''}"
            f"{f' on {place}' if place != 'cpu' else ''}: allowed are {', '.join(dtypes)} "
            "in a NumPy array, a CuPy array or a torch tensor on the CPU"
        )
    if of_torch:
        check_dense(f"{function}: {argument}", array)
    if advice := misread(array):
        raise TypeError(f"{function}: {argument} is {type_name(array)}: {advice}")


def _flat(
    function: str, argument: str, array: Any, dtypes: tuple[str, ...]
) -> tuple[Any, Callable[..., Any]]:
    """Return array as a flat NumPy or CuPy array, and a function that restores kind and shape."""
    _check_array(function, argument, array, dtypes)
    shape, of_torch = tuple(array.shape), is_tensor(array)
    if of_torch:
        plain = memory_of(f"{function}: {argument}", array)
    else:
        plain = np.asarray(array) if isinstance(array, np.ndarray) else array  # no subclasses

    def restore(result: Any, new_shape: tuple[int, ...] = shape) -> Any:
        shaped = result.reshape(new_shape)
        return sys.modules["torch"].from_numpy(shaped) if of_torch else shaped

    return plain.ravel(), restore
