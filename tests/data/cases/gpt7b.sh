#!/bin/bash
# A dense 7B over four stages, one layer to a chunk, two data-parallel replicas.
MODEL="--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --group-query-attention --num-query-groups 8"
MODEL+=" --seq-length 8192 --max-position-embeddings 8192 --untie-embeddings-and-output-weights"
DATA="--tokenizer-type NullTokenizer --vocab-size 131073 --mock-data --train-iters 25"
torchrun --nnodes 1 --nproc_per_node 8 pretrain_gpt.py $MODEL $DATA --micro-batch-size 1 --global-batch-size 8 --bf16 \
    --tensor-model-parallel-size 1 --pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 1 \
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --deterministic-mode \
    --no-gradient-accumulation-fusion --transformer-impl transformer_engine --use-mcore-models
