#!/usr/bin/env bash
# A pod's main process: starts the launcher, hands SIGTERM on to it, and ends with the run's own exit code,
# which the job's podFailurePolicy judges. Launchers say 1 for everything.
set -euo pipefail
: "${RUN:?expected the folder of the run on the shared volume}"
before=$(examples/requeue.sh mark "$RUN")
first=${FIRST:-localhost} port=${PORT:-29500}
if [ -n "${MIN_PODS:-}" ]; then # the others go on without a pod that is lost, and take in its successor
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    launch=(--nnodes "$MIN_PODS:${PODS:?expected the number of pods}" --max-restarts "${MAX_RESTARTS:-10}")
    launch+=(--rdzv-backend c10d --rdzv-endpoint "$first:$port" --rdzv-id "$RUN")
else
    launch=(--nnodes "${PODS:-1}" --node_rank "${JOB_COMPLETION_INDEX:-0}")
    launch+=(--master_addr "$first" --master_port "$port")
fi
torchrun "${launch[@]}" --nproc_per_node "${PROCESSES:-1}" train_pretrain.py --run.output_dir "$RUN" "$@" &
launcher=$!
trap 'kill -TERM "$launcher"' TERM # a shell that is process 1 hands nothing on by itself
code=0
wait "$launcher" || code=$?
while kill -0 "$launcher" 2>/dev/null; do # a signal ends `wait`, not the launcher
    code=0
    wait "$launcher" || code=$?
done
examples/requeue.sh code "$RUN" "$before" "$code"
