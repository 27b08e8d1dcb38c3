"""Faults planted in CUDA kernels, in graphs and in who keeps memory: does a test notice each?

Each is compiled into the kernels, and the tests of emulated_gpu run until one fails: for windows of
GPU arrays those of MPI, on one rank. Those of graphs and of memory are planted in a copy of the
package, those of graphs tested on two ranks.

    python tests/helpers/gpu_faults.py [kernels] [sizes] [conversions] [moves] [graphs] [devices]
        [memory]
"""

import re
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
    for name in ("cuda_codec", "ops", "blocks", "selection", "passes", "gpu_methods", "products",
                 "integers", "packing")
]  # fmt: skip
FAULTS = {  # what is wrong: [-code that goes-]{+code that comes+}, as git diff --word-diff shows it
    "a lane is not counted as one of the warp's": (
        "value = max(value, __shfl_xor_sync([-ALL_LANES-]{+0x7fffffffu+}, value, step));"
    ),
    "the largest of half a warp": (
        "for (int step = CPD_LANES / [-2-]{+4+}; step; step /= 2)\n        value = max"
    ),
    "a shuffle that some lanes miss": (
        "u32 saturated = [-warp_sum(c.saturated)-]{+lane_of_thread() ? warp_sum(c.saturated) : "
        "c.saturated+};"
    ),
    "every lane writes the tile's shift, before it is known": (
        "[-if (how.blocks || lane == 0)\n            -]shifts["
    ),
    "a block's tiles are counted once": (
        "__device__ i64 tile_stride() { return (i64)gridDim.x[- * CPD_WARPS-]; }"
    ),
    "values beyond the end are written": (
        "CPD_FN void store(float* x, i64 i, i64 n, F value) {[-\n    if (i < n) x[i] = value;\n"
        "-]{+ x[i] = value; +}}"
    ),
    "values that are not finite are counted per thread only": (
        "if ([-all && lane_of_thread() == 0) atomicAdd(total, (u64)all)-]{+count) *total = "
        "(u64)count+};"
    ),
    "random bits by the place in the tile": (
        "key, offset[- + t * CPD_TILE-], counts + 3 * t);\n    }\n}\n\nCPD_BOUNDED"
    ),
    "the last tile is taken for a whole one": (
        "return [-n - t * CPD_TILE < CPD_TILE ? (int)(n - t * CPD_TILE) : -]CPD_TILE;"
    ),
    "a row too many of the last tile": "return r * how.value_step() <{+=+} n - how.first_value();",
    "all lanes are taken to stay inside where one does": (
        "bool all_lanes(bool lane) { return __ballot_sync(ALL_LANES, lane) [-== ALL_LANES-]{+!= "
        "0+}; }"
    ),
    "the largest magnitude of half its size": "most >>= [-1-]{+2+};",
    "the second block is decoded over the first": "body([-b * rows + -]r, read(",
    "shifts of the first lane for all blocks": "[-if (how.blocks) shifts += lane_of_thread();-]",
    "no barrier before shared memory is read": (
        "        [-__syncthreads();\n        -]for (int t = 0; t < CPD_SIDE"
    ),
    "no barrier before shared memory is written again": (
        "    [-    __syncthreads();\n    -]}\n    if (i < m && j < n)"
    ),
    "a table of counts for all warps": "u32* table = tables[[-threadIdx.x / CPD_LANES-]{+0+}];",
    "counts added without an atomic": (
        "if (table[b]) [-atomicAdd(counts + b, table[b])-]{+counts[b] = table[b]+};"
    ),
    "subnormal numbers flushed in sums": (
        '[-asm("add.rn.f32 %0, %1, %2;" : "=f"(sum) : "f"(a), "f"(b))-]{+sum = a + b; if (sum < '
        "1.17549435e-38f && sum > -1.17549435e-38f) sum = 0.0f+};"
    ),
    "the lanes before this one include it": "return sum[- - value-];",
    "the largest of a sum is that of its first two terms": (
        "terms.more);\n"
        "            most = larger(most, bits_of([-value-]{+sum[i]+}) & CPD_MAGNITUDE);"
    ),
    "what is cut loses its sign": "from_bits(cut[- | (bits & ~CPD_MAGNITUDE)-])",
}
FAULTS_OF_MOVES = {  # of the kernel that moves windows
    "the first unit of a box is taken for the last of the one before": (
        "if (boxes[middle + 1].first >{+=+} i)"
    ),
    "a partial sum replaces the total": "part = value[-, several = true-];",
    "the mark of a partial sum is taken for a part of the base": (
        "const char* at = arrays.from(term.base[- % CPD_BEGINS-]) + term.offset;"
    ),
    "half of a wide unit is copied": "return move_copies<[-Wide-]{+u64+}>(",
    "sources lie as targets do": "*(const T*)(from + ahead_of(place, [-term-]{+box+}.strides));",
    "sums of short floats are cut, not rounded": (
        "const float wide_sum = [-add(wide(a), wide(b)-]{+from_bits(bits_of(add(wide(a), "
        "wide(b))) & 0xffffe000u+});\n        Type y;"
    ),
}
RUNTIME, GRAPHS = "cpdhpc/ops/gpu_runtime.py", "cpdhpc/collectives/cuda_graphs.py"
FAULTS_OF_GRAPHS = {  # by file
    RUNTIME: {
        "memory that a graph uses is not kept": (
            "[-self._kept.append(take(size_bytes))\n"
            "            found: Result = self._kept[-1]-]{+found: Result = take(size_bytes)+}"
        ),
        "a capture that failed is not ended": (
            "                    [-self._stream.end_capture()-]{+pass+}\n                raise"
        ),
    },
    GRAPHS: {
        "what came is not copied up": "[-self._runtime.copy_up(came.host, came.received)-]{+pass+}",
        "what goes is copied down once only": "[-            self._copy_down(payload, sent)\n-]",
        "a run does not wait for the one before in another stream": (
            "[-self._streams.follow(self._ended)-]{+pass+}"
        ),
        "counts are read before the GPU has written them": (
            "[-            self._runtime.wait(self._streams.mark())\n-]"
        ),
        "the counts of all pieces in one place": "self._counts[[-number : number + -]{+:+}1]",
        "kernels are loaded while they are captured": (
            "[-graphs.rehearse(lambda: self._all(np.empty_like(out), None))-]{+pass+}"
        ),
        "the rehearsal writes the result": "self._all([-np.empty_like(out)-]{+out+}, None)",
        "a graph of nothing": "graph[- if self._kernels.count else None-]",
        "the shifts of the first run for ever": (
            "[-place[:] = shift_bytes(each, segments, self.x.size, self.x)-]{+pass+}"
        ),
        "random numbers of the first run for ever": "if [-method.is_random-]{+False+}:",
    },
}
FAULTS_OF_SIZES = {  # in kernels: numbers of 32 bits, work without strides, one index too many
    "the offset of a tile to search in 32 bits": (
        "each_of_tile(n, t, [&](i64 i) { most = larger(most, bits_of(x[{+(int)+}i])"
    ),
    "the number of a tile of products in 32 bits": "for ([-i64-]{+int+} t = blockIdx.x;",
    "no stride in unpack": "t += [-tile_stride()-]{+n+})\n        unpack_column(",
    "no stride in pack": "t += [-tile_stride()-]{+n+})\n        pack_column(",
    "no stride in a sum": "i += [-stride-]{+n+})\n        out[i] = add(a[i], b[i]);",
    "no stride in decode": "i += [-stride-]{+n+})\n            out[i] = moved_back(",
    "no stride in products": (
        "t < batch * across * down; t += [-gridDim.x-]{+batch * across * down+}) {"
    ),
    "no stride in gather": "i += [-stride-]{+m+})\n        values[i]",
    "scatter_add one index too far": "if (indices[i] <{+=+} n) total",
    "clear one index too far": "if (indices[i] <{+=+} n) x[",
    "gather one index too far": "indices[i] <{+=+} n ? x[",
    "a bit one word too far": "if (indices[i] / 32 <{+=+} n)",
    "codes of a tile to pack at 32 bits": (
        "pack_column(codes + [-t * CPD_TILE-]{+(u32)(t * CPD_TILE)+}, n"
    ),
    "words of a tile to unpack at 32 bits": "unpack_column(words + {+(int)+}t * CPD_LANES * bits",
    "values to encode at 32 bits": (
        "load_column(how, c, x + [-t * CPD_TILE-]{+(u32)(t * CPD_TILE)+}, values_of_tile(n, t));\n"
        "        encode_column"
    ),
    "decoded values at 32 bits": (
        "words + t * how.words_of_tile(), out + [-t * CPD_TILE-]{+(u32)(t * CPD_TILE)+},"
    ),
    "words of a hop at 32 bits": (
        "const i64 first = [-t * how.words_of_tile(-]{+(int)(t * how.words_of_tile()+}), shift"
    ),
    "what is left of the values in 32 bits": (
        "return [-n - t * CPD_TILE-]{+(int)(n - t * CPD_TILE)+} < CPD_TILE ?"
    ),
    "the number of a thread in 32 bits": "i64 first_thread() { return [-(i64)-]blockIdx.x",
    "a word of bits at 32 bits": "[-i64-]{+int+} i = tile * CPD_LANES + lane",
    "a place among places in 32 bits": "[-i64 at = (i64-]{+int at = (int+})starts[t]",
    "a row of a matrix at 32 bits": (
        "*a = m + ([-is_one ? i : 0) * columns-]{+u32)((is_one ? i : 0) * columns)+}"
    ),
    "a column of a matrix at 32 bits": "*a = m + [-at % columns-]{+(u32)(at % columns)+},",
    "a factor of a product at 32 bits": "a + [-each * m * k-]{+(u32)(each * m * k)+}, b +",
    "values of a tile at 32 bits": (
        "const i64 first = [-t * CPD_TILE-]{+(u32)(t * CPD_TILE)+} + lane_of_thread();\n"
        "    if (values_of_tile"
    ),
    "ternary values at 32 bits": "trits + {+(int)+}t * CPD_TRIT_BYTES, lane",
}
FAULTS_OF_CONVERSIONS = {  # in kernels: e4m3 and e5m2 by the GPU itself
    "two codes in the wrong order": (
        '"cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"([-second), '
        '"f"(first-]{+first), "f"(second+})'
    ),
    "e5m2 is read as e4m3": "cvt.rn.f16x2.[-e5m2x2-]{+e4m3x2+}",
    "infinity is taken for a number": "([-0x7fu-]{+0x7eu+} - cast.max_code) * 0x01010101u",
    "values that overflow are converted too": (
        "if ([-(how.fit ? inside : stays_inside(how, c)) && -]all_near(how, c))"
    ),
    "far shifts are taken for near ones": (
        "if ([-(how.fit ? inside : stays_inside(how, c)) && all_near-]{+how.fit ? inside : "
        "stays_inside+}(how, c))"
    ),
    "a marked tile is decoded": "other |= shift.[-marked || shift.-]far;",
    "the shift of the first block for all": (
        "const F factor = normal_power(0u - shift_of(how, c, [-b-]{+0+}).near);"
    ),
    "halves of a word in the wrong order": "halves[[-0] | halves[1-]{+1] | halves[0+}] << 16;",
    "a format without NaN is converted too": (
        "[-(cast.max_code == 0x77 || cast.max_code == 0x7e)-]{+cast.max_code+}"
    ),
    "e5m2fn is converted too": "cast.man == 2[- && cast.max_code == 0x7b-]",
}
MESSAGES, CHANNEL = "cpdhpc/world/gpu_messages.py", "cpdhpc/darray/device.py"
TENSORS = "cpdhpc/ops/tensors.py"
FAULTS_OF_DEVICES = {  # of several GPUs
    TENSORS: {
        "torch's stream of its current device": "stream = torch.cuda.current_stream([-device-])",
        "a thread's stream on torch's current device": "torch.cuda.Stream([-device-])",
        "an event of torch's current device": (
            "torch.cuda.current_stream([-self.device-]).record_event()"
        ),
        "a stream joined on torch's current device": (
            "torch.cuda.current_stream([-self.device-]).wait_stream"
        ),
        "a thread on torch's current device": (
            "with torch.cuda.[-device(self.device), torch.cuda.-]stream(self._stream)"
        ),
    },
    RUNTIME: {
        "CuPy's device is not changed": (
            "with cupy.cuda.[-Device(device), cupy.cuda.-]ExternalStream"
        ),
        "the table of a cast for one device only": (
            "return _cast_of(cast, [-current_device()-]{+0+})"
        ),
        "the numbers of products for one device only": (
            "_products_of(how, arithmetic, [-current_device()-]{+0+})"
        ),
        "kernels for one device only": "_run(_kernel(name, [-current_device()-]{+0+})",
        "kernels of the codec for one device only": (
            "_codec_kernel(name, fixed, [-current_device()-]{+0+})"
        ),
        "an array of another device is taken": '[-check_device(f"{name}:", array)-]{+pass+}',
        "torch's choice of a device is not looked at": "[-chosen or -]current_device()",
        "who waits keeps the core": "if [-waited_s > SPIN_S-]{+False+}:",
    },
    MESSAGES: {
        "streams for copies of one device only": '("carrier", [-device-]{+0+})',
        "torch is left on the first device": "[-tensors.use_gpu(found[0])-]{+pass+}",
        "devices of other nodes are taken for the same": (
            "zip([-world.nodes[:: world.virtual_ranks]-]{+[0] * len(addresses)+}, addresses, "
            "strict=True)"
        ),
        "the current device's address for the model's": (
            "gpu_runtime.address_of([-device-]{+gpu_runtime.current_device()+})"
        ),
        "a shared device is let through": (
            "if [-shared and not all(each[2] for each in told)-]{+False+}:"
        ),
        "memory that cannot be shared is let through": (
            "if [-closed and gpu_aware(world).yes-]{+False+}:"
        ),
        "a GPU without kernels is found when they are launched": (
            "if [-lacks := gpu_runtime.unsupported()-]{+False+}:"
        ),
    },
    "cpdhpc/whole_files.py": {
        "every process compiles": (
            "[-fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)\n                -]break"
        )
    },
}
FAULTS_OF_MEMORY = {  # let go, or written again, while a stream, a copy or MPI has still to read it
    "cpdhpc/torch/overlap.py": {
        "means are let go while buckets behind them are averaged": (
            "return [[-future.result() for future in "
            "self._futures-]{+self._futures.pop(0).result() for _ in range(len(self._futures))+}]"
        ),
        "after an error the next step writes what buckets read": (
            "            self.[-stream.join()\n            self.-]world.lent_by"
        ),
    },
    TENSORS: {
        "means are read before the thread's stream has written them": (
            "[-torch.cuda.current_stream(self.device).wait_stream(self._stream)-]{+pass+}"
        ),
        "gradients are averaged before backward's stream has gathered them": (
            "[-self._stream.wait_event(event)-]{+pass+}"
        ),
    },
    "cpdhpc/torch/ddp.py": {
        "DDP's future does not wait for the thread's stream": (
            'devices=[-[device] if device.type == "cuda" else -]None'
        )
    },
    MESSAGES: {
        "what a copy to the host reads is not kept": "self._keep = [-keep-]{+None+} ",
        "pinned memory is let go while it is copied up": (
            "self._event[- = self._copy()-]{+, self._copy = self._copy(), None+}"
        ),
        "two streams share buffers": (
            "        [-if self.streams.begin():\n"
            "            self.cache.free-]{+self.streams.begin+}()"
        ),
    },
    RUNTIME: {
        "a stream that is left is destroyed while it is at work": (
            "[-self._left.append((self._caller, self.mark()))-]{+pass+}"
        ),
        "what is copied up is not there when the next stream reads it": (
            "    [-    wait(Event(stream))\n    -]return copy"
        ),
    },
    CHANNEL: {
        "tables of moves are let go while the GPU may read them": (
            "[-gpu_runtime.wait(room.done)  # the GPU may read a table until then-]{+pass+}"
        ),
        "a call that is only begun does not count": (
            "        [-room.done = self._streams.mark()\n        -]if self._direct"
        ),
        "memory of a plan is let go while the GPU reads it": (
            "[-            gpu_runtime.wait(room.landed)\n            gpu_runtime.wait(room.done)\n"
            "-]"
        ),
        "pinned memory is written again while it is copied up": (
            '[-self._wait([room.landed], "the GPU")-]{+pass+}'
        ),
        "messages are copied over those that are not unpacked": (
            "travelled, room.[-done-]{+landed+})"
        ),
        "a call does not wait for the one before in another stream": (
            "[-self._streams.follow(room.done)-]{+pass+}"
        ),
        "messages are packed over those that MPI has still to send": (
            "        [-self._await_sends(room)\n        -]program"
        ),
    },
    GRAPHS: {
        "a graph's memory is let go while it runs": (
            "        self.[-_runtime.wait(self._ended)\n        self.-]_betweens"
        )
    },
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


def texts(planted: str) -> tuple[str, str]:
    """Return the code of a fault, before and after."""
    gone, new = (re.compile(each, re.DOTALL) for each in (r"\[-(.*?)-\]", r"\{\+(.*?)\+\}"))
    return gone.sub(r"\1", new.sub("", planted)), new.sub(r"\1", gone.sub("", planted))


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
            tell(what, caught_in_kernels(*texts(planted), tests))
    for kind, changes, commands in (
        ("graphs", FAULTS_OF_GRAPHS, GRAPHS_ON_TWO),
        ("devices", FAULTS_OF_DEVICES, [[*RUN, HERE / "test_device.py"]]),
        ("memory", FAULTS_OF_MEMORY, MEMORY),
    ):
        for path, faults in changes.items() if not asked or kind in asked else ():
            for what, planted in faults.items():
                tell(what, caught_in_package(path, *texts(planted), commands))
    caught = sum(map(bool, found.values()))
    print(f"{caught} of {len(found)} faults are caught")
    return len(found) - caught


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
