#!/bin/bash
# A mixture of 64 experts whose first layer is dense.
MODEL="--num-layers 28 --hidden-size 2048 --ffn-hidden-size 10944 --num-attention-heads 16 --seq-length 4096"
MODEL+=" --swiglu --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights"
MODEL+=" --vocab-size 102400 --attention-dropout 0 --hidden-dropout 0"
EXPERTS="--num-experts 64 --moe-router-topk 6 --moe-ffn-hidden-size 1408 --moe-shared-expert-intermediate-size 2816"
torchrun --nnodes 4 --nproc_per_node 8 pretrain_gpt.py $MODEL $EXPERTS --moe-layer-freq '([0]*1+[1]*27)' \
    --tensor-model-parallel-size 1 --expert-model-parallel-size 8 --bf16 --use-distributed-optimizer \
    --micro-batch-size 1 --global-batch-size 256
