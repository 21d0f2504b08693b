#!/bin/bash
DENSE=3
ROUTED=89
layers=()
for ((i=0; i<DENSE+ROUTED; i++)); do
  if (( i < DENSE )); then layers+=(0); else layers+=(1); fi
done
SHAPE=(
    --num-layers $((DENSE + ROUTED))
    --hidden-size 5120
    --num-attention-heads 96
    --group-query-attention --num-query-groups 8
    --kv-channels 128
    --ffn-hidden-size 12288
    --vocab-size 151552
)
torchrun --nnodes 8 --nproc_per_node 8 train.py ${SHAPE[@]} --tensor-model-parallel-size 8 --sequence-parallel \
    --micro-batch-size 1 --global-batch-size 64 --seq-length 4096 --bf16
