#!/usr/bin/env bash
# Starts a Ray cluster for shardline: the head on this machine, a worker on each host of a small file, over ssh.
set -euo pipefail

usage() {
  cat <<'TEXT'
Usage: launch.sh [OPTION]... HOSTS_FILE

Starts a Ray head on this machine and a Ray worker on every host of HOSTS_FILE, and waits until all have joined.
Then `shardline run --address auto ...` on this machine places one stage on each node.

  --down             stop everything that launch.sh started, here and on the hosts
  --print            print the commands to type by hand instead, and start nothing
  --head-ip ADDRESS  this machine's address on the network that the hosts share (default: the one that the route to
                     the first host leaves from)
  --port PORT        the head's port (default: 6379)
  --python PATH      Python with shardline, on the hosts and here (default: $SHARDLINE_PYTHON, else the one beside
                     this installation). Ray, shardline and Python must have the same version everywhere.
  --timeout SECONDS  how long the hosts may take to join (default: 60)
  --help             this text

HOSTS_FILE has one host a line: [user@]host [address]. The address is the host's own on the shared network, where its
name resolves to another one. Empty lines and what follows a # are ignored. This machine is not listed.

Ray's token (~/.ray/auth_token) is made if there is none, and copied to the hosts: only who has it can use the cluster.
The stages talk on ports of their own choice; the hosts must be able to reach each other on all ports.

Environment: SHARDLINE_SSH is used instead of "ssh -o BatchMode=yes -o ConnectTimeout=10"; it is given a host and one
command line. RAY_TMPDIR goes to this machine's Ray.
TEXT
}

fail() {
  printf 'launch.sh: %s\n' "$*" >&2
  exit 1
}

misuse() {
  printf 'launch.sh: %s\nTry: launch.sh --help\n' "$*" >&2
  exit 2
}

action=up
head_ip=
port=6379
# What --down must be given again.
again=()
timeout=60
python=${SHARDLINE_PYTHON:-}
hosts_file=

while (($#)); do
  case $1 in
    --help | -h)
      usage
      exit 0
      ;;
    --down) action=down ;;
    --print) action=print ;;
    --head-ip | --port | --python | --timeout)
      (($# > 1)) || misuse "$1 needs a value"
      case $1 in
        --head-ip)
          head_ip=$2
          again+=("$1" "$2")
          ;;
        --port)
          port=$2
          again+=("$1" "$2")
          ;;
        --python) python=$2 ;;
        --timeout) timeout=$2 ;;
      esac
      shift
      ;;
    -*) misuse "unknown option $1" ;;
    *)
      [[ -z $hosts_file ]] || misuse "one hosts file, not two: $hosts_file and $1"
      hosts_file=$1
      ;;
  esac
  shift
done

[[ -n $hosts_file ]] || misuse "no hosts file"
[[ ! -d $hosts_file ]] || fail "$hosts_file is a folder, not a file of hosts"
[[ -r $hosts_file ]] || fail "cannot read $hosts_file"
[[ $port =~ ^[1-9][0-9]{0,4}$ ]] || misuse "--port $port is not a port"
((port < 65536)) || misuse "--port $port is not a port"
[[ $timeout =~ ^[0-9]+$ ]] || misuse "--timeout $timeout is not a number of seconds"

if [[ -z $python ]]; then
  here=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")" && pwd)
  # In a checkout: its .venv. Installed: <venv>/lib/pythonX.Y/site-packages/shardline/cluster.
  for python in "$here/../.venv/bin/python" "$here/../../../../../bin/python" python3; do
    command -v "$python" >/dev/null && break
  done
  [[ $python == */* ]] && python=$(cd "$(dirname "$python")" && pwd)/$(basename "$python")
fi
[[ $python =~ ^[A-Za-z0-9_./+-]+$ ]] || fail "the path of Python has characters that a remote shell would change: $python"
command -v "$python" >/dev/null || fail "there is no $python here"
# Beside Python, and without following its link out of the virtual environment.
python=$(command -v "$python")
ray=${python%/*}/ray

# Of each host: what ssh is given, and its address on the shared network.
hosts=()
addresses=()
number=0
while IFS= read -r line || [[ -n $line ]]; do
  number=$((number + 1))
  read -r -a words <<<"${line%%#*}"
  ((${#words[@]})) || continue
  ((${#words[@]} < 3)) || fail "$hosts_file:$number: too many words: [user@]host [address]"
  [[ ${words[0]} =~ ^([A-Za-z0-9_.-]+@)?[A-Za-z0-9_.:-]+$ && ${words[0]} != -* ]] ||
    fail "$hosts_file:$number: not a host: ${words[0]}"
  address=${words[1]:-}
  if [[ -z $address ]]; then
    address=$(getent ahosts "${words[0]#*@}" | awk '{ print $1; exit }') || true
    [[ -n $address ]] || fail "$hosts_file:$number: the name ${words[0]#*@} is not known here; give its address: ${words[0]} ADDRESS"
  fi
  [[ $address =~ ^[0-9a-fA-F:.]+$ ]] || fail "$hosts_file:$number: not an IP address: $address"
  [[ $address != 127.* && $address != ::1 ]] ||
    fail "$hosts_file:$number: ${words[0]} is $address here, where other hosts cannot reach it; give its address: ${words[0]} ADDRESS"
  for other in "${addresses[@]+"${addresses[@]}"}"; do
    [[ $other != "$address" ]] || fail "$hosts_file:$number: two hosts with the address $address"
  done
  hosts+=("${words[0]}")
  addresses+=("$address")
done <"$hosts_file"
((${#hosts[@]})) || fail "$hosts_file lists no host"

if [[ -z $head_ip ]]; then
  head_ip=$(ip -o route get "${addresses[0]}" 2>/dev/null | sed -n 's/.* src \([^ ]*\).*/\1/p') || true
  [[ -n $head_ip ]] || fail "cannot tell which of this machine's addresses ${hosts[0]} can reach: give --head-ip"
fi
for address in "${addresses[@]}"; do
  [[ $address != "$head_ip" ]] || fail "$address is this machine, where the head runs: leave it out of $hosts_file"
done

mark=$head_ip:$port
down_command="$0 --down ${again[*]+"${again[*]} "}$hosts_file"
# The same as ray_runtime.SETTINGS, and the mark by which --down finds what was started.
settings="RAY_AUTH_MODE=token RAY_worker_niceness=0 RAY_health_check_initial_delay_ms=5000"
settings+=" RAY_health_check_period_ms=3000 RAY_health_check_timeout_ms=3000 RAY_health_check_failure_threshold=3"
settings+=" RAY_USAGE_STATS_ENABLED=0 SHARDLINE_LAUNCHED=$mark"
head_command="env $settings $ray start --head --node-ip-address=$head_ip --port=$port --include-dashboard=false"
worker_command() {
  echo "env $settings $ray start --address=$mark --node-ip-address=$1"
}
tool="$python -m shardline.cluster.node_tool"

read -r -a ssh_command <<<"${SHARDLINE_SSH:-ssh -o BatchMode=yes -o ConnectTimeout=10}"
on() {
  # Without standard input the remote command must not eat ours.
  "${ssh_command[@]}" "$1" "$2"
}

# Runs `on HOST COMMAND` on all hosts at once, COMMAND being what `$1 INDEX` prints. What a host says goes to
# $logs/INDEX; returns the number of hosts where it failed and says which.
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
on_all() {
  local index pids=() failed=0
  for index in "${!hosts[@]}"; do
    on "${hosts[index]}" "$("$1" "$index")" <"${2:-/dev/null}" >"$logs/$index" 2>&1 &
    pids+=($!)
  done
  for index in "${!hosts[@]}"; do
    if ! wait "${pids[index]}"; then
      failed=$((failed + 1))
      printf '%s: failed:\n' "${hosts[index]}" >&2
      sed 's/^/    /' "$logs/$index" | tail -n 15 >&2
    fi
  done
  return $((failed > 0))
}

stop_command() { echo "$tool stop $mark"; }
version_command() { echo "$tool versions"; }
token_command() { echo "$tool take-token"; }
start_command() { worker_command "${addresses[$1]}"; }

down() {
  local failed=0
  on_all stop_command || failed=1
  $tool stop "$mark" >/dev/null || failed=1
  return $failed
}

case $action in
  print)
    cat <<TEXT
On this machine ($head_ip), first Ray's token, if there is none yet, and then the head:

    $tool make-token >/dev/null
    $head_command

On every other host, with ~/.ray/auth_token copied there from this machine (mode 600):

TEXT
    for index in "${!hosts[@]}"; do
      printf '    # %s\n    %s\n' "${hosts[index]}" "$(worker_command "${addresses[index]}")"
    done
    cat <<TEXT

Then, here: shardline run --address $mark MODEL -p "..."
TEXT
    exit 0
    ;;
  down)
    down || fail "something may still run on the hosts above"
    printf 'Stopped what launch.sh started, here and on %s.\n' "${hosts[*]}"
    exit 0
    ;;
esac

ours=$($tool versions) || fail "$python here cannot import shardline: give --python"
printf 'This machine (%s): %s\n' "$head_ip" "$ours"
on_all version_command || fail "every host needs $python with shardline, and an ssh login that asks for nothing"
for index in "${!hosts[@]}"; do
  theirs=$(tail -n 1 "$logs/$index")
  [[ $theirs == "$ours" ]] || fail "${hosts[index]} has $theirs; this machine has $ours. They must be the same"
done

[[ $($tool running "$mark") == 0 ]] || fail "a cluster that launch.sh started runs at $mark: $down_command"
$tool make-token >"$logs/token" || fail "cannot make Ray's token"
on_all token_command "$logs/token" || fail "cannot copy Ray's token to the hosts above"

# Whatever goes wrong from here on leaves nothing running.
trap 'rm -rf "$logs"; down >/dev/null 2>&1 || true' EXIT
trap 'exit 130' INT TERM
$head_command >"$logs/head" 2>&1 </dev/null || {
  tail -n 15 "$logs/head" >&2
  fail "the head did not start. Is another one running on port $port? Then: launch.sh --down, or --port"
}
on_all start_command || fail "the workers above did not start"

expected=("this-machine=$head_ip")
for index in "${!hosts[@]}"; do
  expected+=("${hosts[index]}=${addresses[index]}")
done
RAY_AUTH_MODE=token $tool wait "$mark" "$timeout" "${expected[@]}" || {
  printf 'Can the hosts above reach %s on port %s and all others, both ways? Their logs are in /tmp/ray there.\n' \
    "$head_ip" "$port" >&2
  fail "not all hosts have joined; everything was stopped again"
}
trap 'rm -rf "$logs"' EXIT
cat <<TEXT
All $((${#hosts[@]} + 1)) nodes have joined the cluster at $mark.
  shardline run --address auto MODEL -p "..."
  $down_command
TEXT
