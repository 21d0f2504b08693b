"""Launch files as users have them: scripts of the shell, recipes, configurations of other tools; and broken ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from steptime.errors import UserError
from steptime.launch import read_launch
from steptime.launch.shell import read_shell

SCRIPT = """#!/bin/bash
#SBATCH --nodes=4
GPUS_PER_NODE=8          # of a node
NNODES=${SLURM_NNODES:-4}
WORLD=$((GPUS_PER_NODE * NNODES))
TP=4
DISTRIBUTED="--nproc_per_node $GPUS_PER_NODE --nnodes $NNODES --master_addr $MASTER_ADDR"
MODEL=(
    --num-layers 32   # a comment within
    --hidden-size 4096 --ffn-hidden-size 11008
    --num-attention-heads 32
    --swiglu --normalization RMSNorm --disable-bias-linear
    --untie-embeddings-and-output-weights --position-embedding-type rope
)
TRAIN="
    --micro-batch-size 1 --global-batch-size $((WORLD * 8))
    --seq-length 4096 --lr 3e-4 --bf16
    --recompute-activations
"
TRAIN+=" --use-distributed-optimizer --overlap-grad-reduce --made-up 3"
torchrun $DISTRIBUTED pretrain_gpt.py \\
    "${MODEL[@]}" ${TRAIN} \\
    --tensor-model-parallel-size $TP --sequence-parallel \\
    --pipeline-model-parallel-size ${PP:-2} --data-path "my data" 2>&1 | tee log.txt
"""


def test_a_launch_script(tmp_path: Path) -> None:
    path = tmp_path / "train.sh"
    path.write_text(SCRIPT)
    read = read_launch(str(path))
    values = read.launch.values
    told = {"gpus": 32, "dp": 4, "tp": 4, "pp": 2, "micro_batch": 1, "global_batch": 256, "seq": 4096, "zero": 1}
    assert {name: values[name] for name in told} == told
    assert (values["dtype"], values["recompute"], values["sp"]) == ("bf16", "attention", "on")
    assert (read.software, read.launch.model, read.launch.node_devices) == ("megatron-lm", "llama2-7b", 8)
    assert read.unknown == ("--made-up",)
    assert "the file trains with dropout; llama2-7b is priced without it" in read.notes
    assert read.kept["--lr"] == "3e-4" and read.kept["--data-path"] == "my data"
    assert '# kept: --made-up = "3"' in read.text
    assert read.run.plan["tp"] == 4


def test_entries_in_quotes_and_branches(tmp_path: Path) -> None:
    """Of an array that is not quoted the shell splits the entries; of both branches of a condition all is taken."""
    path = tmp_path / "train.sh"
    lines = ["ARGS=()", 'if [[ "$DTYPE" == "fp8" ]]; then', "    ARGS+=(", '        "--fp8-format hybrid"']
    lines += ['        "--made-up 2"', "    )", "fi", "MORE=(--bf16)", 'ARGS+=("${MORE[@]}")']
    lines += [
        "torchrun --nnodes 1 --nproc_per_node 8 pretrain_gpt.py ${ARGS[@]} --tensor-model-parallel-size 2",
        "set +x",
    ]
    path.write_text("\n".join(lines))
    read = read_launch(str(path), model="llama3-8b")
    assert (read.launch.values["dtype"], read.launch.values["dp"], read.kept) == ("fp8-te", 4, {"--made-up": "2"})


def test_a_line_of_arguments() -> None:
    line = "torchrun --nnodes=2 --nproc-per-node=8 pretrain_gpt.py --tensor-model-parallel-size 2 --micro-batch-size 4"
    read = read_launch(line, model="llama3-8b")
    assert (read.launch.values["gpus"], read.launch.values["dp"], read.launch.values["tp"]) == (16, 8, 2)


def test_virtual_stages_by_layers() -> None:
    line = "pretrain_gpt.py --num-layers 32 --pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 2"
    assert read_launch(f"{line} --micro-batch-size 1", model="llama3-8b").launch.values["vpp"] == 4


def test_a_model_of_no_catalogue(tmp_path: Path) -> None:
    path = tmp_path / "train.sh"
    path.write_text(SCRIPT.replace("--hidden-size 4096", "--hidden-size 4608"))
    read = read_launch(str(path))
    assert read.launch.model == "" and "hidden = 4608" in read.model_text and 'norm = "rmsnorm"' in read.model_text


RECIPE = """
import nemo_run as run
STAGES = 4
recipe = llm.llama3_8b.pretrain_recipe(num_nodes=8, num_gpus_per_node=8)
recipe.trainer.strategy.tensor_model_parallel_size = 4
recipe.trainer.strategy.pipeline_model_parallel_size = STAGES
recipe.trainer.strategy.ddp.overlap_grad_reduce = False
recipe.data = run.Config(MockDataModule, seq_length=8192, global_batch_size=512, micro_batch_size=1)
recipe.trainer.num_nodes = 8
recipe.trainer.devices = 8
recipe.trainer.max_steps = 100
recipe.trainer.plugins = run.Config(MegatronMixedPrecision, precision="bf16-mixed", fp8="hybrid", fp8_recipe="delayed")
"""


def test_a_recipe(tmp_path: Path) -> None:
    path = tmp_path / "recipe.py"
    path.write_text(RECIPE)
    read = read_launch(str(path), model="llama3-8b")
    values = read.launch.values
    told = {
        "gpus": 64,
        "dp": 4,
        "tp": 4,
        "pp": 4,
        "micro_batch": 1,
        "global_batch": 512,
        "seq": 8192,
        "dtype": "fp8-te",
    }
    assert read.software == "nemo" and {name: values[name] for name in told} == told
    assert values["overlap.dp"] is False and read.kept["trainer.max_steps"] == 100


TITAN = """
from torchtitan.trainer import Trainer
def llama3_mine() -> Trainer.Config:
    return Trainer.Config(
        model_spec=model_registry("8B"),
        training=TrainingConfig(local_batch_size=2, seq_len=8192, steps=10),
        parallelism=ParallelismConfig(tensor_parallel_degree=4, data_parallel_shard_degree=-1),
        activation_checkpoint=FullAC.Config(),
    )
"""


def test_a_configuration_of_torchtitan_in_python(tmp_path: Path) -> None:
    path = tmp_path / "config_registry.py"
    path.write_text(TITAN)
    read = read_launch(str(path), model="llama3-8b")
    told = {"tp": 4, "seq": 8192, "micro_batch": 2, "recompute": "full", "zero": 3}
    assert read.software == "torchtitan-python"
    assert {name: read.launch.values[name] for name in told} == told and read.kept == {"training.steps": 10}


BRIDGE = """
from megatron.bridge.recipes.llama import llama3_8b_pretrain_config
cfg = llama3_8b_pretrain_config()
cfg.model.tensor_model_parallel_size = 2
cfg.model.virtual_pipeline_model_parallel_size = None
cfg.model.sequence_parallel = True
cfg.train.global_batch_size = 128
cfg.train.micro_batch_size = 1
cfg.mixed_precision = "bf16_with_fp8_current_scaling_mixed"
cfg.comm_overlap = CommOverlapConfig(tp_comm_overlap=True)
cfg.model.recompute_granularity = "selective"
cfg.model.recompute_modules = ["core_attn", "weird"]
cfg.scheduler.lr_warmup_iters = 5
"""


def test_what_is_not_said_is_not_off(tmp_path: Path) -> None:
    """A recipe that changes a few fields leaves the others as they are: the distributed optimiser, fp32 gradients."""
    path = tmp_path / "recipe.py"
    path.write_text(BRIDGE)
    read = read_launch(str(path), model="llama3-8b", cluster="dgx-h100")
    told = {
        "tp": 2,
        "zero": 1,
        "gradient_dtype": "fp32",
        "overlap.dp": True,
        "overlap.tp": True,
        "recompute": "attention",
    }
    assert {name: read.launch.values[name] for name in told} == told
    assert read.launch.values["dtype"] == "fp8-tensorwise" and read.kept == {"scheduler.lr_warmup_iters": 5}
    assert read.notes == ("model.recompute_modules weird: not modelled, left out",)


FSDP2 = """
from torch.distributed.fsdp import fully_shard, MixedPrecisionPolicy, CPUOffloadPolicy
mesh = init_device_mesh("cuda", (2, 8), mesh_dim_names=("dp_replicate", "dp_shard"))
for layer in model.layers:
    fully_shard(layer, mesh=mesh, reshard_after_forward=False,
                mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
"""


def test_a_script_of_fsdp2(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(FSDP2.replace('"cuda", (2, 8)', '"cuda", mesh_shape=(2, 8)'))
    values = read_launch(str(path), model="llama3-8b").launch.values
    assert (values["dp"], values["shard"], values["zero"], values["gradient_dtype"]) == (16, 8, 2, "fp32")


FILES = {
    "ds_config.json": (
        '{"train_batch_size": "auto", "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4, '
        '"bf16": {"enabled": true}, "zero_optimization": {"stage": 3, "overlap_comm": true, "foo": 1}}',
        {"micro_batch": 2, "zero": 3, "dtype": "bf16", "overlap.dp": True},
        ("zero_optimization.foo",),
    ),
    "accelerate.yaml": (
        "distributed_type: FSDP\nmixed_precision: bf16\nnum_machines: 2\nnum_processes: 16\nfsdp_config:\n"
        "  fsdp_version: 2\n  fsdp_reshard_after_forward: true\n  fsdp_activation_checkpointing: true\n",
        {"gpus": 16, "dp": 16, "zero": 3, "dtype": "bf16", "recompute": "full"},
        (),
    ),
    "train.toml": (
        '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nlocal_batch_size = 2\nseq_len = 8192\n'
        "[parallelism]\ndata_parallel_shard_degree = -1\ntensor_parallel_degree = 2\n"
        '[activation_checkpoint]\nmode = "selective"\nselective_ac_option = "2"\n[metrics]\nlog_freq = 10\n',
        {"tp": 2, "seq": 8192, "micro_batch": 2, "recompute": "full", "recompute_every": 2, "zero": 3},
        (),
    ),
    "args.yaml": (
        "output_dir: out\nper_device_train_batch_size: 4\ngradient_accumulation_steps: 2\nbf16: true\n"
        "learning_rate: 1.0e-5\ngradient_checkpointing: true\ndeepspeed:\n  zero_optimization:\n    stage: 2\n",
        {"micro_batch": 4, "dtype": "bf16", "zero": 2, "recompute": "full"},
        (),
    ),
    "run.yml": (
        "base_output_directory: gs://x\nper_device_batch_size: 2\nici_fsdp_parallelism: 64\nici_data_parallelism: 1\n"
        "ici_tensor_parallelism: 4\nremat_policy: full\nmax_target_length: 8192\n",
        {"dp": 64, "tp": 4, "gpus": 256, "global_batch": 512, "zero": 3, "recompute": "full", "micro_batch": 8},
        (),
    ),
    "llm.yaml": (
        "max_seq_len: 2048\nglobal_train_batch_size: 512\ndevice_train_microbatch_size: 8\nprecision: amp_bf16\n"
        "max_duration: 10ba\nfsdp_config:\n  sharding_strategy: FULL_SHARD\n  activation_checkpointing: true\n",
        {"global_batch": 512, "micro_batch": 8, "zero": 3, "recompute": "full", "seq": 2048},
        (),
    ),
    "lightning.yaml": (
        "trainer:\n  devices: 8\n  num_nodes: 2\n  precision: bf16-mixed\n  accumulate_grad_batches: 4\n"
        "  strategy:\n    class_path: lightning.pytorch.strategies.FSDPStrategy\n    init_args:\n"
        "      sharding_strategy: SHARD_GRAD_OP\ndata:\n  class_path: mine.Data\n  init_args:\n    batch_size: 3\n",
        {"gpus": 16, "dp": 16, "zero": 2, "dtype": "bf16", "micro_batch": 3, "global_batch": 192},
        (),
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_files_as_users_have_them(name: str, tmp_path: Path) -> None:
    text, told, unknown = FILES[name]
    path = tmp_path / name
    path.write_text(text)
    read = read_launch(str(path), model="llama3-8b")
    assert {concept: read.launch.values.get(concept) for concept in told} == told
    assert read.unknown == unknown
    assert read.run.model == "llama3-8b"


MEGATRON = "pretrain_gpt.py --tensor-model-parallel-size"
WRONG = {
    f"{MEGATRON} 2 --bf16 --fp16": "--bf16 and --fp16 contradict each other",
    f"torchrun --nnodes 8 --nproc_per_node 8 {MEGATRON} 3": "world size 64 is not divisible by tp 3",
    f"{MEGATRON} 2 --num-virtual-stages-per-pipeline-rank 2": "without pp: pp is 1",
    f"{MEGATRON} 2 --model-parallel-size 4": "they contradict each other",
    f"{MEGATRON} $TP": "set the variable",
    f"{MEGATRON} 2 --seq-length": "must be a number",
    f"{MEGATRON} 2 --num-layers 31": "the options say layers 31, llama3-8b has 32",
    f"{MEGATRON} 1 --pipeline-model-parallel-size 2 --use-megatron-fsdp --data-parallel-sharding-strategy "
    "optim_grads_params --micro-batch-size 1 --global-batch-size 8 --nnodes 1 --nproc 8": "have no pipeline",
    "train.py --nothing 1": "give --from NAME",
}


def test_sequence_parallelism_of_one_rank_is_ignored() -> None:
    read = read_launch(f"{MEGATRON} 1 --sequence-parallel --micro-batch-size 1", model="llama3-8b")
    assert "sp" not in read.launch.values and not read.kept
    assert read.notes == ("--sequence-parallel: tp is 1, so the software ignores it",)


@pytest.mark.parametrize("line", WRONG)
def test_contradictions_are_named(line: str) -> None:
    with pytest.raises(UserError) as error:
        read_launch(line, model="llama3-8b")
    assert WRONG[line] in str(error.value), str(error.value)


BROKEN = {
    "a.yaml": ("trainer: [", "not valid YAML"),
    "b.json": ("{", "not valid JSON"),
    "c.toml": ("[parallelism", "not valid TOML"),
    "d.py": ("def (:", "not valid Python"),
    "e.sh": ('echo "no end', "closing quotation|no command in it"),
    "f.sh": ("echo nothing", "no command in it has options"),
    "g.yaml": ("- 1\n- 2\n", "is not a table"),
    "h.json": ("[1]", "is not a table"),
    "i.sh": ("# steptime: tp 4\ntrain.py --tensor-model-parallel-size 2\n", "is not # steptime: CONCEPT = VALUE"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files(name: str, tmp_path: Path) -> None:
    text, words = BROKEN[name]
    path = tmp_path / name
    path.write_text(text)
    software = {"yaml": "lightning", "json": "deepspeed", "toml": "torchtitan", "py": "nemo", "sh": "megatron-lm"}
    with pytest.raises(UserError, match=f"(?i){words}"):
        read_launch(str(path), software[name.rpartition(".")[2]])


def test_batches_that_do_not_multiply(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"train_batch_size": 100, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}')
    with pytest.raises(
        UserError, match="global batch 100 is not divisible by micro-batch 2 x micro-batches per step 4"
    ):
        read_launch(str(path), model="llama3-8b")


def test_ranks_that_do_not_multiply(tmp_path: Path) -> None:
    path = tmp_path / "train.toml"
    head = "# launch: torchrun --nnodes 2 --nproc_per_node 8 -m torchtitan.train\n[parallelism]\n"
    path.write_text(f"{head}data_parallel_replicate_degree = 3\ndata_parallel_shard_degree = 4\n")
    with pytest.raises(UserError, match="dp 16 is not replicas of the shards 3 x shards 4 = 12"):
        read_launch(str(path), model="llama3-8b")


def test_shell() -> None:
    lines = (
        "A=(--x 1 --y)",
        'B="$(( 2*3 + 1 ))"',
        "export C=${D:-'a b'}",
        'run.py "${A[@]}" --b $B --c $C --d=$UNSET --e \\',
    )
    text = "\n".join([*lines, "  1 2", ""])
    found = read_shell(text, "x")
    assert found == {"--x": "1", "--y": True, "--b": "7", "--c": ["a", "b"], "--d": "$UNSET", "--e": ["1", "2"]}


LOOP = """
DENSE=3
LAYERS=12
pattern=()
for ((i=0; i<LAYERS; i++)); do
  if (( i < DENSE )); then
    pattern+=(0)
  else
    pattern+=(1)
  fi
done
printf -v FREQ "[%s]" "$(IFS=', '; echo "${pattern[*]}")"
WIDTH=1536
SHAPE=(
    --num-layers $((DENSE + LAYERS - DENSE))
    --moe-layer-freq $FREQ
    --moe-shared-expert-intermediate-size $((WIDTH * 2))
    --seq-length 4096
)
"""


@pytest.mark.parametrize("end", ["", "run.py ${SHAPE[@]}\n"])
def test_loops_and_bare_names(end: str) -> None:
    """Loops over numbers are followed; a file that only sets an array of options is one of options."""
    assert read_shell(LOOP + end, "x") == {
        "--num-layers": "12",
        "--moe-layer-freq": "[0,0,0,1,1,1,1,1,1,1,1,1]",
        "--moe-shared-expert-intermediate-size": "3072",
        "--seq-length": "4096",
    }


@pytest.mark.parametrize(("text", "layers"), [
    ("for n in 4 8; do L=$n; done", "8"),
    ("L=2; let L+=3; ((L++))", "6"),
    ("A=7\nL=$((A % 4 + -A / 2))", "0"),
    ("if (( 1 > 2 )); then L=1; elif ((2 > 1)); then L=2; else L=3; fi", "2"),
    ('if [ "$X" ]; then L=1; else L=3; fi', "3"),
])  # fmt: skip
def test_statements(text: str, layers: str) -> None:
    assert read_shell(f"{text}\nrun.py --num-layers $L", "x") == {"--num-layers": layers}
