# shellcheck shell=bash disable=SC2154  # NAME, words etc. are set in babysit and lib.sh
# The steps of babysit: look at the TPU, create it, launch the command, watch it, replace the TPU.

failures=0 tries=0 odd_since='' well_since='' answered='' ran='' made='' looked=''

finish() { if [ -n "$OPT_delete" ]; then "$HERE/delete" "${words[@]}" --yes; else cost; fi; exit "$1"; }
reachable() { ! on_all job_state | grep -q ' unreachable$'; }
cannot_heal() { # cannot_heal WHAT: end babysit with gcloud's message
  say "error: $1, and waiting cannot help:"
  cat "$packed/error" >&2
  exit 1
}

look() { # sets state; network errors must not end babysit, but a login that never worked must
  state=$(provider_state 2> "$packed/error") || state=unknown
  if [ "$state" != unknown ]; then looked=1; return; fi
  case $(error_kind < "$packed/error") in
    quota | never) [ -n "$looked" ] || cannot_heal "the state of $NAME cannot be read" ;;
  esac
  cat "$packed/error" >&2
}

make() { # one gcloud call per try; `look` is not needed until it succeeds
  local kind
  until provider_create > "$packed/error" 2>&1; do
    kind=$(error_kind < "$packed/error")
    case $kind in
      exists) back_off "$NAME exists already"; return ;;
      never) cannot_heal "$NAME cannot be created" ;;
      # The quota of a deleted TPU is released with a delay; an unknown error may pass.
      quota | unknown) tries=$((tries + 1))
        if [ "$tries" -gt "$TPU_FAILURES" ] || [ "$kind$made" = quota ]; then
          cannot_heal "$NAME cannot be created"
        fi ;;
    esac
    cat "$packed/error" >&2
    back_off "$NAME could not be created" "$(provider_calls)"
  done
  cat "$packed/error" >&2
  made=1 tries=0 ran='' answered=''
  reset_back_off
  cost
}

replace() { # a TPU that was preempted before the command ran is replaced after a pause
  provider_reason > "$packed/error" 2> /dev/null || :
  case $(error_kind < "$packed/error") in quota | never) cannot_heal "$NAME failed" ;; esac
  say "$NAME was preempted"
  if ! provider_delete; then back_off "$NAME could not be deleted"
  elif [ -z "$ran" ]; then back_off "$NAME never ran the command"; fi
  ran=''
}

fail() { # fail CODE WHY [keep]: count a failure unless the TPU is gone; keep: ignore --delete
  case $(provider_state || :) in lost | none) return 0 ;; esac
  failures=$((failures + 1))
  say "failure $failures: $2"
  [ "$failures" -gt "$TPU_FAILURES" ] || return 0
  on_all host_tool job log 20 || :
  say "giving up after $failures failures; the last: $2"
  [ -z "${3:-}" ] || OPT_delete=''
  finish "$1"
}
launch() {
  if ! "$HERE/setup" "${words[@]}" "--archive=$packed/code.tar.gz" ||
    ! "$HERE/launch" "${words[@]}" -- "${COMMAND[@]}"; then
    reachable || return 0 # `unreachable` waits; this is not counted as a failure
    fail 1 'it could not be launched' keep
  fi
}

patient() { # patient SECONDS: whether hosts have disagreed for less than this
  [ $((SLEPT_MS - ${odd_since:=$SLEPT_MS})) -lt $(($1 * 1000)) ]
}
healthy() { # after 10 x TPU_GRACE without a failure, reset the count
  odd_since='' ran=1
  reset_back_off
  if [ $((SLEPT_MS - ${well_since:=$SLEPT_MS})) -ge $((TPU_GRACE * 10000)) ]; then failures=0; fi
}
unreachable() { # ssh fails, but the API reports READY: never delete
  if patient "$TPU_GRACE"; then return; fi
  provider_ssh 0 true || :
  say "$NAME is READY, but its hosts do not answer over ssh; it is not deleted." \
    'If a firewall is in the way, see TPU_SSH_FLAGS in tpu_scripts/env.example'
  if [ -z "$answered" ] && ! patient $((TPU_GRACE * 10)); then
    say "error: $NAME has never answered"
    cost
    exit 1
  fi
  back_off "$NAME does not answer"
}

watch() {
  local states bad
  states=$(on_all job_state | sed 's/^\[[0-9]*\] //') # one line per host
  bad=$(sed -n 's/^exited //p' <<< "$states" | grep -vxE '0|75' | tail -n 1) || :
  case $states in *unreachable*) unreachable; return ;; esac
  answered=1
  case $(sort -u <<< "$states" | tr '\n' ,) in
    'running,') healthy ;;
    'exited 0,') say "$NAME: done"; finish 0 ;;
    *other*) die "another command is running on $NAME: tpu_scripts/stop $NAME" ;;
    *running*) patient "$TPU_GRACE" || { say 'some hosts have ended'; on_all host_tool job stop 10; } ;;
    *) odd_since='' well_since=''
      case $bad in 2 | 126 | 127) # another start would fail in the same way
        on_all host_tool job log 20 || :
        say "error: the command is wrong (exit code $bad); see its last lines above"
        finish "$bad" ;;
      esac
      if ! damaged "$states" && [ -n "$bad" ]; then fail "$bad" "exit code $bad"; fi
      [[ $states == none* ]] || say "$NAME: again, from the last checkpoint (${states//$'\n'/, })"
      launch ;;
  esac
}
