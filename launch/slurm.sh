#!/usr/bin/env bash
# Submits a run on the GPUs of one or more SLURM nodes. See launch/README.md.
set -euo pipefail

usage() {
  cat <<'END'
usage: launch/slurm.sh --nodes=N --gpus-per-node=G [--dry-run] [SBATCH_OPTION...] -- COMMAND...

  --nodes=N          nodes of the job
  --gpus-per-node=G  GPUs of each; each GPU has a process
  --dry-run          print what would be submitted, and submit nothing
  SBATCH_OPTION      any other, as --partition=P --account=A --time=24:00:00 --cpus-per-task=8

The processes find each other by SLURM's variables. Two minutes before the time limit, and when the job is preempted, the run saves
its state and ends; the job is then queued again, and goes on from there. It needs a --workdir that all nodes see.
END
}

die() {
  echo "slurm.sh: error: $*" >&2
  exit 2
}

positive() { [[ $2 =~ ^[1-9][0-9]{0,4}$ ]] || die "$1=$2: give a number from 1"; }

nodes="" gpus="" dry_run="" options=()
while [ $# -gt 0 ]; do
  case $1 in
    --nodes=*) nodes=${1#*=} && positive --nodes "$nodes" ;;
    --gpus-per-node=*) gpus=${1#*=} && positive --gpus-per-node "$gpus" ;;
    --dry-run) dry_run=yes ;;
    --help) usage && exit ;;
    --) shift && break ;;
    --*=*) options+=("$1") ;;
    *) die "$1: is no option of the form --NAME=VALUE; --help lists some, and the command comes after --" ;;
  esac
  shift
done
[ -n "$nodes" ] || die "--nodes is missing"
[ -n "$gpus" ] || die "--gpus-per-node is missing"
[ $# -gt 0 ] || die "the command is missing; give it after --"

# All tasks of a node see all of its GPUs; JAX gives each the one of its number.
submit=(sbatch "--nodes=$nodes" "--ntasks-per-node=$gpus" "--gpus-per-node=$gpus" --signal=TERM@120 --requeue --open-mode=append
  "${options[@]}")
script=$(
  printf '#!/usr/bin/env bash\nset -euo pipefail\nstatus=0\nsrun --kill-on-bad-exit=0'
  printf ' %q' "$@"
  cat <<'END'
 || status=$?
# 143: it was told to end, and has saved its state.
if [ "$status" -eq 143 ]; then scontrol requeue "$SLURM_JOB_ID" || true; fi
exit "$status"
END
)
if [ -n "$dry_run" ]; then
  printf '%q ' "${submit[@]}"
  printf '<<END\n%s\nEND\n' "$script"
  exit
fi
command -v sbatch >/dev/null || die "there is no sbatch here; run this on a login node of the cluster"
"${submit[@]}" <<<"$script"
