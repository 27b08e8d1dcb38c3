#!/bin/bash
# Collects the finished cases of study demo in one file.
# flux: --job-name=demo-collect
# flux: --nodes=1
# flux: --nslots=1
# flux: --cores-per-slot=1
# flux: --time-limit=15m
# flux: --output='results/demo/logs/demo-collect-{{id.dec}}.log'
# flux: --queue=its-partition
# flux: --bank=its-account
# flux: --requires=its-constraint
# flux: --mine

set -e
module load mpi
set +e
set -u
exec python -m cpdhpc study collect results/demo
