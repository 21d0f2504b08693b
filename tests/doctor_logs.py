"""Lines of logs as frameworks print them."""

# ruff: noqa: E501 the lines of logs are long

from __future__ import annotations


def arguments(**flags: object) -> str:
    lines = [f"  {name} {'.' * max(48 - len(name), 3)} {value}" for name, value in flags.items()]
    head, tail = "arguments", "end of arguments"
    return "\n".join([f"------------------------ {head} ------------------------", *lines,
                      f"-------------------- {tail} ---------------------", ""])  # fmt: skip


def iteration(step: int, ms: float, batch: int = 128) -> str:
    return (
        f" [2026-03-01 12:{step // 60:02}:{step % 60:02}.25] iteration {step:8d}/   10000 | consumed samples: "
        f"{step * batch:12d} | elapsed time per iteration (ms): {ms:.1f} | throughput per GPU (TFLOP/s/GPU): 402.1 | "
        f"learning rate: 3.000000E-04 | global batch size: {batch:5d} | lm loss: 7.1E+00 | loss scale: 1.0 | "
        "grad norm: 1.234 | number of skipped iterations:   0 | number of nan iterations:   0 |\n"
    )


HEAD = "[rank0]:[titan] 2026-03-01 12:00:00,000 - root - INFO - "
LLAMA = "dim=4096, n_layers=32, n_heads=32, n_kv_heads=8, vocab_size=128256, multiple_of=1024, ffn_dim_multiplier=1.3, norm_eps=1e-05, rope_theta=500000, max_seq_len=8192, depth_init=True"
MODELS = {
    "of 2025": f"{HEAD}Building llama3 8B with ModelArgs({LLAMA}, norm_type='rmsnorm')\n",
    "with protocol": (
        f"{HEAD}Building llama3 8B with TransformerModelArgs(_enforced='This field is used to enforce all fields have "
        f"defaults.', {LLAMA}, use_flex_attn=False, attn_mask_type='causal', eos_id=0)\n"
    ),
    "json": (
        f"{HEAD}Building llama3 8Bwith {{\n  \"dim\": 4096,\n  \"n_layers\": 32,\n  \"n_heads\": 32,\n  \"n_kv_heads\": 8,\n"
        '  "vocab_size": 128256,\n  "multiple_of": 1024,\n  "ffn_dim_multiplier": 1.3,\n  "rope_scaling_args": {\n'
        '    "scaling_factor": 8.0\n  },\n  "max_seq_len": 8192\n}\n'
    ),
}  # fmt: skip
STEPS = "".join(
    f"{HEAD}\x1b[31mstep: {i:2}  \x1b[32mloss:  7.8  \x1b[33mmemory: 40.01GiB(50.58%)  \x1b[34mtps: 5,120  \x1b[36mtflops: 296.1\x1b[39m\n"
    for i in range(1, 7)
)
