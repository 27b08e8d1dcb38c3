#!/bin/bash
# The scaling of all-reduces with the ranks: site local.
#
#   flux batch [--nodes=N --nslots=RANKS] allreduce_scaling.flux \
#       [STUDY.toml] [--set KEY=VALUE ...]
#
# GPUs are for --set sweep.device=gpu (docs/howto/gpu.md).
# All cases run in this one job, on 1, 2, 4, ... of its ranks in turn, so that they compare. The
# result is a folder below results with a file per case, study.h5 and report.html. Submitted again,
# the job measures the cases that its folder lacks; other settings have another folder.
# flux: --job-name=allreduce_scaling
# flux: --nodes=2
# flux: --nslots=4
# flux: --cores-per-slot=1
# flux: --time-limit=60m
# flux: --output='allreduce_scaling-{{id.dec}}.log'
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
    echo "allreduce_scaling: flux is not on PATH: load the MPI that has it (docs/reference/sites.md)" >&2
    exit 127
}
nodes=$(flux getattr size)
ppn=$(($(flux resource list --states=all --no-header --format='{ncores}') / nodes / 1))
study=${1:-inputs/study_allreduce_strong.toml}
[ $# = 0 ] || shift
ranks=
for ((some = 1; some < ppn; some *= 2)); do ranks+=$some,; done
for ((some = 1; some < nodes; some *= 2)); do ranks+=$((some * ppn)),; done
ranks+=$((nodes * ppn))
folder=$(python -m cpdhpc study freeze --by-hash "$study" --set run.bundle=nested \
    --set "name=allreduce_scaling-${nodes}x$ppn" --set "sweep.ranks=[$ranks]" \
    --set "sweep.ppn=$ppn" "$@") || exit

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

flux run --ntasks="$((nodes * ppn))" --nodes="$nodes" --cores-per-task=1 python -m cpdhpc batch "$folder" 0 --nodes "$nodes" --ppn "$ppn" &
launched=$!
[ -z "$signalled" ] || forward "$signalled" # it came before the ranks had a process number
while true; do
    wait "$launched"
    status=$?
    [ -n "$signalled" ] || break
    signalled='' # the signal ended the wait, not the ranks
done

if [ "$status" = 85 ]; then
    echo "allreduce_scaling: is not requeued: submit it again to go on" >&2
fi
if [ "$status" != 85 ]; then
    python -m cpdhpc study collect "$folder" &&
        python -m cpdhpc report "$folder/study.h5" --html "$folder/report.html"
fi
exit "$status"
