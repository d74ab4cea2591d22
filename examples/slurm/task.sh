#!/usr/bin/env bash
# What pretrain.sbatch starts once on every node: one launcher, which starts this node's processes.
set -euo pipefail
case ${LAUNCHER:-torchrun} in
torchrun)
    exec torchrun --nnodes "$SLURM_NNODES" --node_rank "$SLURM_NODEID" --nproc_per_node "$PROCESSES" \
        --master_addr "$FIRST" --master_port "$PORT" --signals-to-handle SIGTERM,SIGUSR1 \
        train_pretrain.py "$@"
    ;;
accelerate)
    # Accelerate's launcher knows no SIGUSR1, which Slurm may send to it too: it gets SIGTERM instead
    (
        trap '' USR1
        exec accelerate launch --multi_gpu --num_machines "$SLURM_NNODES" --machine_rank "$SLURM_NODEID" \
            --num_processes "$((SLURM_NNODES * PROCESSES))" --main_process_ip "$FIRST" \
            --main_process_port "$PORT" --mixed_precision no --dynamo_backend no \
            train_pretrain_accelerate.py "$@"
    ) &
    launcher=$!
    trap 'kill -TERM "$launcher"' USR1 TERM
    code=0
    wait "$launcher" || code=$?
    while kill -0 "$launcher" 2>/dev/null; do # a signal ends `wait`, not the launcher
        code=0
        wait "$launcher" || code=$?
    done
    exit "$code"
    ;;
*)
    echo "task.sh: LAUNCHER: expected torchrun or accelerate, found ${LAUNCHER}" >&2
    exit 2
    ;;
esac
