#!/bin/bash
# 1 case(s) of study demo on 2 x 2 ranks, in 1 job(s).
# flux: --job-name=demo-2x2-gpu-from2
# flux: --nodes=2
# flux: --nslots=4
# flux: --cores-per-slot=4
# flux: --gpus-per-slot=1
# flux: --time-limit=6m
# flux: --output='results/demo/logs/demo-2x2-gpu-from2-{{id.dec}}_0.log'

index=0 # there are no arrays
# The environment is that in which flux batch was called. To load another one: module load ..., and
# source .../bin/activate here, or in a site profile: modules, setup, container (docs/reference/sites.md).
set -u
export OMP_NUM_THREADS="4"
command -v mpirun >/dev/null || {
    echo "demo-2x2-gpu-from2: mpirun is not on PATH: load the MPI that has it (docs/reference/sites.md)" >&2
    exit 127
}

launched='' signalled='' terminated=0
forward() {
    signalled=$1
    kill -"$1" "$launched" 2>/dev/null
}
# USR1: the time is nearly over. TERM: the job is cancelled, or makes room for another one.
trap 'forward USR1' USR1
trap 'terminated=1; forward TERM' TERM
# No option of flux batch asks for USR1, so the script sends it to itself.
(trap 'kill "$!"; exit' TERM; sleep 240 & wait "$!" && kill -USR1 $$) >/dev/null 2>&1 &
trap "kill $!" EXIT

mpirun -n 4 --host "$(flux hostlist --expand --delimiter=:2, local)":2 --map-by ppr:2:node:PE=4 python -m cpdhpc batch results/demo $((2 + index)) --nodes 2 --ppn 2 &
launched=$!
[ -z "$signalled" ] || forward "$signalled" # it came before the ranks had a process number
while true; do
    wait "$launched"
    status=$?
    [ -n "$signalled" ] || break
    signalled='' # the signal ended the wait, not the ranks
done

if [ "$status" = 85 ]; then
    echo "demo-2x2-gpu-from2: is not requeued: submit it again to go on" >&2
fi
exit "$status"
