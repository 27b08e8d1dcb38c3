#!/bin/bash
# Check that cpdhpc is right on these nodes, and how fast it is: site local.
#
#   flux batch [--nodes=N --nslots=RANKS] verify.flux \
#       [--quick] [--device gpu] [ARGUMENTS of cpdhpc verify]
#
# Results are in verify-JOB.h5 and verify-JOB.html, in the folder that flux batch is called in.
# docs/howto/verify.md lists the checks.
# flux: --job-name=verify
# flux: --nodes=1
# flux: --nslots=2
# flux: --cores-per-slot=1
# flux: --time-limit=30m
# flux: --output='verify-{{id.dec}}.log'
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
    echo "verify: flux is not on PATH: load the MPI that has it (docs/reference/sites.md)" >&2
    exit 127
}
nodes=$(flux getattr size)
ppn=$(($(flux resource list --states=all --no-header --format='{ncores}') / nodes / 1))
found=verify-$(flux job id --to=dec "$FLUX_ENCLOSING_ID")

launched='' signalled='' terminated=0
forward() {
    signalled=$1
    flux job killall --force --signal="$1" 2>/dev/null
}
# USR1: the time is nearly over. TERM: the job is cancelled, or makes room for another one.
trap 'forward USR1' USR1
trap 'terminated=1; forward TERM' TERM
# No option of flux batch asks for USR1, so the script sends it to itself.
(trap 'kill "$!"; exit' TERM; sleep 1680 & wait "$!" && kill -USR1 $$) >/dev/null 2>&1 &
trap "kill $!" EXIT

flux run --ntasks="$((nodes * ppn))" --nodes="$nodes" --cores-per-task=1 python -m cpdhpc verify --out "$found.h5" --html "$found.html" "$@" &
launched=$!
[ -z "$signalled" ] || forward "$signalled" # it came before the ranks had a process number
while true; do
    wait "$launched"
    status=$?
    [ -n "$signalled" ] || break
    signalled='' # the signal ended the wait, not the ranks
done

if [ "$status" = 85 ]; then
    echo "verify: is not requeued: submit it again to go on" >&2
fi
exit "$status"
