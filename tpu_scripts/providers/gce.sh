# shellcheck shell=bash
# Compute Engine: one host is an instance; several are a template, a workload policy and a group.
# TPU_TYPE is a machine type (ct6e-standard-4t), TPU_RUNTIME a project/family of images.

provider_check() {
  need TPU_ZONE
  case $TPU_MODE in
    spot | on-demand) ;;
    *) die "TPU_MODE=$TPU_MODE: Compute Engine takes spot or on-demand" ;;
  esac
}
provider_resource() { echo "$TPU_HOSTS x $TPU_TYPE on Compute Engine, $TPU_MODE, $TPU_ZONE"; }

engine() { act gcloud compute "$@" ${TPU_PROJECT:+"--project=$TPU_PROJECT"}; }
group() { engine instance-groups managed "$1" "$NAME" "--zone=$TPU_ZONE" "${@:2}"; }

provider_create() {
  local words=() region=${TPU_ZONE%-*}
  need TPU_TYPE TPU_RUNTIME
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
  need TPU_TOPOLOGY TPU_PROJECT
  # All or nothing: what is left of a slice that did not come would stand in the way of the next.
  if ! engine resource-policies create workload-policy "$NAME" --type=HIGH_THROUGHPUT \
    "--accelerator-topology=$TPU_TOPOLOGY" "--region=$region" ||
    ! engine instance-templates create "$NAME" "${words[@]}" ||
    ! group create "--template=$NAME" "--size=$TPU_HOSTS" --default-action-on-vm-failure=do-nothing \
      "--workload-policy=projects/$TPU_PROJECT/regions/$region/resourcePolicies/$NAME"; then
    provider_delete
    return 1
  fi
}

provider_delete() { # the parts of a slice that was only half made may be missing
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
    error*) die "gcloud cannot say how $NAME is: $said" ;;
    *STOP* | *TERMINATED* | *SUSPEND*) echo lost ;;
    *) if [ "$(grep -c '^RUNNING$' <<< "$said")" -eq "$TPU_HOSTS" ]; then echo ready; else echo busy; fi ;;
  esac
}

instance() { # name of a host; a group chooses names, and sorts them when asked
  if [ "$TPU_HOSTS" -eq 1 ]; then echo "$NAME"; return; fi
  if [ -n "$DRY_RUN" ]; then echo "$NAME-HOST$1"; return; fi
  group list-instances '--format=value(instance.basename())' --sort-by=instance | sed -n "$(($1 + 1))p"
}
provider_ssh() { engine ssh "$(instance "$1")" "--zone=$TPU_ZONE" "--command=$2"; }
provider_copy() { engine scp "$2" "$(instance "$1"):$3" "--zone=$TPU_ZONE"; }
provider_setup() { :; }
provider_env() { [ "$TPU_HOSTS" -eq 1 ] || echo JAX_COORDINATOR_ADDRESS=auto; }
