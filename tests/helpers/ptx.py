"""PTX run by NumPy, all threads of a launch at once: what NVRTC really makes of the kernels.

Every access is checked for bounds and alignment, every shuffle and vote for a warp that is whole.
An instruction that is not known is an error. Source: NVIDIA's PTX ISA.
"""

import operator
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

LANES = 32
LAST = 1 << 60  # where a thread is that has ended
CANONICAL = np.uint32(0x7FFFFFFF)  # the NaN that float32 arithmetic gives
LOCAL_BASE = 1 << 40  # of addresses of a thread's own memory
MEETINGS = ("shfl", "vote")
SPECIAL = ("%tid.x", "%ctaid.x", "%ntid.x", "%nctaid.x")
WIDTHS = {"%p": "?", "%rs": "u2", "%rd": "u8", "%fd": "u8", "%r": "u4", "%f": "u4", "%S": "u8"}
TYPES = {"f16": "f2", "f32": "f4", "f64": "f8", "pred": "?"} | {
    f"{kind}{bits}": f"{'i' if kind == 's' else 'u'}{bits // 8}"
    for kind in "sub"
    for bits in (8, 16, 32, 64)
}
COMPARE = {
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le,
    "gt": operator.gt, "ge": operator.ge,
}  # fmt: skip
FLOAT8 = {"e4m3x2": ml_dtypes.float8_e4m3fn, "e5m2x2": ml_dtypes.float8_e5m2}
BITWISE = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
ARITHMETIC: dict[str, Callable[..., Any]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "max": np.maximum,
    "min": np.minimum,
}  # fmt: skip
Array = np.ndarray


class Fault(Exception):
    """What a GPU would not survive, or not do the same way twice."""


class Instruction(NamedTuple):
    """One line of PTX: the predicate that guards it, its name in parts, operands."""

    guard: str
    unless: bool
    parts: list[str]
    operands: list[str]
    text: str


class Kernel(NamedTuple):
    """A kernel: its parameters' names and types, its local memory, code, and where labels are."""

    parameters: dict[str, str]
    local_bytes: int
    code: list[Instruction]
    labels: dict[str, int]


def kernels(text: str) -> dict[str, Kernel]:
    """Return the kernels of a module by name."""
    entry = re.compile(r"\.visible \.entry (\w+)\(([^)]*)\)([^{]*)\{\n(.*?)\n\}\n", re.S)
    return {name: _kernel(given, body) for name, given, _, body in entry.findall(text)}


def _kernel(given: str, body: str) -> Kernel:
    parameters = {
        name: kind for kind, name in re.findall(r"\.param \.(\w+)[^,\n]*?(\w+),?\n", given)
    }
    depot = re.search(r"\.local .*__local_depot\d+\[(\d+)\]", body)
    kernel = Kernel(parameters, int(depot[1]) if depot else 0, [], {})
    # Of a pair of halves one may be a register of its own block: nobody reads it.
    alone = r"\{\s*\.reg \.b(?:16|32) (\w+);\s*(mov\.b(?:32|64)\s+\{)\1(.*?;)\s*\}"
    body = re.sub(alone, r"\2_\3", body)
    for line in re.sub(r"//.*", "", body).splitlines():
        line = line.strip().rstrip(";").replace("\t", " ")
        if label := re.fullmatch(r"(\$\w+):", line):
            kernel.labels[label[1]] = len(kernel.code)
        elif line and line not in "{}" and not line.startswith("."):
            guarded = re.match(r"@(!?)(%p\d+) +(.*)", line)
            name, _, rest = (guarded[3] if guarded else line).partition(" ")
            operands = re.findall(r"\[.*?\]|\{.*?\}|[^\s,]+", rest)
            guard, unless = (guarded[2], guarded[1] == "!") if guarded else ("", False)
            kernel.code.append(Instruction(guard, unless, name.split("."), operands, line))
    return kernel


class Run:
    """A launch of blocks of threads with arguments: numbers, or addresses of arrays in memory."""

    def __init__(
        self, kernel: Kernel, blocks: int, threads: int, arguments: list[int], memory: list[Array]
    ) -> None:
        self.kernel, self.count, self.steps = kernel, blocks * threads, 0
        self.memory = [
            (a.__array_interface__["data"][0], a.reshape(-1).view(np.uint8)) for a in memory
        ]
        self.arguments = dict(zip(kernel.parameters, arguments, strict=True))
        self.local = np.full((self.count, kernel.local_bytes), 0xA5, np.uint8)
        number = np.arange(self.count, dtype=np.uint32)
        places = (number % threads, number // threads, threads + 0 * number, blocks + 0 * number)
        self.registers: dict[str, Array] = dict(zip(SPECIAL, places, strict=True))
        self.at = np.zeros(self.count, np.int64)
        with np.errstate(all="ignore"):
            self.all_threads()

    def all_threads(self) -> None:
        """The threads that are furthest behind go on, as those that parted meet again so."""
        while (pc := int(self.at.min())) != LAST:
            who = np.flatnonzero(self.at == pc)
            if self.kernel.code[pc].parts[0] in MEETINGS:
                pc, who = self.ready()
            instruction = self.kernel.code[pc]
            self.at[who] = pc + 1
            if instruction.guard:
                who = who[self.registers[instruction.guard][who] != instruction.unless]
            self.steps += 1
            if who.size:
                try:
                    self.step(instruction, who)
                except Fault as fault:
                    raise Fault(f"{instruction.text}: {fault}") from None

    def ready(self) -> tuple[int, Array]:
        """Return the first place where threads can go on, whole warps where these meet."""
        for pc in np.unique(self.at[self.at < LAST]).tolist():
            here = self.at == pc
            if self.kernel.code[pc].parts[0] in MEETINGS:
                here = here.reshape(-1, LANES).all(1).repeat(LANES)
            if here.any():
                return pc, np.flatnonzero(here)
        raise Fault(f"{self.kernel.code[int(self.at.min())].text}: lanes of a warp part here")

    # Registers and operands.

    def get(self, name: str, kind: str, who: Array) -> Array:
        """Return an operand of some threads as a type of PTX."""
        dtype = np.dtype(TYPES[kind])
        if name in self.registers:
            value = self.registers[name][who]
            if value.dtype.itemsize != dtype.itemsize:
                raise Fault(f"{name} is no {kind}")
            return value.view(dtype)
        if name.startswith("__local_depot"):
            number = LOCAL_BASE
        elif re.fullmatch(r"0[fd][0-9A-F]+", name):
            number = int(name[2:], 16)
        elif re.fullmatch(r"-?\d+|0x[0-9a-fA-F]+", name):
            number = int(name, 0)
        else:
            raise Fault(f"{name} was not written")
        bits = 8 * dtype.itemsize
        plain = np.full(who.size, number % (1 << bits), f"u{dtype.itemsize}")
        return plain.view(dtype) if kind != "pred" else plain != 0

    def put(self, name: str, value: Any, who: Array) -> None:
        """Write a register of some threads; a narrow value fills a wide one by its sign."""
        if name == "_":
            return
        width = WIDTHS[re.match(r"%[a-zS]+", name)[0][:3].rstrip("P")]  # type: ignore[index]
        if name not in self.registers:
            self.registers[name] = np.zeros(self.count, width)
        dtype = np.dtype(width)
        value = np.asarray(value)
        if value.dtype.itemsize != dtype.itemsize:
            value = value.astype(f"{value.dtype.kind}{dtype.itemsize}")
        self.registers[name][who] = value.view(dtype)

    # Memory.

    def bytes_at(self, operand: str, kind: str, space: str, who: Array) -> tuple[Array, Array]:
        """Return the memory that threads name, as a type, and the places in it."""
        base, _, offset = operand.strip("[]").partition("+")
        address = self.get(base, "u64", who).astype(np.int64) + int(offset or 0)
        size = np.dtype(TYPES[kind]).itemsize
        if (address % size).any():
            raise Fault("misaligned")
        first, last = int(address.min()), int(address.max()) + size
        if space == "local":
            if first < LOCAL_BASE or last > LOCAL_BASE + self.kernel.local_bytes:
                raise Fault("out of bounds of local memory")
            place = address - LOCAL_BASE + who * self.kernel.local_bytes
            return self.local.reshape(-1).view(TYPES[kind]), place // size
        for start, raw in self.memory:
            if start <= first and last <= start + raw.size:
                return raw[: raw.size // size * size].view(TYPES[kind]), (address - start) // size
        raise Fault(f"out of bounds: {first:x} to {last:x}")

    def load(self, i: Instruction, who: Array) -> None:
        kind, target = i.parts[-1], i.operands[0]
        if i.parts[1] == "param":
            name = i.operands[1].strip("[]")
            number = self.arguments[name] % (1 << 8 * np.dtype(TYPES[kind]).itemsize)
            if TYPES[self.kernel.parameters[name]][1] != TYPES[kind][1]:
                raise Fault("another size than the parameter's")
            self.put(target, np.full(who.size, number, f"u{TYPES[kind][1]}"), who)
        else:
            memory, place = self.bytes_at(i.operands[1], kind, i.parts[1], who)
            self.put(target, memory[place], who)

    def store(self, i: Instruction, who: Array) -> None:
        kind, source = i.parts[-1], i.operands[1]
        memory, place = self.bytes_at(i.operands[0], kind, i.parts[1], who)
        if np.unique(place).size != place.size:
            raise Fault("two threads write to one place")
        wide = self.registers[source][who] if source in self.registers else None
        value = self.get(source, kind, who) if wide is None else wide.astype(f"u{TYPES[kind][1]}")
        memory[place] = value.view(TYPES[kind])

    # Instructions.

    def step(self, i: Instruction, who: Array) -> None:
        name, kind, to = i.parts[0], i.parts[-1], i.operands[0] if i.operands else ""
        if name == "bra":
            self.at[who] = self.kernel.labels[i.operands[0]]
        elif name == "ret":
            self.at[who] = LAST
        elif name == "ld":
            self.load(i, who)
        elif name == "st":
            self.store(i, who)
        elif name in MEETINGS:
            self.meet(i, who)
        elif name == "atom":
            memory, place = self.bytes_at(i.operands[1], kind, "global", who)
            np.add.at(memory, place, self.get(i.operands[2], kind, who))
        elif name == "mov" and "{" in i.text:
            self.halves(i, who)
        elif name == "cvt":
            self.put(to, self.converted(i, who), who)
        else:
            self.put(to, self.value(i, who), who)

    def value(self, i: Instruction, who: Array) -> Array:
        """Return what an instruction makes of its operands."""
        name, kind, given = i.parts[0], i.parts[-1], i.operands[1:]
        operand = [] if name == "selp" else [self.get(each, kind, who) for each in given[:2]]
        if name in ("mov", "cvta"):
            return operand[0]
        if name == "setp" and i.parts[1][:2] in COMPARE and i.parts[2:-1] in ([], ["ftz"]):
            left, right = (flushed(each) if "ftz" in i.parts else each for each in operand)
            unordered = i.parts[1].endswith("u") & (np.isnan(left) | np.isnan(right))
            return COMPARE[i.parts[1][:2]](left, right) | unordered
        if name == "selp":
            chosen = self.get(given[2], "pred", who)
            return np.where(chosen, self.get(given[0], kind, who), self.get(given[1], kind, who))
        if name in BITWISE:
            return BITWISE[name](*operand)
        if name == "not":
            return ~operand[0]
        if name in ("shl", "shr"):
            return self.shifted(name, operand[0], self.get(given[1], "u32", who))
        if i.parts == ["fma", "rn", "f32"]:
            return fused(*operand, self.get(given[2], kind, who))
        if kind in ("f32", "f64"):
            return self.rounded(i, operand)
        if name == "neg":
            return -operand[0]
        if i.parts[1] == "wide":
            wide = f"{operand[0].dtype.kind}{2 * operand[0].dtype.itemsize}"
            return operand[0].astype(wide) * operand[1].astype(wide)
        if name == "mad" and i.parts[1] == "lo":
            return operand[0] * operand[1] + self.get(given[2], kind, who)
        if name == "shf" and i.parts[1:3] == ["l", "wrap"]:
            by = self.get(given[2], "u32", who) % np.uint32(32)
            whole = operand[1].astype(np.uint64) << np.uint64(32) | operand[0]
            return (whole << by >> np.uint64(32)).astype(np.uint32)
        if name == "div":
            return np.trunc(operand[0] / operand[1]).astype(operand[0].dtype)  # below 2**53
        if name in ARITHMETIC and i.parts[1:-1] in ([], ["lo"]):
            return ARITHMETIC[name](*operand)
        raise Fault("an instruction that is not known")

    def shifted(self, name: str, value: Array, by: Array) -> Array:
        """Return what a shift gives: counts beyond the width leave nothing, or the sign."""
        bits = 8 * value.dtype.itemsize
        within = np.minimum(by, bits - 1).astype(value.dtype)
        if name == "shr" and value.dtype.kind == "i":
            return value >> within
        found = value << within if name == "shl" else value >> within
        return np.where(by < bits, found, value.dtype.type(0))

    def rounded(self, i: Instruction, operand: list[Array]) -> Array:
        """Return a sum, difference, product or ratio of floats, or a magnitude or negative."""
        name, way = i.parts[0], i.parts[1:-1]
        if "ftz" in way:
            operand = [flushed(each) for each in operand]
        if name in ("abs", "neg"):
            return np.abs(operand[0]) if name == "abs" else -operand[0]
        if (name, way) == ("max", ["NaN"]):
            return np.where(np.isnan(found := np.maximum(*operand)), CANONICAL.view("f4"), found)
        if name == "copysign":  # the sign of the first in the value of the second
            return np.copysign(operand[1], operand[0])
        if name not in ("add", "sub", "mul", "div") or way not in (["rn"], ["rn", "ftz"], ["ftz"]):
            raise Fault("an instruction that is not known")
        found = ARITHMETIC[name](*operand)
        if i.parts[-1] == "f64":
            return found
        found = flushed(found) if "ftz" in way else found
        return np.where(np.isnan(found), CANONICAL.view(np.float32), found)

    def converted(self, i: Instruction, who: Array) -> Array:
        to, of, way = i.parts[-2], i.parts[-1], i.parts[1:-2]
        value = self.registers[i.operands[1]][who]
        if of in FLOAT8 and (way, to) == (["rn"], "f16x2"):
            return value.view(np.uint8).view(FLOAT8[of]).astype(np.float16).view(np.uint32)
        if of[0] == "f":
            value = value.view(TYPES[of])
            if to in FLOAT8:
                pair = np.stack([self.get(i.operands[2], of, who), value], axis=-1)  # lower first
                return float8_of(pair, FLOAT8[to]).view(np.uint16)[:, 0]
            if to[0] == "f":
                return value.astype(TYPES[to])
            if way not in (["rzi"], ["rzi", "ftz"]) or to != "s32":
                raise Fault("an instruction that is not known")
            value = flushed(value) if "ftz" in way else value
            limit = np.iinfo(np.int32)
            inside = np.clip(np.nan_to_num(value.astype(np.float64)), limit.min, limit.max)
            return np.trunc(inside).astype(np.int32)
        if to[0] == "f":
            return value.view(TYPES[of]).astype(TYPES[to])  # rounds to nearest even
        narrow = value.astype(f"u{TYPES[of][1]}").view(TYPES[of])
        return narrow.astype(TYPES[to])

    def halves(self, i: Instruction, who: Array) -> None:
        """mov.b64 or mov.b32 between a register and two halves."""
        to, source = i.operands
        whole, half = ("u64", "u32") if i.parts[-1].startswith("b64") else ("u32", "u16")
        bits = np.dtype(TYPES[whole]).type(8 * np.dtype(TYPES[half]).itemsize)
        if to.startswith("{"):
            both = self.get(source, whole, who)
            low, high = to.strip("{}").replace(",", " ").split()
            self.put(low, both.astype(TYPES[half]), who)
            self.put(high, (both >> bits).astype(TYPES[half]), who)
            return
        low, high = source.strip("{}").replace(",", " ").split()
        upper = self.get(high, half, who).astype(TYPES[whole]) << bits
        self.put(to, upper | self.get(low, half, who), who)

    def meet(self, i: Instruction, who: Array) -> None:
        """Let the lanes of whole warps exchange values."""
        if (self.get(i.operands[-1], "u32", who) != 0xFFFFFFFF).any() or who.size % LANES:
            raise Fault("lanes are left out")
        shape = (-1, LANES)
        if i.parts[:3] == ["vote", "sync", "ballot"]:
            bits = self.get(i.operands[1], "pred", who).reshape(shape)
            word = (bits.astype(np.uint64) << np.arange(LANES, dtype=np.uint64)).sum(1)
            self.put(i.operands[0], word.astype(np.uint32).repeat(LANES), who)
            return
        step = self.get(i.operands[2], "u32", who).reshape(shape)
        if (
            i.parts[:3] != ["shfl", "sync", "bfly"]
            or (self.get(i.operands[3], "u32", who) != 31).any()
        ):
            raise Fault("an instruction that is not known")
        value = self.get(i.operands[1], "u32", who).reshape(shape)
        lanes = np.arange(LANES) ^ step.astype(np.int64)
        self.put(i.operands[0].partition("|")[0], np.take_along_axis(value, lanes, 1).ravel(), who)


def float8_of(value: Array, dtype: Any) -> Array:
    """Return the codes of float32 to nearest, the largest one's where that is infinity or more."""
    most = np.float32(ml_dtypes.finfo(dtype).max)
    return np.clip(value, -most, most).astype(dtype).view(np.uint8)  # NaN stays


def fused(a: Array, b: Array, c: Array) -> Array:
    """Return a b + c, rounded once, of products that float32 holds: others are not expected."""
    product = a * b
    if (product != a.astype(np.float64) * b).any():
        raise Fault("a product that is not exact")
    return product + c


def flushed(value: Array) -> Array:
    """Return float32 without subnormal numbers, as .ftz has it."""
    return np.where(
        np.abs(value) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), value), value
    )
