"""Benchmarks: each module has SUMMARY, add_arguments and run; BENCHES is their table."""

BENCHES = {
    "accuracy": "cpdhpc.bench.accuracy",
    "codec": "cpdhpc.bench.codec",
}
