#!/usr/bin/env bash
# A run on a Cloud TPU slice, from its creation to its end. See launch/README.md.
set -euo pipefail

usage() {
  cat <<'END'
usage: launch/tpu_pod.sh ACTION --name=N --project=P --zone=Z [OPTION...] [-- COMMAND...]

  create   ask for the slice, and wait until it is there
  setup    copy this repository to all workers, and install it
  run      start COMMAND on all workers; it goes on when the connection ends
  logs     show what worker 0 says, until the command has ended
  stop     tell the run to save its state and end
  delete   give the slice back
  train    all of these; where the slice is preempted, it is created again, and the run goes on

  --name=N        of the slice, or TPU_NAME
  --project=P     of Google Cloud, or TPU_PROJECT
  --zone=Z        or TPU_ZONE
  --type=T        of the slice, as v5litepod-16, or TPU_TYPE; for create and train
  --version=V     of the TPU's software, as v2-alpha-tpuv5-lite, or TPU_VERSION; for create and train
  --spot          a slice that may be preempted
  --prepare=C     a command for each worker at the end of setup, as one that mounts a shared directory
  --dry-run       print the commands, and run none

COMMAND runs in the copy of the repository. It needs a --workdir that all workers see.
END
}

die() {
  echo "tpu_pod.sh: error: $*" >&2
  exit 2
}

name=${TPU_NAME:-} project=${TPU_PROJECT:-} zone=${TPU_ZONE:-} type=${TPU_TYPE:-} version=${TPU_VERSION:-}
action="" spot="" prepare="" dry_run=""
while [ $# -gt 0 ]; do
  case $1 in
    --name=*) name=${1#*=} ;;
    --project=*) project=${1#*=} ;;
    --zone=*) zone=${1#*=} ;;
    --type=*) type=${1#*=} ;;
    --version=*) version=${1#*=} ;;
    --spot) spot=yes ;;
    --prepare=*) prepare=${1#*=} ;;
    --dry-run) dry_run=yes ;;
    --help) usage && exit ;;
    --) shift && break ;;
    -*) die "$1: there is no such option; --help lists them, and the command comes after --" ;;
    *)
      [ -z "$action" ] || die "$1: there is an action already, $action"
      action=$1
      ;;
  esac
  shift
done
command=("$@")

need() { # OPTION VARIABLE VALUE
  [ -n "$3" ] || die "$1 is missing; give it, or set $2"
}
case $action in
  create | setup | run | logs | stop | delete | train) ;;
  "") die "the action is missing; --help lists them" ;;
  *) die "$action: there is no such action; --help lists them" ;;
esac
need --name TPU_NAME "$name"
need --project TPU_PROJECT "$project"
need --zone TPU_ZONE "$zone"
if [ "$action" = create ] || [ "$action" = train ]; then
  need --type TPU_TYPE "$type"
  need --version TPU_VERSION "$version"
fi
if [ "$action" = run ] || [ "$action" = train ]; then
  [ $# -gt 0 ] || die "the command is missing; give it after --"
fi
[ -n "$dry_run" ] || command -v gcloud >/dev/null || die "there is no gcloud here; install the Google Cloud CLI"

where=("--project=$project" "--zone=$zone")

call() { # runs a command, or prints it
  if [ -n "$dry_run" ]; then
    printf '%q ' "$@"
    echo
  else
    "$@"
  fi
}

on() { # WORKER COMMAND
  call gcloud compute tpus tpu-vm ssh "$name" "${where[@]}" "--worker=$1" "--command=$2"
}

state() { # of the request for the slice; nothing where there is none
  gcloud compute tpus queued-resources describe "$name" "${where[@]}" "--format=value(state.state)" 2>/dev/null || true
}

create() {
  call gcloud compute tpus queued-resources create "$name" "${where[@]}" "--node-id=$name" "--accelerator-type=$type" \
    "--runtime-version=$version" ${spot:+--spot}
  [ -z "$dry_run" ] || return 0
  local now
  while now=$(state) && [ "$now" != ACTIVE ]; do
    case $now in
      FAILED | SUSPENDED | SUSPENDING) die "the slice $name is $now; see gcloud compute tpus queued-resources describe $name" ;;
    esac
    echo "tpu_pod.sh: the slice $name is ${now:-not known yet}"
    sleep 30
  done
}

setup() {
  local archive
  archive=$(git -C "$(dirname "$0")/.." rev-parse --show-toplevel)/aogpt_jax.tar.gz
  call git -C "$(dirname "$archive")" archive --output="$archive" HEAD
  call gcloud compute tpus tpu-vm scp "$archive" "$name:" "${where[@]}" --worker=all
  call rm "$archive"
  on all "mkdir -p aogpt_jax && tar -xzf aogpt_jax.tar.gz -C aogpt_jax && cd aogpt_jax && pip install -e '.[tpu]'"
  [ -z "$prepare" ] || on all "$prepare"
}

run() {
  local line
  line=$(printf '%q ' "${command[@]}")
  # The shell that waits for the command keeps its status; SIGTERM is for the command alone.
  on all "cd aogpt_jax && rm -f run.status && nohup bash -c '$(printf '%s' "$line" | sed "s/'/'\\\\''/g")& echo \$! > run.pid; \
wait \$!; echo \$? > run.status' > run.log 2>&1 < /dev/null &"
}

logs() {
  on 0 "cd aogpt_jax && tail -n +1 -F --pid=\$(cat run.pid) run.log"
}

delete() {
  call gcloud compute tpus queued-resources delete "$name" "${where[@]}" --force --quiet
}

train() {
  local status
  while true; do
    if [ -n "$dry_run" ] || [ "$(state)" != ACTIVE ]; then
      if [ -z "$dry_run" ] && [ -n "$(state)" ]; then delete; fi # what is left of a slice that was preempted
      create
    fi
    status=""
    # A connection that breaks is no end of the run: while the slice is there, its log is followed again.
    if setup && run; then
      while [ -z "$status" ]; do
        [ -n "$dry_run" ] || sleep 10
        logs || true
        status=$(on 0 "cat aogpt_jax/run.status" || true)
        if [ -n "$dry_run" ]; then echo "$status" && status=0 && break; fi
        [ "$(state)" = ACTIVE ] || break
      done
    fi
    case $status in
      0) break ;;
      *)
        # Preemption ends the run some time before the slice is gone: 143 where it came as SIGTERM, 1 where a neighbour ended.
        sleep 120
        if [ "$(state)" = ACTIVE ]; then
          die "the run has ended with status ${status:-unknown}, and the slice is still there; see: $0 logs, and delete it"
        fi
        echo "tpu_pod.sh: the slice was preempted; the run goes on with another one"
        ;;
    esac
  done
  delete
}

case $action in
  stop) on all "kill -TERM \$(cat aogpt_jax/run.pid)" ;;
  *) "$action" ;;
esac
