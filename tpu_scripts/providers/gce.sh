# shellcheck shell=bash
# Compute Engine: one host is an instance; several are a template, a workload policy and a group.
# TPU_TYPE is a machine type (ct6e-standard-4t), TPU_RUNTIME a project/family of images.

provider_check() {
  need TPU_ZONE
  need_gcloud
  case $TPU_MODE in
    spot | on-demand) ;;
    *) die "TPU_MODE=$TPU_MODE: Compute Engine takes spot or on-demand" ;;
  esac
}
provider_check_request() {
  need TPU_TYPE TPU_RUNTIME
  [[ $TPU_RUNTIME == ?*/?* ]] ||
    die "TPU_RUNTIME=$TPU_RUNTIME must be PROJECT/FAMILY of an image on Compute Engine"
  [[ $TPU_TYPE =~ -([1-9][0-9]*)t$ ]] ||
    die "TPU_TYPE=$TPU_TYPE is not a machine type with TPUs: use one such as ct6e-standard-4t"
  local chips=${BASH_REMATCH[1]}
  if [ "$TPU_HOSTS" -gt 1 ]; then need TPU_TOPOLOGY TPU_PROJECT; fi
  [ -n "$TPU_TOPOLOGY" ] || return 0
  [[ $TPU_TOPOLOGY =~ ^[1-9][0-9]*(x[1-9][0-9]*){1,2}$ ]] ||
    die "TPU_TOPOLOGY=$TPU_TOPOLOGY must be chips along each axis, such as 4x4"
  need_hosts $(((${TPU_TOPOLOGY//x/*} + chips - 1) / chips)) "TPU_TOPOLOGY=$TPU_TOPOLOGY of $TPU_TYPE"
}
provider_resource() { echo "$TPU_HOSTS x $TPU_TYPE on Compute Engine, $TPU_MODE, $TPU_ZONE"; }

engine() { act gcloud compute "$@" ${TPU_PROJECT:+"--project=$TPU_PROJECT"}; }
group() { engine instance-groups managed "$1" "$NAME" "--zone=$TPU_ZONE" "${@:2}"; }

provider_create() {
  local words=() region=${TPU_ZONE%-*}
  read -ra words <<< "$TPU_CREATE_FLAGS"
  words+=("--machine-type=$TPU_TYPE" "--image-project=${TPU_RUNTIME%%/*}" \
    "--image-family=${TPU_RUNTIME##*/}" --maintenance-policy=TERMINATE)
  if [ "$TPU_MODE" = spot ]; then
    words+=(--provisioning-model=SPOT --instance-termination-action=STOP)
  fi
  if [ "$TPU_HOSTS" -eq 1 ]; then
    engine instances create "$NAME" "--zone=$TPU_ZONE" "${words[@]}"
    return
  fi
  # All or nothing: the parts of an incomplete slice would block the next attempt.
  if ! engine resource-policies create workload-policy "$NAME" --type=HIGH_THROUGHPUT \
    "--accelerator-topology=$TPU_TOPOLOGY" "--region=$region" ||
    ! engine instance-templates create "$NAME" "${words[@]}" ||
    ! group create "--template=$NAME" "--size=$TPU_HOSTS" --default-action-on-vm-failure=do-nothing \
      "--workload-policy=projects/$TPU_PROJECT/regions/$region/resourcePolicies/$NAME"; then
    provider_delete
    return 1
  fi
}

# gcloud calls of a failed creation: a slice has three parts to create and then to delete.
provider_calls() { if [ "$TPU_HOSTS" -eq 1 ]; then echo 1; else echo 6; fi; }

provider_delete() { # parts of an incomplete slice may be missing
  if [ "$TPU_HOSTS" -eq 1 ]; then
    engine instances delete "$NAME" "--zone=$TPU_ZONE" --quiet
    return
  fi
  group delete --quiet || say 'the group was not deleted; is it there?'
  engine instance-templates delete "$NAME" --quiet || say 'the template was not deleted'
  engine resource-policies delete "$NAME" "--region=${TPU_ZONE%-*}" --quiet ||
    say 'the workload policy was not deleted'
}

provider_state() {
  local said
  if [ "$TPU_HOSTS" -eq 1 ]; then
    said=$(DRY_RUN='' engine instances describe "$NAME" "--zone=$TPU_ZONE" \
      '--format=value(status)' 2>&1) || said="error $said"
  else
    said=$(DRY_RUN='' group list-instances '--format=value(instanceStatus)' 2>&1) ||
      said="error $said"
  fi
  case $said in
    error*'not found'* | error*NOT_FOUND*) echo none ;;
    error*) die "gcloud cannot describe $NAME: $said" ;;
    *STOP* | *TERMINATED* | *SUSPEND*) echo lost ;;
    *) if [ "$(grep -c '^RUNNING$' <<< "$said")" -eq "$TPU_HOSTS" ]; then echo ready; else echo busy; fi ;;
  esac
}

instance() { # name of a host; groups choose the names, so sort them
  if [ "$TPU_HOSTS" -eq 1 ]; then echo "$NAME"; return; fi
  if [ -n "$DRY_RUN" ]; then echo "$NAME-HOST$1"; return; fi
  group list-instances '--format=value(instance.basename())' --sort-by=instance | sed -n "$(($1 + 1))p"
}
to_host() { # to_host VERB WORDS: ssh or scp
  local flags=()
  read -ra flags <<< "$TPU_SSH_FLAGS"
  engine "$@" "--zone=$TPU_ZONE" "${flags[@]}"
}
provider_ssh() { to_host ssh "${TPU_SSH_USER:+$TPU_SSH_USER@}$(instance "$1")" "--command=$2"; }
provider_copy() { to_host scp "$2" "${TPU_SSH_USER:+$TPU_SSH_USER@}$(instance "$1"):$3"; }
provider_setup() { :; }
provider_env() { [ "$TPU_HOSTS" -eq 1 ] || echo JAX_COORDINATOR_ADDRESS=auto; }
