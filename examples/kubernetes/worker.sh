#!/usr/bin/env bash
# A pod's main process: starts the launcher, hands SIGTERM on to it, and ends with the run's own exit code,
# which the job's podFailurePolicy judges. Launchers say 1 for everything.
set -euo pipefail
: "${RUN:?expected the folder of the run on the shared volume}"
before=$(examples/requeue.sh mark "$RUN")
torchrun --nnodes "${PODS:-1}" --node_rank "${JOB_COMPLETION_INDEX:-0}" --nproc_per_node "${PROCESSES:-1}" \
    --master_addr "${FIRST:-localhost}" --master_port "${PORT:-29500}" \
    train_pretrain.py --run.output_dir "$RUN" "$@" &
launcher=$!
trap 'kill -TERM "$launcher"' TERM # a shell that is process 1 hands nothing on by itself
code=0
wait "$launcher" || code=$?
while kill -0 "$launcher" 2>/dev/null; do # a signal ends `wait`, not the launcher
    code=0
    wait "$launcher" || code=$?
done
examples/requeue.sh code "$RUN" "$before" "$code"
