#!/bin/bash
# The vocabulary is that of a tokenizer.
MODEL="--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14000 --num-attention-heads 32 --seq-length 8192"
MODEL+=" --group-query-attention --num-query-groups 8 --swiglu --normalization RMSNorm --disable-bias-linear"
MODEL+=" --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0"
MODEL+=" --position-embedding-type rope --tokenizer-type HuggingFaceTokenizer --tokenizer-model /models/tokenizer"
torchrun --nnodes 1 --nproc_per_node 8 pretrain_gpt.py $MODEL --tensor-model-parallel-size 2 --sequence-parallel \
    --bf16 --use-distributed-optimizer --micro-batch-size 1 --global-batch-size 32
