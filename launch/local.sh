#!/usr/bin/env bash
# Starts a run of several processes on this machine. See launch/README.md.
set -euo pipefail

usage() {
  cat <<'END'
usage: launch/local.sh --processes=N (--fake=K | --devices=K) [--port=P] [--dry-run] -- COMMAND...

  --processes=N  processes to start
  --fake=K       devices of each that the CPU stands for
  --devices=K    GPUs of each: process 0 has the first K, process 1 the next, ...
  --port=P       of process 0; the default is one that is free
  --dry-run      print the commands, and run none

COMMAND gets --coordinator, --num_processes and --process_id. SIGTERM and SIGINT go on to all processes. The status is the first
one that is not 0; the other processes are then stopped.
END
}

die() {
  echo "local.sh: error: $*" >&2
  exit 2
}

positive() { [[ $2 =~ ^[1-9][0-9]{0,4}$ ]] || die "$1=$2: give a number from 1"; }

processes="" fake="" devices="" port="" dry_run=""
while [ $# -gt 0 ]; do
  case $1 in
    --processes=*) processes=${1#*=} && positive --processes "$processes" ;;
    --fake=*) fake=${1#*=} && positive --fake "$fake" ;;
    --devices=*) devices=${1#*=} && positive --devices "$devices" ;;
    --port=*) port=${1#*=} && positive --port "$port" ;;
    --dry-run) dry_run=yes ;;
    --help) usage && exit ;;
    --) shift && break ;;
    *) die "$1: there is no such option; --help lists them, and the command comes after --" ;;
  esac
  shift
done
[ -n "$processes" ] || die "--processes is missing"
[ -n "$fake$devices" ] || die "give --fake=K for K devices of the CPU, or --devices=K for K GPUs, for each process"
[ -z "$fake" ] || [ -z "$devices" ] || die "give --fake or --devices, not both"
[ $# -gt 0 ] || die "the command is missing; give it after --"
((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1] >= 501)) || die "bash is of version $BASH_VERSION; 5.1 or later is needed"

while [ -z "$port" ]; do
  port=$((20000 + RANDOM % 12000)) # below what systems give to outgoing connections
  if (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; then port=""; fi
done

# The words of the command of process $1, in the array `words`.
words_of() {
  if [ -n "$fake" ]; then
    words=(env JAX_PLATFORMS=cpu "XLA_FLAGS=${XLA_FLAGS:+$XLA_FLAGS }--xla_force_host_platform_device_count=$fake")
  else
    words=(env "JAX_LOCAL_DEVICE_IDS=$(seq -s , $(($1 * devices)) $((($1 + 1) * devices - 1)))")
  fi
  words+=("${command[@]}" "--coordinator=127.0.0.1:$port" "--num_processes=$processes" "--process_id=$1")
}

command=("$@")
if [ -n "$dry_run" ]; then
  for ((i = 0; i < processes; i++)); do
    words_of "$i"
    printf '%q ' "${words[@]}"
    echo
  done
  exit
fi

set -m # each process in a group of its own, which SIGINT reaches
pids=()
forward() {
  for pid in "${pids[@]}"; do kill -s "$1" -- "-$pid" 2>/dev/null || true; done
}
trap 'forward TERM' TERM
trap 'forward INT' INT
for ((i = 0; i < processes; i++)); do
  words_of "$i"
  "${words[@]}" </dev/null &
  pids+=("$!")
  echo "local.sh: process $i has the id $!" >&2
done

status=0 left=("${pids[@]}")
while [ "${#left[@]}" -gt 0 ]; do
  code=0 finished=""
  wait -n -p finished "${left[@]}" || code=$?
  [ -n "${finished:-}" ] || continue # a signal came
  remaining=()
  for pid in "${left[@]}"; do [ "$pid" = "$finished" ] || remaining+=("$pid"); done
  left=("${remaining[@]}")
  if [ "$code" -ne 0 ] && [ "$status" -eq 0 ]; then
    status=$code
    # They end by themselves, and say why; those that do not are stopped.
    (
      sleep 20
      forward TERM
      sleep 40
      forward KILL
    ) &
    stopper=$!
  fi
done 2>/dev/null # what bash says of a process that a signal has ended
if [ -n "${stopper:-}" ]; then
  kill -- "-$stopper" || true
  wait "$stopper" || true # quietly
fi 2>/dev/null
exit "$status"
