#!/usr/bin/env bash
# Whether a run should be started again, by its status.json: launchers themselves only say zero or not.
#
#   before=$(examples/requeue.sh mark RUN)              before the launch
#   examples/requeue.sh decide RUN "$before" RESTARTS   after it; exit code 0: start again, 1: do not
#   examples/requeue.sh code RUN "$before" CODE         exit code: the worker's, else the launcher's CODE
#
# RUN is the run's folder, RESTARTS how often it was started again before. Again: after a stop by a signal
# (75), and, MAX_RESTARTS times (10) since the last such stop, after what another attempt may be spared: a lost
# process or machine, memory, a hang (71), input and output (74), a folder still locked (73). A stop by a signal
# at the step of the one before has got nowhere, and counts as one of these. RUN/.requeue remembers the last
# stop, as RESTARTS and its step. Not again: a finished run (0), a
# wrong configuration (2), wrong data (65), a diverged run (70), a device that computes wrong (76), a checkpoint of
# something else (78), and an
# attempt that never reached its folder, since what stopped it will be there the next time too.
set -euo pipefail

say() { echo "requeue: $*" >&2; }

read_status() { # sets state, code, step and reason; empty where status.json does not say
    {
        read -r state
        read -r code
        read -r step
        read -r reason
    } < <("${PYTHON:-python3}" -I -S - "$run/status.json" <<'PYTHON'
import json, sys
try:
    with open(sys.argv[1], encoding="utf-8") as file:
        status = dict(json.load(file))
except (OSError, ValueError, TypeError):
    status = {}
for name in ("state", "exit_code", "step", "reason"):
    value = status.get(name)
    print("" if value is None else " ".join(str(value).split()))
PYTHON
    )
}

mark() { # which status.json is there: every attempt replaces the file as it begins
    stat -c '%i %y' "$run/status.json" 2>/dev/null || echo none
}

failures_since_a_stop() { # sets failures, and stopped_at: the step of the last stop by a signal
    local restarts=0 rest
    stopped_at=
    read -r restarts stopped_at rest 2>/dev/null <"$run/.requeue" || true
    case $restarts in '' | *[!0-9]*) restarts=0 ;; esac
    failures=$((RESTARTS - restarts))
    [ "$failures" -ge 0 ] || failures=$RESTARTS # another job's count
}

action=${1:?expected mark, decide or code} run=${2:?expected the folder of the run}
case $action in
mark)
    mark
    ;;
code)
    before=${3:?expected what mark printed} code=${4:?expected the exit code of the launcher}
    launchers=$code
    [ "$(mark)" = "$before" ] && exit "$launchers"
    read_status
    case $code in
    '' | 0 | *[!0-9]*) exit "$launchers" ;; # 0: the run is finished, but may have refused to start again
    *) exit "$code" ;;
    esac
    ;;
decide)
    before=${3:?expected what mark printed} RESTARTS=${4:?expected the number of restarts}
    if [ "$(mark)" = "$before" ]; then
        say "not again: the attempt never reached $run; its own message says why"
        exit 1
    fi
    read_status
    failures_since_a_stop
    case $code in
    75)
        if [ "$step" != "$stopped_at" ]; then
            echo "$((RESTARTS + 1)) $step" >"$run/.requeue" || true
            say "again: stopped by $reason after step $step, and saved"
            exit 0
        fi
        reason="stopped by $reason at step $step, as the time before"
        ;;
    0 | 2 | 65 | 70 | 76 | 78)
        say "not again: $state, exit code $code: $reason"
        exit 1
        ;;
    esac
    # without a code its process was killed before it could say anything
    if [ "$failures" -lt "${MAX_RESTARTS:-10}" ]; then
        say "again: ${state:-unknown}, exit code ${code:-none}: $reason"
        exit 0
    fi
    say "not again: $state, exit code ${code:-none}, and started again $failures times already"
    exit 1
    ;;
*)
    say "expected mark, decide or code, found $action"
    exit 2
    ;;
esac
