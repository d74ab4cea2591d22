#!/usr/bin/env bash
# The same command on every machine, but for MACHINE: 0 on the first, then 1, 2 ...
#
#   MACHINE=0 FIRST=node-a PROCESSES=8 examples/multi_node/torchrun.sh --config configs/smol-135m.yaml
#   MACHINE=1 FIRST=node-a PROCESSES=8 examples/multi_node/torchrun.sh --config configs/smol-135m.yaml
#
# FIRST is the first machine's address as the others reach it. All machines need the same code, and see the
# token store and run.output_dir at the same path (shared storage). A machine with several networks may need
# NCCL_SOCKET_IFNAME (GPUs) or GLOO_SOCKET_IFNAME (CPUs), say eth0.
set -euo pipefail
: "${MACHINE:?expected the number of this machine, from 0}" "${FIRST:?expected the address of the first machine}"
cd "$(dirname "$0")/../.."
exec torchrun --nnodes "${MACHINES:-2}" --node_rank "$MACHINE" --nproc_per_node "${PROCESSES:-1}" \
    --master_addr "$FIRST" --master_port "${PORT:-29500}" train_pretrain.py "$@"
