# shellcheck shell=bash disable=SC2034  # the verbs use the variables that are set here
# Shared code of the verbs: arguments, settings, quoting, dry runs, work on every host.
# A verb sets ALLOWS (its options; '--lines=' takes a value), sources this file and calls `begin "$@"`.
set -euo pipefail
shopt -s inherit_errexit
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
ROOT=$(dirname "$HERE")
TREE=agentrl_jax # the code on a host, below its home folder

say() { printf '%s\n' "$*" >&2; }
die() { say "error: $*"; exit 1; }
usage() { sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; }
refuse() { say "error: $1"; usage >&2; exit 2; }

# begin ARGUMENTS: parse the arguments, check the name of the TPU, and read the settings.
begin() {
  arguments "$@"
  [[ $NAME =~ ^[a-z]([-a-z0-9]{0,60}[a-z0-9])?$ ]] ||
    refuse "'$NAME' is not a valid TPU name: use lower-case letters, digits and -, starting with a letter"
  settings
}
# arguments ARGUMENTS: sets NAME, DRY_RUN, YES, COMMAND (the words after --) and OPT_<option>.
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
      *) [ -z "$NAME" ] || refuse "two names, $NAME and $1; put the command after --"; NAME=$1 ;;
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

# shellcheck disable=SC1090  # both files are chosen at run time
settings() {
  local name
  [ -z "${TPU_ENV_FILE:-}" ] || [ -r "$TPU_ENV_FILE" ] ||
    die "TPU_ENV_FILE=$TPU_ENV_FILE: no such file; unset it to use tpu_scripts/env"
  [ ! -f "${TPU_ENV_FILE:=$HERE/env}" ] || . "$TPU_ENV_FILE"
  : "${TPU_PROVIDER:=tpu_vm}" "${TPU_MODE:=spot}" "${TPU_HOSTS:=1}" "${TPU_PROJECT:=}"
  : "${TPU_ZONE:=}" "${TPU_TYPE:=}" "${TPU_RUNTIME:=}" "${TPU_TOPOLOGY:=}" "${TPU_BUCKET:=}"
  : "${TPU_PACKAGES:=}" "${TPU_CREATE_FLAGS:=}" "${TPU_SSH_USER:=}" "${TPU_SSH_FLAGS:=}"
  : "${TPU_POLL:=30}" "${TPU_FAILURES:=3}" "${TPU_GRACE:=180}" "${TPU_WAIT_HOURS:=336}"
  [[ $TPU_HOSTS =~ ^[1-9][0-9]*$ ]] || die "TPU_HOSTS=$TPU_HOSTS must be a number of hosts"
  for name in TPU_FAILURES TPU_GRACE TPU_WAIT_HOURS; do
    [[ ${!name} =~ ^(0|[1-9][0-9]*)$ ]] || die "$name=${!name} must be a non-negative integer"
  done
  [[ $TPU_POLL =~ ^[0-9]*\.?[0-9]+$ && $TPU_POLL =~ [1-9] ]] ||
    die "TPU_POLL=$TPU_POLL must be a number of seconds"
  POLL_MS=$(milliseconds "$TPU_POLL")
  reset_back_off
  TPU_BUCKET=${TPU_BUCKET#gs://}
  TPU_BUCKET=${TPU_BUCKET%/}
  [[ $TPU_PROVIDER =~ ^[a-z_]+$ && -f $HERE/providers/$TPU_PROVIDER.sh ]] ||
    die "TPU_PROVIDER=$TPU_PROVIDER is not one of: $(cd "$HERE/providers" && echo *.sh)"
  # shellcheck disable=SC2329  # default; providers that know why a TPU failed override it
  provider_reason() { :; }
  . "$HERE/providers/$TPU_PROVIDER.sh"
  provider_check
}

need_command() { # sets PROGRAM to the command without its leading NAME=value words
  [ ${#COMMAND[@]} -gt 0 ] || refuse 'the command is missing: put it after --'
  local first=0
  while [[ ${COMMAND[first]:-} =~ ^[A-Za-z_][A-Za-z_0-9]*= ]]; do first=$((first + 1)); done
  PROGRAM=("${COMMAND[@]:first}")
  [[ ${PROGRAM[0]:--} != -* ]] ||
    refuse "the command after -- has no program: write -- python -m agentrl_jax.train --config=..."
}
need() { # need TPU_ZONE ...: these settings must not be empty
  local name
  for name in "$@"; do [ -n "${!name:-}" ] || die "$name is not set; see tpu_scripts/env.example"; done
}
need_gcloud() {
  [ -n "$DRY_RUN" ] || command -v gcloud > /dev/null || die 'gcloud is not installed or not on the PATH'
}
need_hosts() { # need_hosts COUNT WHY: TPU_HOSTS must be the number of hosts of the slice
  [ "$TPU_HOSTS" -eq "$1" ] || die "TPU_HOSTS=$TPU_HOSTS, but $2 has $1 hosts: set TPU_HOSTS=$1"
}

flag_of_command() { # flag_of_command config: the value of --config in the command, '' without one
  local word before='' value=''
  for word in "${COMMAND[@]}"; do
    case $word in "--$1="* | "-$1="*) value=${word#*=} ;; esac
    case $before in "--$1" | "-$1") value=$word ;; esac
    before=$word
  done
  printf '%s' "$value"
}
find_workdir() { WORKDIR=$(flag_of_command workdir); }
# lost_workdir: prints why the workdir would be lost with the TPU; nothing if it would not.
lost_workdir() {
  find_workdir
  case ${WORKDIR#./} in
    '' | gs://* | /*) return ;; # absolute paths may be on a permanent disk
    runs | runs/*) [ -z "$TPU_BUCKET" ] || return 0 ;;
  esac
  echo "--workdir=$WORKDIR is on the disks of the hosts, which are deleted with the TPU: use" \
    'gs://BUCKET/..., or set TPU_BUCKET and use runs/..., which is then in the bucket'
}
need_workdir_that_stays() { local lost; lost=$(lost_workdir); [ -z "$lost" ] || refuse "$lost"; }

# check_command: rejects a command that cannot succeed before anything is rented.
check_command() {
  local word bucket path before='' config
  find_workdir
  need_workdir_that_stays
  for word in "${PROGRAM[@]}"; do
    if [[ $word =~ ^--?[^=]+=gs://([^/]*) || ($before == -* && $word =~ ^gs://([^/]*)) ]]; then
      bucket=${BASH_REMATCH[1]}
      [ "$bucket" = "$TPU_BUCKET" ] || refuse "$word: the hosts mount only TPU_BUCKET, which is\
 '$TPU_BUCKET': set TPU_BUCKET=$bucket, or use a path in TPU_BUCKET"
    fi
    if [[ $before == -m && $word == agentrl_jax.* ]]; then
      path=${word//.//}
      [ -e "$ROOT/$path.py" ] || [ -d "$ROOT/$path" ] || refuse "$word: there is no such module"
    fi
    before=$word
  done
  [[ " ${PROGRAM[*]} " =~ \ (agentrl_jax\.train|[^\ ]*agentrl_jax/train\.py)\  ]] || return 0
  [ -n "$WORKDIR" ] || refuse 'the command has no --workdir: add --workdir=gs://BUCKET/...'
  config=$(flag_of_command config)
  [ -n "$config" ] || refuse 'the command has no --config'
  path=${config%%:*}
  if [[ $path != /* ]]; then
    [ -f "$ROOT/$path" ] || refuse "--config=$config: $ROOT has no such file"
    git -C "$ROOT" ls-files --error-unmatch -- "$path" > /dev/null 2>&1 ||
      refuse "--config=$config: hosts only get files that git tracks: git add $path"
  fi
  [ -n "$DRY_RUN" ] || check_config
}
check_config() { # reads the config with this machine's Python, if it has the packages
  local output code=0
  output=$(cd "$ROOT" && JAX_PLATFORMS=cpu env "${COMMAND[@]}" --show_config 2>&1 < /dev/null) || code=$?
  if [ "$code" -eq 2 ]; then refuse "$(tail -n 1 <<< "$output" | sed 's/^error: //')"; fi
  if [ "$code" -ne 0 ]; then say "the config was not checked: ${PROGRAM[0]} could not read it here"; fi
}

# quoted WORDS: one line that every POSIX shell splits into the same words.
quoted() {
  local word line='' quote="'\\''"
  for word in "$@"; do
    [[ $word =~ ^[A-Za-z0-9_./:=,@%+-]+$ ]] || word="'${word//\'/$quote}'"
    line+="${line:+ }$word"
  done
  printf '%s' "$line"
}
# Seconds of a monotonic clock; $SECONDS follows the time of day.
now() {
  local up
  if { read -r up _ < /proc/uptime; } 2> /dev/null; then echo "${up%.*}"; else echo "$SECONDS"; fi
}
# Waits count slept time: setting the clock forward does not end them, and tests can fake it.
SLEPT_MS=0 LONGEST_MS=600000
milliseconds() { LC_ALL=C printf '%.0f' "${1}e3"; }
rest() { # rest MILLISECONDS
  local seconds=$(($1 / 1000))
  [ $(($1 % 1000)) -eq 0 ] || printf -v seconds '%d.%03d' "$seconds" $(($1 % 1000))
  sleep "$seconds" > /dev/null 2>&1 & # in the background: a signal ends the wait at once
  wait "$!"
  SLEPT_MS=$((SLEPT_MS + $1))
}
# Wait 2, 4, 8, then 10 minutes: at most 10 calls per hour. Polls below a second are for tests.
reset_back_off() {
  BACK_OFF_MS=120000 WAIT_FROM=$SLEPT_MS
  [ "$POLL_MS" -ge 1000 ] || BACK_OFF_MS=$((4 * POLL_MS))
}
back_off() { # back_off WHY [TIMES]: wait twice as long as last time; exit after TPU_WAIT_HOURS
  local pause=$((BACK_OFF_MS * ${2:-1}))
  if [ $((SLEPT_MS - WAIT_FROM)) -ge $((TPU_WAIT_HOURS * 3600000)) ]; then
    say "error: $1; giving up after TPU_WAIT_HOURS=$TPU_WAIT_HOURS"
    exit 1
  fi
  say "$1; next try in $(((pause + 999) / 1000)) s"
  rest "$pause"
  BACK_OFF_MS=$((BACK_OFF_MS * 2))
  [ "$BACK_OFF_MS" -le "$LONGEST_MS" ] || BACK_OFF_MS=$LONGEST_MS
}

# error_kind: classifies gcloud's message on stdin. Network comes before login: a token that cannot be
# refreshed without a network is not an expired login. Capacity and rates come before quota:
# RESOURCE_EXHAUSTED and code 8 are used for all three.
#   exists: check again   wait: may pass   quota, never: waiting cannot help   unknown
error_kind() {
  local text kind patterns
  text=$(cat)
  if [[ $text == *ERROR:* ]]; then text=${text#*ERROR:}; fi # skip warnings and progress
  text=${text//[\/\'\"\[]"$NAME"/} text=${text//\/"${TPU_PROJECT:-$NAME}"/} # ignore names
  while read -r kind patterns; do
    if grep -qiE -- "$patterns" <<< "$text"; then echo "$kind"; return; fi
  done <<'KINDS'
exists already[ _]exists
wait no more capacity|insufficient [a-z ]*capacity|resource_pool_exhausted|enough resources|stock-?out|state PREEMPTED
wait rate.?limit|per (minute|second|100 seconds)|too many requests
wait connection ?(error|reset|refused|aborted|timed|pool)|new connection|name resolution|resolve host|timed? ?out|max retries|network is unreachable|unable to find the server|TransportError
quota quota
never permission|denied|forbidden|billing|authenticat|credential|auth (tokens?|login)|active account|invalid|not[ _]found|not exist|could not be found|not been used|disabled|unrecognized|must be specified|policy_violated|constraint|not (supported|allowed)
wait exhausted|unavailable|internal|deadline|aborted|cancelled|try again|\b(429|50[0-4])\b|"?code"?: "?(8|10|13|14)\b
unknown .*
KINDS
  echo unknown
}

# did WAS WOULD: print what was done, or in a dry run what would have been done.
did() { if [ -n "$DRY_RUN" ]; then say "dry run: this would $2"; else say "$1"; fi; }
act() { if [ -n "$DRY_RUN" ]; then quoted "$@"; echo; else "$@"; fi; }
hosts() { seq 0 $((TPU_HOSTS - 1)); }
on_host() { local host=$1; shift; provider_ssh "$host" "$(quoted "$@")"; }
host_tool() { on_host "$1" bash "$TREE/tpu_scripts/host/$2" "${@:3}"; } # host_tool HOST TOOL WORDS
prefixed() {
  local line
  while IFS= read -r line || [ -n "$line" ]; do printf '[%s] %s\n' "$1" "$line"; done
}

# on_all FUNCTION WORDS: run FUNCTION HOST WORDS for all hosts in parallel; exit code: the last failure's.
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

# with_job HOST VERB: start or run the command on a host, as one process of the run.
with_job() {
  local words=()
  mapfile -t words < <(provider_env "$1")
  # Not part of the job's words: babysit must recognise the job later.
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
# damaged STATES: whether a checkpoint is damaged. The next launch then uses the newest intact one. If
# that fails as well, it counts as an ordinary failure.
damaged() {
  if ! grep -qx 'exited 65' <<< "$1" || [ -n "${AGENTRL_FALLBACK:-}" ]; then
    unset AGENTRL_FALLBACK
    return 1
  fi
  on_all host_tool job log 3 || :
  say "$NAME: A CHECKPOINT IS DAMAGED: restarting from the newest intact one"
  export AGENTRL_FALLBACK=1
}
cost() {
  if [ -n "$DRY_RUN" ]; then say "while $NAME exists it costs money ($(provider_resource))."
  else say "$NAME costs money until it is deleted ($(provider_resource))."; fi
  say "  delete it: tpu_scripts/delete $NAME"
}
