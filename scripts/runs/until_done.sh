#!/usr/bin/env bash
# Keeps a run going over preemptions and crashes, by what its status.json says.
#
#   scripts/runs/until_done.sh runs/detr accelerate launch scripts/train_detr.py --run.name detr --run.output_dir runs
#
# Adds `--run.resume latest` to the command. Ends with 0 when the run is done, with 2 or 3 when starting it again would
# not help (bad input, stopped by the guard), and with 1 after three failures in a row without a new checkpoint.
set -u
folder=$1
shift
failures=0
while true; do
    before=$(readlink "$folder/checkpoints/latest" 2>/dev/null)
    "$@" --run.resume latest
    code=$?
    state=$(sed -n 's/.*"state": "\([a-z_]*\)".*/\1/p' "$folder/status.json" 2>/dev/null)
    case "$state" in
        done) [ $code -eq 0 ] && exit 0 ;;
        bad_input) exit 2 ;;
        stopped_by_guard) exit 3 ;;
        preempted) failures=0; continue ;;
    esac
    [ $code -eq 2 ] && exit 2
    [ "$before" = "$(readlink "$folder/checkpoints/latest" 2>/dev/null)" ] && failures=$((failures + 1)) || failures=0
    [ $failures -ge 3 ] && exit 1
    echo "until_done: ended with code $code (${state:-no status}); going on from the last checkpoint" >&2
done
