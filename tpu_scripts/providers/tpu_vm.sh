# shellcheck shell=bash
# Cloud TPU API: gcloud compute tpus tpu-vm and queued-resources (v2 to v6e).
# The queued resource and its node both have the name of the TPU.

provider_check() {
  need TPU_ZONE
  need_gcloud
  case $TPU_MODE in
    spot | on-demand | queued | queued-on-demand) ;;
    *) die "TPU_MODE=$TPU_MODE must be spot, on-demand, queued (spot) or queued-on-demand" ;;
  esac
}
provider_check_request() { # checks before anything is created
  need TPU_TYPE TPU_RUNTIME
  # v2 to v4 and v5p are named after their cores (8 per host), v5e and v6e after their chips.
  [[ $TPU_TYPE =~ ^(v[0-9][a-z]*)-([0-9]+)$ ]] ||
    die "TPU_TYPE=$TPU_TYPE is not a type of the Cloud TPU API: use one such as v5litepod-8 or v6e-8"
  local size=${BASH_REMATCH[2]} per_host=8
  case ${BASH_REMATCH[1]} in
    v5litepod | v6e) [ "$size" -le 8 ] || per_host=4 ;;
    v2 | v3 | v4 | v5p) ;;
    *) die "TPU_TYPE=$TPU_TYPE: the Cloud TPU API has v2 to v6e; use TPU_PROVIDER=gce" ;;
  esac
  need_hosts $(((size + per_host - 1) / per_host)) "$TPU_TYPE"
}
provider_resource() { echo "TPU VM, $TPU_TYPE, $TPU_MODE, $TPU_ZONE"; }

tpus() { # tpus GROUP VERB WORDS: run a gcloud command for this TPU
  local group=$1 verb=$2
  shift 2
  act gcloud compute tpus "$group" "$verb" "$NAME" "--zone=$TPU_ZONE" \
    ${TPU_PROJECT:+"--project=$TPU_PROJECT"} "$@"
}

provider_create() {
  local words=()
  read -ra words <<< "$TPU_CREATE_FLAGS"
  case $TPU_MODE in spot | queued) words+=(--spot) ;; esac
  case $TPU_MODE in
    queued*) tpus queued-resources create "--node-id=$NAME" "--accelerator-type=$TPU_TYPE" \
      "--runtime-version=$TPU_RUNTIME" "${words[@]}" ;;
    *) tpus tpu-vm create "--accelerator-type=$TPU_TYPE" "--version=$TPU_RUNTIME" \
      "${words[@]}" ;;
  esac
}

provider_calls() { echo 1; } # gcloud calls of a failed creation

provider_delete() {
  case $TPU_MODE in
    queued*) tpus queued-resources delete --force --quiet ;;
    *) tpus tpu-vm delete --quiet ;;
  esac
}

# describe GROUP FORMAT: print gcloud's value, or NOT_FOUND. All else is an error, so that an expired
# login does not lead to a second TPU.
describe() {
  local said
  if said=$(DRY_RUN='' tpus "$1" describe "--format=$2" 2>&1); then
    tail -n 1 <<< "$said" # skip warnings before the value
  elif [[ $said == *NOT_FOUND* || $said == *'not found'* ]]; then
    echo NOT_FOUND
  else
    die "gcloud cannot describe $NAME: $said"
  fi
}

provider_state() { # none, busy (being created or deleted), ready, lost (must be deleted)
  local state=ACTIVE
  if [[ $TPU_MODE == queued* ]]; then
    state=$(describe queued-resources 'value(state.state)') || return
  fi
  if [ "$state" = ACTIVE ]; then state=$(describe tpu-vm 'value(state)') || return; fi
  case $state in
    NOT_FOUND) echo none ;;
    READY) echo ready ;;
    PREEMPTED | TERMINATED | STOPPED | STOPPING | HIDING | HIDDEN) echo lost ;;
    SUSPENDED | SUSPENDING | FAILED) echo lost ;;
    *) echo busy ;;
  esac
}

provider_reason() {
  [[ $TPU_MODE != queued* ]] || describe queued-resources 'value(state.failedData.error.message)'
}

to_host() { # to_host VERB WORDS: tpu-vm ssh or scp; the tunnel needs alpha
  local flags=() track=()
  read -ra flags <<< "$TPU_SSH_FLAGS"
  [[ " $TPU_SSH_FLAGS " != *' --tunnel-through-iap '* ]] || track=(alpha)
  act gcloud "${track[@]}" compute tpus tpu-vm "$@" "--zone=$TPU_ZONE" \
    ${TPU_PROJECT:+"--project=$TPU_PROJECT"} "${flags[@]}"
}
provider_ssh() { to_host ssh "${TPU_SSH_USER:+$TPU_SSH_USER@}$NAME" "--worker=$1" "--command=$2"; }
provider_copy() { # provider_copy HOST FILE NAME: copy a file into a host's home folder
  to_host scp "$2" "${TPU_SSH_USER:+$TPU_SSH_USER@}$NAME:$3" "--worker=$1"
}
provider_setup() { :; } # arguments of host/setup
provider_env() { [ "$TPU_HOSTS" -eq 1 ] || echo JAX_COORDINATOR_ADDRESS=auto; }
