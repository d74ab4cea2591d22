#!/usr/bin/env bash
# What pretrain.sbatch starts once on every node: one launcher, which starts this node's processes.
set -euo pipefail
case ${LAUNCHER:-torchrun} in
torchrun) script=train_pretrain.py ;;
accelerate) script=train_pretrain_accelerate.py ;;
*)
    echo "task.sh: LAUNCHER: expected torchrun or accelerate, found ${LAUNCHER}" >&2
    exit 2
    ;;
esac
if [ -n "${MIN_NODES:-}" ]; then # torchrun in any case: `accelerate launch` takes one number of machines
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    launch=(torchrun --nnodes "$MIN_NODES:$SLURM_NNODES" --nproc_per_node "$PROCESSES")
    launch+=(--max-restarts "${MAX_RESTARTS:-10}" --rdzv-backend c10d --rdzv-endpoint "$FIRST:$PORT")
    launch+=(--rdzv-id "$SLURM_JOB_ID")
elif [ "$script" = train_pretrain.py ]; then
    exec torchrun --nnodes "$SLURM_NNODES" --node_rank "$SLURM_NODEID" --nproc_per_node "$PROCESSES" \
        --master_addr "$FIRST" --master_port "$PORT" --signals-to-handle SIGTERM,SIGUSR1 "$script" "$@"
else
    launch=(accelerate launch --multi_gpu --num_machines "$SLURM_NNODES" --machine_rank "$SLURM_NODEID")
    launch+=(--num_processes "$((SLURM_NNODES * PROCESSES))" --main_process_ip "$FIRST")
    launch+=(--main_process_port "$PORT" --mixed_precision no --dynamo_backend no)
fi
# Accelerate's launcher knows no SIGUSR1, which Slurm may send to it too: it gets SIGTERM instead
(
    trap '' USR1
    exec "${launch[@]}" "$script" "$@"
) &
launcher=$!
trap 'kill -TERM "$launcher"' USR1 TERM
code=0
wait "$launcher" || code=$?
while kill -0 "$launcher" 2>/dev/null; do # a signal ends `wait`, not the launcher
    code=0
    wait "$launcher" || code=$?
done
# With --no-kill Slurm keeps a job that has lost its first node, and the batch script with it, idle until the
# time limit. So where nothing can be started on that node, another one does what the script would have done.
if [ -n "${MIN_NODES:-}" ] && [ "$SLURM_NODEID" != 0 ] &&
    [ "$(squeue --noheader --format %T --jobs "$SLURM_JOB_ID")" = RUNNING ] &&
    ! timeout 60 srun --overlap --nodes 1 --ntasks 1 --nodelist "$FIRST" true; then
    if examples/requeue.sh decide "$RUN" none "${SLURM_RESTART_COUNT:-0}"; then
        scontrol requeue "$SLURM_JOB_ID"
    else
        scancel "$SLURM_JOB_ID"
    fi
fi
exit "$code"
