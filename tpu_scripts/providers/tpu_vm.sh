# shellcheck shell=bash
# Cloud TPU API: gcloud compute tpus tpu-vm and queued-resources (v2 to v6e).
# The queued resource and its node both have the name of the TPU.

provider_check() {
  need TPU_ZONE
  case $TPU_MODE in
    spot | on-demand | queued | queued-on-demand) ;;
    *) die "TPU_MODE=$TPU_MODE must be spot, on-demand, queued (spot) or queued-on-demand" ;;
  esac
}
provider_resource() { echo "TPU VM, $TPU_TYPE, $TPU_MODE, $TPU_ZONE"; }

tpus() { # tpus GROUP VERB WORDS: the command for this TPU
  local group=$1 verb=$2
  shift 2
  act gcloud compute tpus "$group" "$verb" "$NAME" "--zone=$TPU_ZONE" \
    ${TPU_PROJECT:+"--project=$TPU_PROJECT"} "$@"
}

provider_create() {
  local words=()
  need TPU_TYPE TPU_RUNTIME
  read -ra words <<< "$TPU_CREATE_FLAGS"
  case $TPU_MODE in spot | queued) words+=(--spot) ;; esac
  case $TPU_MODE in
    queued*) tpus queued-resources create "--node-id=$NAME" "--accelerator-type=$TPU_TYPE" \
      "--runtime-version=$TPU_RUNTIME" "${words[@]}" ;;
    *) tpus tpu-vm create "--accelerator-type=$TPU_TYPE" "--version=$TPU_RUNTIME" \
      "${words[@]}" ;;
  esac
}

provider_delete() {
  case $TPU_MODE in
    queued*) tpus queued-resources delete --force --quiet ;;
    *) tpus tpu-vm delete --quiet ;;
  esac
}

# describe GROUP FORMAT: what gcloud says, NOT_FOUND if there is none; anything else is an error,
# so that nobody creates a second TPU because a login has expired.
describe() {
  local said
  if said=$(DRY_RUN='' tpus "$1" describe "--format=$2" 2>&1); then
    tail -n 1 <<< "$said" # warnings come before the value
  elif [[ $said == *NOT_FOUND* || $said == *'not found'* ]]; then
    echo NOT_FOUND
  else
    die "gcloud cannot say how $NAME is: $said"
  fi
}

provider_state() { # none, busy (being made or deleted), ready, lost (must be deleted)
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

provider_ssh() { tpus tpu-vm ssh "--worker=$1" "--command=$2"; }
provider_copy() { # provider_copy HOST FILE NAME: a file into the home folder of a host
  act gcloud compute tpus tpu-vm scp "$2" "$NAME:$3" "--worker=$1" "--zone=$TPU_ZONE" \
    ${TPU_PROJECT:+"--project=$TPU_PROJECT"}
}
provider_setup() { :; } # words for host/setup
provider_env() { [ "$TPU_HOSTS" -eq 1 ] || echo JAX_COORDINATOR_ADDRESS=auto; }
