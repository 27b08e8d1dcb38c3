"""Faults planted in CUDA kernels, in graphs and in who keeps memory: does a test notice each?

Each is compiled into the kernels, and the tests of emulated_gpu run until one fails: for windows of
GPU arrays those of MPI, on one rank. Those of graphs and of memory are planted in a copy of the
package, those of graphs tested on two ranks.

    python tests/helpers/gpu_faults.py [kernels] [sizes] [conversions] [moves] [graphs] [devices]
        [memory]
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from training import environment

HERE = Path(__file__).parents[1]  # the tests
TESTS = [
    HERE / f"test_{name}.py"
    for name in (
        "cuda_codec",
        "ops",
        "blocks",
        "selection",
        "passes",
        "gpu_methods",
        "products",
        "integers",
        "packing",
    )
]
FAULTS = {  # what is wrong: the code, and what it becomes
    "a lane is not counted as one of the warp's": (
        "value = max(value, __shfl_xor_sync(ALL_LANES, value, step));",
        "value = max(value, __shfl_xor_sync(0x7fffffffu, value, step));",
    ),
    "the largest of half a warp": (
        "for (int step = CPD_LANES / 2; step; step /= 2)\n        value = max",
        "for (int step = CPD_LANES / 4; step; step /= 2)\n        value = max",
    ),
    "a shuffle that some lanes miss": (
        "u32 saturated = warp_sum(c.saturated);",
        "u32 saturated = lane_of_thread() ? warp_sum(c.saturated) : c.saturated;",
    ),
    "every lane writes the tile's shift, before it is known": (
        "if (how.blocks || lane == 0)\n            shifts[",
        "shifts[",
    ),
    "a block's tiles are counted once": (
        "__device__ i64 tile_stride() { return (i64)gridDim.x * CPD_WARPS; }",
        "__device__ i64 tile_stride() { return (i64)gridDim.x; }",
    ),
    "values beyond the end are written": (
        "CPD_FN void store(float* x, i64 i, i64 n, F value) {\n    if (i < n) x[i] = value;\n}",
        "CPD_FN void store(float* x, i64 i, i64 n, F value) { x[i] = value; }",
    ),
    "values that are not finite are counted per thread only": (
        "if (all && lane_of_thread() == 0) atomicAdd(total, (u64)all);",
        "if (count) *total = (u64)count;",
    ),
    "random bits by the place in the tile": (
        "key, offset + t * CPD_TILE, counts + 3 * t);\n    }\n}\n\nCPD_BOUNDED",
        "key, offset, counts + 3 * t);\n    }\n}\n\nCPD_BOUNDED",
    ),
    "the last tile is taken for a whole one": (
        "return n - t * CPD_TILE < CPD_TILE ? (int)(n - t * CPD_TILE) : CPD_TILE;",
        "return CPD_TILE;",
    ),
    "a row too many of the last tile": (
        "return r * how.value_step() < n - how.first_value();",
        "return r * how.value_step() <= n - how.first_value();",
    ),
    "all lanes are taken to stay inside where one does": (
        "bool all_lanes(bool lane) { return __ballot_sync(ALL_LANES, lane) == ALL_LANES; }",
        "bool all_lanes(bool lane) { return __ballot_sync(ALL_LANES, lane) != 0; }",
    ),
    "the largest magnitude of half its size": ("most >>= 1;", "most >>= 2;"),
    "the second block is decoded over the first": ("body(b * rows + r, read(", "body(r, read("),
    "shifts of the first lane for all blocks": ("if (how.blocks) shifts += lane_of_thread();", ""),
    "no barrier before shared memory is read": (
        "        __syncthreads();\n        for (int t = 0; t < CPD_SIDE",
        "        for (int t = 0; t < CPD_SIDE",
    ),
    "no barrier before shared memory is written again": (
        "        __syncthreads();\n    }\n    if (i < m && j < n)",
        "    }\n    if (i < m && j < n)",
    ),
    "a table of counts for all warps": (
        "u32* table = tables[threadIdx.x / CPD_LANES];",
        "u32* table = tables[0];",
    ),
    "counts added without an atomic": (
        "if (table[b]) atomicAdd(counts + b, table[b]);",
        "if (table[b]) counts[b] = table[b];",
    ),
    "subnormal numbers flushed in sums": (
        'asm("add.rn.f32 %0, %1, %2;" : "=f"(sum) : "f"(a), "f"(b));',
        "sum = a + b; if (sum < 1.17549435e-38f && sum > -1.17549435e-38f) sum = 0.0f;",
    ),
    "the lanes before this one include it": ("return sum - value;", "return sum;"),
    "the largest of a sum is that of its first two terms": (
        "terms.more);\n            most = larger(most, bits_of(value) & CPD_MAGNITUDE);",
        "terms.more);\n            most = larger(most, bits_of(sum[i]) & CPD_MAGNITUDE);",
    ),
    "what is cut loses its sign": ("from_bits(cut | (bits & ~CPD_MAGNITUDE))", "from_bits(cut)"),
}
FAULTS_OF_MOVES = {  # of the kernel that moves windows
    "the first unit of a box is taken for the last of the one before": (
        "if (boxes[middle + 1].first > i)",
        "if (boxes[middle + 1].first >= i)",
    ),
    "a partial sum replaces the total": ("part = value, several = true;", "part = value;"),
    "the mark of a partial sum is taken for a part of the base": (
        "const char* at = arrays.from(term.base % CPD_BEGINS) + term.offset;",
        "const char* at = arrays.from(term.base) + term.offset;",
    ),
    "half of a wide unit is copied": ("return move_copies<Wide>(", "return move_copies<u64>("),
    "sources lie as targets do": (
        "*(const T*)(from + ahead_of(place, term.strides));",
        "*(const T*)(from + ahead_of(place, box.strides));",
    ),
    "sums of short floats are cut, not rounded": (
        """const float wide_sum = add(wide(a), wide(b));
        Type y;""",
        """const float wide_sum = from_bits(bits_of(add(wide(a), wide(b))) & 0xffffe000u);
        Type y;""",
    ),
}
RUNTIME, GRAPHS = "cpdhpc/ops/gpu_runtime.py", "cpdhpc/collectives/cuda_graphs.py"
FAULTS_OF_GRAPHS = {  # the file as well
    "memory that a graph uses is not kept": (
        RUNTIME,
        "self._kept.append(take(size_bytes))\n            found: Result = self._kept[-1]",
        "found: Result = take(size_bytes)",
    ),
    "a capture that failed is not ended": (
        RUNTIME,
        "                    self._stream.end_capture()\n                raise",
        "                    pass\n                raise",
    ),
    "what came is not copied up": (
        GRAPHS,
        "self._runtime.copy_up(came.host, came.received)",
        "pass",
    ),
    "what goes is copied down once only": (
        GRAPHS,
        "            self._copy_down(payload, sent)\n",
        "",
    ),
    "a run does not wait for the one before in another stream": (
        GRAPHS,
        "self._streams.follow(self._ended)",
        "pass",
    ),
    "counts are read before the GPU has written them": (
        GRAPHS,
        "            self._runtime.wait(self._streams.mark())\n",
        "",
    ),
    "the counts of all pieces in one place": (
        GRAPHS,
        "self._counts[number : number + 1]",
        "self._counts[:1]",
    ),
    "kernels are loaded while they are captured": (
        GRAPHS,
        "graphs.rehearse(lambda: self._all(np.empty_like(out), None))",
        "pass",
    ),
    "the rehearsal writes the result": (
        GRAPHS,
        "self._all(np.empty_like(out), None)",
        "self._all(out, None)",
    ),
    "a graph of nothing": (GRAPHS, "graph if self._kernels.count else None", "graph"),
    "the shifts of the first run for ever": (
        GRAPHS,
        "place[:] = shift_bytes(each, segments, self.x.size, self.x)",
        "pass",
    ),
    "random numbers of the first run for ever": (GRAPHS, "if method.is_random:", "if False:"),
}
FAULTS_OF_SIZES = {  # in kernels: numbers of 32 bits, work without strides, one index too many
    "the offset of a tile to search in 32 bits": (
        "each_of_tile(n, t, [&](i64 i) { most = larger(most, bits_of(x[i])",
        "each_of_tile(n, t, [&](i64 i) { most = larger(most, bits_of(x[(int)i])",
    ),
    "the number of a tile of products in 32 bits": (
        "for (i64 t = blockIdx.x;",
        "for (int t = blockIdx.x;",
    ),
    "no stride in unpack": (
        "t += tile_stride())\n        unpack_column(",
        "t += n)\n        unpack_column(",
    ),
    "no stride in pack": (
        "t += tile_stride())\n        pack_column(",
        "t += n)\n        pack_column(",
    ),
    "no stride in a sum": (
        "i += stride)\n        out[i] = add(a[i], b[i]);",
        "i += n)\n        out[i] = add(a[i], b[i]);",
    ),
    "no stride in decode": (
        "i += stride)\n            out[i] = moved_back(",
        "i += n)\n            out[i] = moved_back(",
    ),
    "no stride in products": (
        "t < batch * across * down; t += gridDim.x) {",
        "t < batch * across * down; t += batch * across * down) {",
    ),
    "no stride in gather": ("i += stride)\n        values[i]", "i += m)\n        values[i]"),
    "scatter_add one index too far": ("if (indices[i] < n) total", "if (indices[i] <= n) total"),
    "clear one index too far": ("if (indices[i] < n) x[", "if (indices[i] <= n) x["),
    "gather one index too far": ("indices[i] < n ? x[", "indices[i] <= n ? x["),
    "a bit one word too far": ("if (indices[i] / 32 < n)", "if (indices[i] / 32 <= n)"),
    "codes of a tile to pack at 32 bits": (
        "pack_column(codes + t * CPD_TILE, n",
        "pack_column(codes + (u32)(t * CPD_TILE), n",
    ),
    "words of a tile to unpack at 32 bits": (
        "unpack_column(words + t * CPD_LANES * bits",
        "unpack_column(words + (int)t * CPD_LANES * bits",
    ),
    "values to encode at 32 bits": (
        "load_column(how, c, x + t * CPD_TILE, values_of_tile(n, t));\n        encode_column",
        "load_column(how, c, x + (u32)(t * CPD_TILE), values_of_tile(n, t));\n"
        "        encode_column",
    ),
    "decoded values at 32 bits": (
        "words + t * how.words_of_tile(), out + t * CPD_TILE,",
        "words + t * how.words_of_tile(), out + (u32)(t * CPD_TILE),",
    ),
    "words of a hop at 32 bits": (
        "const i64 first = t * how.words_of_tile(), shift",
        "const i64 first = (int)(t * how.words_of_tile()), shift",
    ),
    "what is left of the values in 32 bits": (
        "return n - t * CPD_TILE < CPD_TILE ?",
        "return (int)(n - t * CPD_TILE) < CPD_TILE ?",
    ),
    "the number of a thread in 32 bits": (
        "i64 first_thread() { return (i64)blockIdx.x",
        "i64 first_thread() { return blockIdx.x",
    ),
    "a word of bits at 32 bits": (
        "i64 i = tile * CPD_LANES + lane",
        "int i = tile * CPD_LANES + lane",
    ),
    "a place among places in 32 bits": ("i64 at = (i64)starts[t]", "int at = (int)starts[t]"),
    "a row of a matrix at 32 bits": (
        "*a = m + (is_one ? i : 0) * columns",
        "*a = m + (u32)((is_one ? i : 0) * columns)",
    ),
    "a column of a matrix at 32 bits": ("*a = m + at % columns,", "*a = m + (u32)(at % columns),"),
    "a factor of a product at 32 bits": ("a + each * m * k, b +", "a + (u32)(each * m * k), b +"),
    "values of a tile at 32 bits": (
        "const i64 first = t * CPD_TILE + lane_of_thread();\n    if (values_of_tile",
        "const i64 first = (u32)(t * CPD_TILE) + lane_of_thread();\n    if (values_of_tile",
    ),
    "ternary values at 32 bits": (
        "trits + t * CPD_TRIT_BYTES, lane",
        "trits + (int)t * CPD_TRIT_BYTES, lane",
    ),
}
FAULTS_OF_CONVERSIONS = {  # in kernels: e4m3 and e5m2 by the GPU itself
    "two codes in the wrong order": (
        '"cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(second), "f"(first)',
        '"cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(first), "f"(second)',
    ),
    "e5m2 is read as e4m3": ("cvt.rn.f16x2.e5m2x2", "cvt.rn.f16x2.e4m3x2"),
    "infinity is taken for a number": (
        "(0x7fu - cast.max_code) * 0x01010101u",
        "(0x7eu - cast.max_code) * 0x01010101u",
    ),
    "values that overflow are converted too": (
        "if ((how.fit ? inside : stays_inside(how, c)) && all_near(how, c))",
        "if (all_near(how, c))",
    ),
    "far shifts are taken for near ones": (
        "if ((how.fit ? inside : stays_inside(how, c)) && all_near(how, c))",
        "if (how.fit ? inside : stays_inside(how, c))",
    ),
    "a marked tile is decoded": ("other |= shift.marked || shift.far;", "other |= shift.far;"),
    "the shift of the first block for all": (
        "const F factor = normal_power(0u - shift_of(how, c, b).near);",
        "const F factor = normal_power(0u - shift_of(how, c, 0).near);",
    ),
    "halves of a word in the wrong order": (
        "halves[0] | halves[1] << 16;",
        "halves[1] | halves[0] << 16;",
    ),
    "a format without NaN is converted too": (
        "(cast.max_code == 0x77 || cast.max_code == 0x7e)",
        "cast.max_code",
    ),
    "e5m2fn is converted too": ("cast.man == 2 && cast.max_code == 0x7b", "cast.man == 2"),
}
MESSAGES, CHANNEL = "cpdhpc/world/gpu_messages.py", "cpdhpc/darray/device.py"
REDUCER, TENSORS, OVER = "cpdhpc/torch/reducer.py", "cpdhpc/ops/tensors.py", "cpdhpc/world/mpi.py"
FAULTS_OF_DEVICES = {  # of several GPUs
    "torch's stream of its current device": (
        TENSORS,
        "stream = torch.cuda.current_stream(device)",
        "stream = torch.cuda.current_stream()",
    ),
    "a thread's stream on torch's current device": (
        TENSORS,
        "torch.cuda.Stream(device)",
        "torch.cuda.Stream()",
    ),
    "an event of torch's current device": (
        TENSORS,
        "torch.cuda.current_stream(self.device).record_event()",
        "torch.cuda.current_stream().record_event()",
    ),
    "a stream joined on torch's current device": (
        TENSORS,
        "torch.cuda.current_stream(self.device).wait_stream",
        "torch.cuda.current_stream().wait_stream",
    ),
    "a thread on torch's current device": (
        TENSORS,
        "with torch.cuda.device(self.device), torch.cuda.stream(self._stream)",
        "with torch.cuda.stream(self._stream)",
    ),
    "CuPy's device is not changed": (
        RUNTIME,
        "with cupy.cuda.Device(device), cupy.cuda.ExternalStream",
        "with cupy.cuda.ExternalStream",
    ),
    "the table of a cast for one device only": (
        RUNTIME,
        "return _cast_of(cast, current_device())",
        "return _cast_of(cast, 0)",
    ),
    "the numbers of products for one device only": (
        RUNTIME,
        "_products_of(how, arithmetic, current_device())",
        "_products_of(how, arithmetic, 0)",
    ),
    "kernels for one device only": (
        RUNTIME,
        "_run(_kernel(name, current_device())",
        "_run(_kernel(name, 0)",
    ),
    "kernels of the codec for one device only": (
        RUNTIME,
        "_codec_kernel(name, fixed, current_device())",
        "_codec_kernel(name, fixed, 0)",
    ),
    "streams for copies of one device only": (MESSAGES, '("carrier", device)', '("carrier", 0)'),
    "an array of another device is taken": (RUNTIME, 'check_device(f"{name}:", array)', "pass"),
    "torch's choice of a device is not looked at": (
        RUNTIME,
        "chosen or current_device()",
        "current_device()",
    ),
    "torch is left on the first device": (MESSAGES, "tensors.use_gpu(found[0])", "pass"),
    "devices of other nodes are taken for the same": (
        MESSAGES,
        "zip(world.nodes[:: world.virtual_ranks], addresses, strict=True)",
        "zip([0] * len(addresses), addresses, strict=True)",
    ),
    "the current device's address for the model's": (
        MESSAGES,
        "gpu_runtime.address_of(device)",
        "gpu_runtime.address_of(gpu_runtime.current_device())",
    ),
    "a shared device is let through": (
        MESSAGES,
        "if shared and not all(each[2] for each in told):",
        "if False:",
    ),
    "memory that cannot be shared is let through": (
        MESSAGES,
        "if closed and gpu_aware(world).yes:",
        "if False:",
    ),
    "a GPU without kernels is found when they are launched": (
        MESSAGES,
        "if lacks := gpu_runtime.unsupported():",
        "if False:",
    ),
    "every process compiles": (
        "cpdhpc/whole_files.py",
        "fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)\n                break",
        "break",
    ),
    "who waits keeps the core": (RUNTIME, "if waited_s > SPIN_S:", "if False:"),
}
FAULTS_OF_MEMORY = {  # let go, or written again, while a stream, a copy or MPI has still to read it
    "means are let go while buckets behind them are averaged": (
        "cpdhpc/torch/overlap.py",
        "return [future.result() for future in self._futures]",
        "return [self._futures.pop(0).result() for _ in range(len(self._futures))]",
    ),
    "after an error the next step writes what buckets read": (
        "cpdhpc/torch/overlap.py",
        "            self.stream.join()\n            self.world.lent_by",
        "            self.world.lent_by",
    ),
    "means are read before the thread's stream has written them": (
        "cpdhpc/ops/tensors.py",
        "torch.cuda.current_stream(self.device).wait_stream(self._stream)",
        "pass",
    ),
    "gradients are averaged before backward's stream has gathered them": (
        "cpdhpc/ops/tensors.py",
        "self._stream.wait_event(event)",
        "pass",
    ),
    "DDP's future does not wait for the thread's stream": (
        "cpdhpc/torch/ddp.py",
        'devices=[device] if device.type == "cuda" else None',
        "devices=None",
    ),
    "what a copy to the host reads is not kept": (
        MESSAGES,
        "self._keep = keep ",
        "self._keep = None ",
    ),
    "pinned memory is let go while it is copied up": (
        MESSAGES,
        "self._event = self._copy()",
        "self._event, self._copy = self._copy(), None",
    ),
    "two streams share buffers": (
        MESSAGES,
        "        if self.streams.begin():\n            self.cache.free()",
        "        self.streams.begin()",
    ),
    "a stream that is left is destroyed while it is at work": (
        RUNTIME,
        "self._left.append((self._caller, self.mark()))",
        "pass",
    ),
    "what is copied up is not there when the next stream reads it": (
        RUNTIME,
        "        wait(Event(stream))\n    return copy",
        "    return copy",
    ),
    "tables of moves are let go while the GPU may read them": (
        CHANNEL,
        "gpu_runtime.wait(room.done)  # the GPU may read a table until then",
        "pass",
    ),
    "a call that is only begun does not count": (
        CHANNEL,
        "        room.done = self._streams.mark()\n        if self._direct",
        "        if self._direct",
    ),
    "memory of a plan is let go while the GPU reads it": (
        CHANNEL,
        "            gpu_runtime.wait(room.landed)\n            gpu_runtime.wait(room.done)\n",
        "",
    ),
    "pinned memory is written again while it is copied up": (
        CHANNEL,
        'self._wait([room.landed], "the GPU")',
        "pass",
    ),
    "messages are copied over those that are not unpacked": (
        CHANNEL,
        "travelled, room.done)",
        "travelled, room.landed)",
    ),
    "a call does not wait for the one before in another stream": (
        CHANNEL,
        "self._streams.follow(room.done)",
        "pass",
    ),
    "messages are packed over those that MPI has still to send": (
        CHANNEL,
        "        self._await_sends(room)\n        program",
        "        program",
    ),
    "a graph's memory is let go while it runs": (
        GRAPHS,
        "        self._runtime.wait(self._ended)\n        self._betweens",
        "        self._betweens",
    ),
}
MOVES = ["--with-mpi", "-m", "not gpu and not slow", str(HERE / "mpi" / "test_mpi_darray_gpu.py")]
SIZES = ["-m", "gpu and not slow", str(HERE / "test_gpu_sizes.py")]
CONVERSIONS = ["-m", "gpu and not slow", str(HERE / "test_cuda_codec.py")]
SERIAL = ["-m", "not slow", "-k", "gpu or simulated", *map(str, TESTS)]
OPTIONS = ["-q", "-x", "--no-header", "--color=no", "-p", "no:cacheprovider"]
RUN = [sys.executable, "-m", "pytest", *OPTIONS]
ON_TWO = [
    *(HERE.parent / "slurm" / "mpirun-local", "2", sys.executable, "-m", "mpi4py"),
    *("-m", "pytest", *OPTIONS, "--with-mpi", "-m", "not gpu and not slow"),
]
OF_MPI = {each: HERE / "mpi" / f"test_mpi_{each}.py" for each in ("gpu", "darray_gpu", "streams")}
GRAPHS_ON_TWO = [[*RUN, HERE / "test_gpu_graphs.py"], [*ON_TWO, OF_MPI["gpu"]]]
MEMORY = [
    [*RUN, HERE / "test_gpu_memory.py"],
    [*RUN, "-p", "emulated_gpu", "-m", "gpu", HERE / "test_gpu_training.py"],
    [*ON_TWO, *OF_MPI.values()],
]


def caught_by(arguments: Sequence[str | Path], root: Path) -> str:
    """Return the test that fails first, "a crash", or "" where all pass."""
    done = subprocess.run(
        [*map(str, arguments)],
        cwd=root,
        env=environment() | {"PYTHONPATH": f"{root}:{HERE}"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if failed:
        return failed[0].split(" - ")[0].partition("::")[2]
    if done.returncode > 1 and "Traceback" not in done.stdout + done.stderr:
        raise SystemExit(done.stdout + done.stderr)
    return "a crash" if done.returncode else ""


def caught_in_kernels(code: str, fault: str, tests: Sequence[str]) -> str:
    """Return who notices a fault in the kernels."""
    command = [sys.executable, "-m", "pytest", *OPTIONS, "-p", "emulated_gpu"]
    return caught_by([*command, "--plant", code, fault, *tests], HERE.parent)


def caught_in_package(
    path: str, code: str, fault: str, tests: Sequence[Sequence[str | Path]]
) -> str:
    """Return who notices a fault in a file of the package, of commands one after the other."""
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        shutil.copytree(HERE.parent / "cpdhpc", root / "cpdhpc")
        (root / "kernels").symlink_to(HERE.parent / "kernels")
        source = (root / path).read_text()
        assert source.count(code) == 1, code
        (root / path).write_text(source.replace(code, fault))
        return next(filter(None, (caught_by(each, root) for each in tests)), "")


def main(asked: Sequence[str]) -> int:
    """Print who catches each fault, and return how many nobody does."""
    found: dict[str, str] = {}

    def tell(what: str, by: str) -> None:
        found[what] = by
        print(f"{what}: {by or 'NOBODY'}", flush=True)

    for kind, faults, tests in (
        ("kernels", FAULTS, SERIAL),
        ("sizes", FAULTS_OF_SIZES, SIZES),
        ("conversions", FAULTS_OF_CONVERSIONS, CONVERSIONS),
        ("moves", FAULTS_OF_MOVES, MOVES),
    ):
        for what, planted in faults.items() if not asked or kind in asked else ():
            tell(what, caught_in_kernels(*planted, tests))
    for kind, changes, commands in (
        ("graphs", FAULTS_OF_GRAPHS, GRAPHS_ON_TWO),
        ("devices", FAULTS_OF_DEVICES, [[*RUN, HERE / "test_device.py"]]),
        ("memory", FAULTS_OF_MEMORY, MEMORY),
    ):
        for what, change in changes.items() if not asked or kind in asked else ():
            tell(what, caught_in_package(*change, commands))
    caught = sum(map(bool, found.values()))
    print(f"{caught} of {len(found)} faults are caught")
    return len(found) - caught


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
