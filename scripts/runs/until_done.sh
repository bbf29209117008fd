#!/usr/bin/env bash
# Keeps a run going over preemptions and crashes, by what its status.json says.
#
#   scripts/runs/until_done.sh runs/detr python scripts/train_detr.py --run.name detr --run.output_dir runs
#   scripts/runs/until_done.sh runs/detr torchrun --nproc_per_node 8 scripts/train_detr.py --run.name detr
#
# Adds `--run.resume latest` to the command. Ends with 0 when the run is done, with 2 or 3 when starting it again would
# not help (bad input, stopped by the guard), and with 1 after three starts in a row that left no new checkpoint.
#
# SIGTERM, SIGHUP, SIGINT (Ctrl-C) and SIGUSR1 go on to every process of the run, which saves its state; then this ends
# too, with 85 (preempted, to be resumed). `accelerate launch` of one process does not hand a signal on, but this script
# sends it to the whole process group.
set -um # -m: what is started here has a process group of its own
folder=$1
shift

asked='' # the signal that this script got
signals=0
group=''
hand_on() {
    asked=$1
    signals=$((signals + 1))
    [ -n "$group" ] && kill -s "$1" -- "-$group" 2>/dev/null
}
for name in TERM INT HUP USR1; do
    # shellcheck disable=SC2064
    trap "hand_on $name" $name
done

newest() { readlink "$folder/checkpoints/latest" 2>/dev/null || cat "$folder/checkpoints/latest" 2>/dev/null; }
status() { ls -i "$folder/status.json" 2>/dev/null && cat "$folder/status.json"; }

wait_for_run() { # sets code; a signal to this script interrupts `wait`, which is then done again
    local before
    while true; do
        before=$signals
        wait "$group"
        code=$?
        [ $signals -eq "$before" ] && break
    done
    # A launcher may be gone before its processes are: they may be saving.
    local seconds=0
    while kill -0 -- "-$group" 2>/dev/null; do
        sleep 0.5
        seconds=$((seconds + 1))
        if [ -z "$asked" ] && [ $seconds -eq 60 ]; then kill -s TERM -- "-$group" 2>/dev/null; fi
        if [ -z "$asked" ] && [ $seconds -eq 600 ]; then kill -s KILL -- "-$group" 2>/dev/null; fi
    done
    group=''
}

failures=0
while true; do
    before=$(newest)
    status_before=$(status)
    code=0
    "$@" --run.resume latest &
    group=$!
    [ -n "$asked" ] && kill -s "$asked" -- "-$group" 2>/dev/null # it came between two starts
    wait_for_run
    state='' # of this start; what an earlier one left says nothing about it
    if [ "$(status)" != "$status_before" ]; then
        state=$(sed -n 's/.*"state": "\([a-z_]*\)".*/\1/p' "$folder/status.json" 2>/dev/null)
    fi
    case "$state" in
        done) [ "$code" -eq 0 ] && exit 0 ;;
        bad_input) exit 2 ;;
        stopped_by_guard) exit 3 ;;
    esac
    case "$code" in 2 | 3) exit "$code" ;; esac
    if [ -n "$asked" ]; then
        echo "until_done: ended by SIG$asked (${state:-no status})" >&2
        [ "$state" = preempted ] && exit 85
        exit 1
    fi
    if [ "$before" = "$(newest)" ]; then failures=$((failures + 1)); else failures=0; fi
    if [ $failures -ge 3 ]; then
        echo "until_done: three starts in a row ended without a new checkpoint, the last one with code $code" >&2
        exit 1
    fi
    echo "until_done: ended with code $code (${state:-before it began}); going on from the last checkpoint" >&2
done
