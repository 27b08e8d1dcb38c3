"""Benchmarks: each module has SUMMARY, add_arguments and run; BENCHES is their table."""

BENCHES = {
    "codec": "cpdhpc.bench.codec",
}
