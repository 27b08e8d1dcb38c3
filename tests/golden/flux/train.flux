#!/bin/bash
# Train the rows of a job file: site local.
#
#   flux batch [--nodes=N --nslots=RANKS] train.flux \
#       JOB.toml [ARGUMENTS of cpdhpc train]
#
# GPUs are for jobs with device = "gpu" (docs/howto/gpu.md).
# Records go to results/ + the job file's name. Before its time is over the job writes a checkpoint
# and ends; submitted once more, it goes on with incomplete rows.
# flux: --job-name=train
# flux: --nodes=1
# flux: --nslots=2
# flux: --cores-per-slot=1
# flux: --time-limit=60m
# flux: --output='train-{{id.dec}}.log'
# flux: --queue=its-partition
# flux: --bank=its-account
# flux: --requires=its-constraint
# flux: --mine

set -e
module load mpi
set +e
set -u
export OMP_NUM_THREADS="1"
command -v flux >/dev/null || {
    echo "train: flux is not on PATH: load the MPI that has it (docs/reference/sites.md)" >&2
    exit 127
}
if [ $# = 0 ]; then
    echo "train: no job file: flux batch train.flux JOB.toml" >&2
    exit 2
fi
nodes=$(flux getattr size)
ppn=$(($(flux resource list --states=all --no-header --format='{ncores}') / nodes / 1))

launched='' signalled='' terminated=0
forward() {
    signalled=$1
    flux job killall --force --signal="$1" 2>/dev/null
}
# USR1: the time is nearly over. TERM: the job is cancelled, or makes room for another one.
trap 'forward USR1' USR1
trap 'terminated=1; forward TERM' TERM
# No option of flux batch asks for USR1, so the script sends it to itself.
(trap 'kill "$!"; exit' TERM; sleep 3480 & wait "$!" && kill -USR1 $$) >/dev/null 2>&1 &
trap "kill $!" EXIT

flux run --ntasks="$((nodes * ppn))" --nodes="$nodes" --cores-per-task=1 python -m cpdhpc train "$@" --resume &
launched=$!
[ -z "$signalled" ] || forward "$signalled" # it came before the ranks had a process number
while true; do
    wait "$launched"
    status=$?
    [ -n "$signalled" ] || break
    signalled='' # the signal ended the wait, not the ranks
done

if [ "$status" = 85 ]; then
    echo "train: is not requeued: submit it again to go on" >&2
fi
exit "$status"
