# shellcheck shell=bash disable=SC2034  # what is set here is used by the verbs
# What the verbs share: arguments, settings, quoting, dry runs, work on every host.
# A verb sets ALLOWS (its own options, '--lines=' takes a value), sources this, calls `begin "$@"`;
# `reproduce`, which needs no TPU's name and no provider, calls `arguments "$@"`.
set -euo pipefail
shopt -s inherit_errexit
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
ROOT=$(dirname "$HERE")
TREE=agentrl_jax # the code on a host, below its home folder

say() { printf '%s\n' "$*" >&2; }
die() { say "error: $*"; exit 1; }
usage() { sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; }
refuse() { say "error: $1"; usage >&2; exit 2; }

# begin ARGUMENTS: those of `arguments`, a name that a TPU can have, and the settings.
begin() {
  arguments "$@"
  [[ $NAME =~ ^[a-z]([-a-z0-9]{0,60}[a-z0-9])?$ ]] ||
    refuse "'$NAME' is no name for a TPU: small letters, digits and -, a letter first"
  settings
}
# arguments ARGUMENTS: sets NAME, DRY_RUN, YES, COMMAND (the words behind --) and OPT_<option>.
arguments() {
  if [ $# -eq 0 ]; then usage >&2; exit 2; fi
  local word
  NAME='' DRY_RUN='' YES='' COMMAND=()
  for word in ${ALLOWS:-}; do clear_option "$word"; done
  while [ $# -gt 0 ]; do
    case $1 in
      -h | --help) usage; exit 0 ;;
      --dry-run) DRY_RUN=--dry-run ;;
      --yes) YES=--yes ;;
      --) shift; COMMAND=("$@"); break ;;
      -*) option "$1" ;;
      *) [ -z "$NAME" ] || refuse "two names, $NAME and $1; a command goes behind --"; NAME=$1 ;;
    esac
    shift
  done
}

clear_option() { local name=${1#--}; name=${name%=}; printf -v "OPT_${name//-/_}" %s ''; }
option() { # --lines=5 -> OPT_lines=5
  local name=${1%%=*} value=1
  [[ $1 != *=* ]] || { value=${1#*=}; name=$name=; }
  [[ " ${ALLOWS:-} " == *" $name "* ]] || refuse "unknown option $1"
  name=${name#--} name=${name%=}
  printf -v "OPT_${name//-/_}" %s "$value"
}

# shellcheck disable=SC1090  # both files are chosen when it runs
settings() {
  [ ! -f "${TPU_ENV_FILE:=$HERE/env}" ] || . "$TPU_ENV_FILE"
  : "${TPU_PROVIDER:=tpu_vm}" "${TPU_MODE:=spot}" "${TPU_HOSTS:=1}" "${TPU_PROJECT:=}"
  : "${TPU_ZONE:=}" "${TPU_TYPE:=}" "${TPU_RUNTIME:=}" "${TPU_BUCKET:=}" "${TPU_POLL:=30}"
  : "${TPU_PACKAGES:=}" "${TPU_FAILURES:=3}" "${TPU_GRACE:=180}" "${TPU_CREATE_FLAGS:=}"
  [[ $TPU_HOSTS =~ ^[1-9][0-9]*$ ]] || die "TPU_HOSTS=$TPU_HOSTS must be a number of hosts"
  TPU_BUCKET=${TPU_BUCKET#gs://}
  [[ $TPU_PROVIDER =~ ^[a-z_]+$ && -f $HERE/providers/$TPU_PROVIDER.sh ]] ||
    die "TPU_PROVIDER=$TPU_PROVIDER is none of: $(cd "$HERE/providers" && echo *.sh)"
  . "$HERE/providers/$TPU_PROVIDER.sh"
  provider_check
}

need_command() { [ ${#COMMAND[@]} -gt 0 ] || refuse 'the command is missing: it goes behind --'; }
need() { # need TPU_ZONE ...: settings that must not be empty
  local name
  for name in "$@"; do [ -n "${!name}" ] || die "$name is not set; see tpu_scripts/env.example"; done
}

find_workdir() { # sets WORKDIR to that of the command, '' without one
  local word before=''
  WORKDIR=''
  for word in "${COMMAND[@]}"; do
    case $word in --workdir=* | -workdir=*) WORKDIR=${word#*=} ;; esac
    case $before in --workdir | -workdir) WORKDIR=$word ;; esac
    before=$word
  done
}
# lost_workdir: why the workdir of the command goes with the TPU; nothing where it stays.
lost_workdir() {
  find_workdir
  case ${WORKDIR#./} in
    '' | gs://* | /*) return ;; # the last: a disk that stays, or not
    runs | runs/*) [ -z "$TPU_BUCKET" ] || return 0 ;;
  esac
  echo "--workdir=$WORKDIR is on the disks of the hosts, and they go with the TPU: take" \
    'gs://BUCKET/..., or set TPU_BUCKET and take runs/..., which is then in the bucket'
}
need_workdir_that_stays() { local lost; lost=$(lost_workdir); [ -z "$lost" ] || refuse "$lost"; }

# quoted WORDS: one line that any POSIX shell reads back as the same words.
quoted() {
  local word line='' quote="'\\''"
  for word in "$@"; do
    [[ $word =~ ^[A-Za-z0-9_./:=,@%+-]+$ ]] || word="'${word//\'/$quote}'"
    line+="${line:+ }$word"
  done
  printf '%s' "$line"
}
# Seconds that no setting of the clock moves, unlike $SECONDS, which is a difference of times of day: a
# clock set forward would have deleted a TPU that did not answer once.
now() {
  local up
  if { read -r up _ < /proc/uptime; } 2> /dev/null; then echo "${up%.*}"; else echo "$SECONDS"; fi
}
# did WAS WOULD: what was done; in a dry run, what would have been.
did() { if [ -n "$DRY_RUN" ]; then say "dry run: this would $2"; else say "$1"; fi; }
act() { if [ -n "$DRY_RUN" ]; then quoted "$@"; echo; else "$@"; fi; }
hosts() { seq 0 $((TPU_HOSTS - 1)); }
on_host() { local host=$1; shift; provider_ssh "$host" "$(quoted "$@")"; }
host_tool() { on_host "$1" bash "$TREE/tpu_scripts/host/$2" "${@:3}"; } # host_tool HOST TOOL WORDS
prefixed() {
  local line
  while IFS= read -r line || [ -n "$line" ]; do printf '[%s] %s\n' "$1" "$line"; done
}

# on_all FUNCTION WORDS: FUNCTION HOST WORDS for every host at once; the last failure's exit code.
on_all() {
  local host code=0 function=$1 started=()
  shift
  for host in $(hosts); do
    if [ -n "$DRY_RUN" ]; then "$function" "$host" "$@"; continue; fi
    ("$function" "$host" "$@" 2>&1 < /dev/null | prefixed "$host") &
    started+=($!)
  done
  for host in "${started[@]}"; do wait "$host" || code=$?; done
  return "$code"
}

# with_job HOST VERB: start or run the command on a host, as one of the processes of the run.
with_job() {
  local words=()
  mapfile -t words < <(provider_env "$1")
  # Not one of the job's words: babysit must know the job again.
  on_host "$1" ${AGENTRL_FALLBACK:+env AGENTRL_FALLBACK=1} bash "$TREE/tpu_scripts/host/job" "$2" \
    env "${words[@]}" "${COMMAND[@]}"
}
job_state() { # running, exited N, lost, other, none; unreachable if the host does not answer
  local words=() tool=$TREE/tpu_scripts/host/job
  if [ ${#COMMAND[@]} -gt 0 ]; then mapfile -t words < <(echo env; provider_env "$1"); fi
  words=(bash "$tool" state "${words[@]}" "${COMMAND[@]}")
  provider_ssh "$1" "if [ -e $tool ]; then $(quoted "${words[@]}"); else echo none; fi" 2> /dev/null |
    tail -n 1 || echo unreachable
}
# damaged STATES: a checkpoint is; the next launch takes the newest one that is whole. Once: if that
# fails too, it is a failure like others.
damaged() {
  if ! grep -qx 'exited 65' <<< "$1" || [ -n "${AGENTRL_FALLBACK:-}" ]; then
    unset AGENTRL_FALLBACK
    return 1
  fi
  on_all host_tool job log 3 || :
  say "$NAME: A CHECKPOINT IS DAMAGED: again, from the newest one that is whole"
  export AGENTRL_FALLBACK=1
}
cost() {
  if [ -n "$DRY_RUN" ]; then say "while $NAME exists it costs money ($(provider_resource))."
  else say "$NAME costs money until it is deleted ($(provider_resource))."; fi
  say "  delete it: tpu_scripts/delete $NAME"
}
