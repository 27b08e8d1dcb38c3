from typing import Any

_Cast = tuple[int, ...]
_Key = tuple[int, int]

def encode(
    threads: int, cast: _Cast, k: int, key: _Key, offset: int, x: Any, codes: Any, /
) -> None: ...
def decode(threads: int, cast: _Cast, k: int, codes: Any, out: Any, /) -> None: ...
def pack(threads: int, bits: int, codes: Any, words: Any, /) -> None: ...
def unpack(threads: int, bits: int, words: Any, codes: Any, /) -> None: ...
def amax_tiles(threads: int, x: Any, amax: Any, /) -> None: ...
def encode_tiles(
    threads: int,
    cast: _Cast,
    fit: bool,
    key: _Key,
    offset: int,
    x: Any,
    words: Any,
    shifts: Any,
    counts: Any = ...,
    /,
) -> None: ...
def decode_tiles(threads: int, cast: _Cast, words: Any, shifts: Any, out: Any, /) -> int: ...
def decode_add_tiles(
    threads: int, cast: _Cast, words: Any, shifts: Any, x: Any, out: Any, /
) -> None: ...
def decode_add_encode_tiles(
    threads: int,
    cast: _Cast,
    fit: bool,
    key: _Key,
    offset: int,
    words_in: Any,
    shifts_in: Any,
    x: Any,
    words: Any,
    shifts: Any,
    out: Any,
    counts: Any,
    /,
) -> int: ...
def add_integers_tiles(
    threads: int, cast: _Cast, a: Any, bits_a: int, b: Any, bits_b: int, words: Any, bits: int, /
) -> None: ...
def add_encode_integers_tiles(
    threads: int,
    cast: _Cast,
    key: _Key,
    offset: int,
    words_in: Any,
    bits_in: int,
    shifts: Any,
    x: Any,
    words: Any,
    bits: int,
    counts: Any = ...,
    /,
) -> None: ...
def decode_integers_tiles(
    threads: int, cast: _Cast, words: Any, bits: int, shifts: Any, out: Any, /
) -> int: ...
def pack_trits(threads: int, words: Any, trits: Any, /) -> None: ...
def unpack_trits(threads: int, trits: Any, words: Any, /) -> None: ...
def make_moves(rows: Any, memory: tuple[Any, ...], x: Any, out: Any, inside: int, /) -> Any: ...
def run_moves(
    program: Any,
    first: int,
    last: int,
    serial: int,
    number: int,
    looks: int,
    x: Any,
    out: Any,
    /,
) -> int | None: ...
def read_loan(pid: int, message: Any, out: Any, /) -> bool: ...
def read_memory(pid: int, address: int, out: Any, /) -> None: ...
def store_release(target: Any, value: int, /) -> None: ...
def load_acquire(source: Any, /) -> int: ...
def clone() -> str: ...
def clones() -> list[str]: ...
def use_clone(name: str, /) -> None: ...
