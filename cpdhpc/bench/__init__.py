"""Benchmarks: each module has SUMMARY, add_arguments and run; the tables name them."""

ALONE = {  # run(arguments), without MPI
    "accuracy": "cpdhpc.bench.accuracy",
    "codec": "cpdhpc.bench.codec",
    "layer": "cpdhpc.bench.layer",
    "predict": "cpdhpc.bench.predict",
}
TOGETHER = {  # run(arguments, world), on all processes
    "allreduce": "cpdhpc.bench.allreduce",
    "latency": "cpdhpc.bench.latency",
    "fit": "cpdhpc.bench.fit",
    "halo": "cpdhpc.bench.halo",
}
