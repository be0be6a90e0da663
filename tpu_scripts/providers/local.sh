# shellcheck shell=bash
# This machine: each host is a folder (its home) and processes here, for tests and for trying a
# command. The hosts form one run over TPU_LOCAL_PORT.

provider_check() {
  need TPU_LOCAL_ROOT
  : "${TPU_LOCAL_PORT:=8476}" "${TPU_LOCAL_PYTHON:=$(command -v python3)}"
  # shellcheck disable=SC2153
  LOCAL=$TPU_LOCAL_ROOT/$NAME
}
provider_check_request() { :; }
provider_resource() { echo "$TPU_HOSTS folders in $LOCAL"; }
cost() { say "$NAME costs nothing ($(provider_resource)); delete it: tpu_scripts/delete $NAME"; }

provider_create() {
  local host
  for host in $(hosts); do act mkdir -p "$LOCAL/$host"; done
}
provider_calls() { echo 1; }
provider_delete() { # immediately, like a spot VM
  local host pid
  for host in $(hosts); do
    pid=$LOCAL/$host/agentrl_job/pid
    if [ -z "$DRY_RUN" ] && [ -f "$pid" ]; then kill -KILL -- "-$(cat "$pid")" 2> /dev/null || :; fi
  done
  act rm -rf "$LOCAL"
}
provider_state() { # a file named preempted simulates the end of a spot VM
  if [ ! -d "$LOCAL" ]; then echo none; elif [ -e "$LOCAL/preempted" ]; then echo lost; else echo ready; fi
}
provider_ssh() { # 255: ssh's exit code if it cannot connect
  [ -n "$DRY_RUN" ] || [ ! -e "$LOCAL/preempted" ] || return 255
  act env -C "$LOCAL/$1" "HOME=$LOCAL/$1" bash -c "$2"
}
provider_copy() { act cp "$2" "$LOCAL/$1/$3"; }
provider_setup() { echo "--python=$TPU_LOCAL_PYTHON"; echo "--buckets=$TPU_LOCAL_ROOT/buckets"; }
provider_env() {
  [ "$TPU_HOSTS" -gt 1 ] || return 0
  printf '%s\n' "JAX_COORDINATOR_ADDRESS=localhost:$TPU_LOCAL_PORT" \
    "JAX_NUM_PROCESSES=$TPU_HOSTS" "JAX_PROCESS_ID=$1"
}
