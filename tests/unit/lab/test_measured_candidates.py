"""Settings that a row leaves open: few, weighted, legal, and in agreement with what the row states."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from steptime.estimate.memory_definitions import memory_by_definition
from steptime.measure.runs.candidates import (
    Candidate,
    _expert_ranks,
    _recomputes,
    candidates,
    fed_length,
    fit_weight,
    needed_bytes,
    said_to_overlap,
)
from steptime.measure.runs.canonical import Recomputation
from steptime.measure.runs.meaning import RECOMPUTE
from steptime.measure.runs.read import TableRow, read_rows
from steptime.measure.runs.reading import read_runs, runs_of
from steptime.measure.runs.run import Degrees, MeasuredRun
from steptime.measure.runs.samples import settings_of
from steptime_lab.data_root import require_data

FILE = Path(__file__).parents[2] / "data" / "measured_runs.csv"


def one(name: str = "full", **changes: str) -> MeasuredRun:
    cells = next(dict(r.cells) for r in read_rows(FILE) if r.text("row_id") == name)
    assert not set(changes) - set(cells)
    (run,) = runs_of([TableRow(1, cells | changes)]).runs
    return run


def weights(found: tuple[Candidate, ...], field: str) -> dict[object, float]:
    out: dict[object, float] = {}
    for c in found:
        out[getattr(c, field)] = out.get(getattr(c, field), 0) + c.weight
    return out


def check(run: MeasuredRun, found: tuple[Candidate, ...]) -> None:
    assert 1 <= len(found) <= 12
    assert sum(c.weight for c in found) == pytest.approx(1)
    assert [c.weight for c in found] == sorted((c.weight for c in found), reverse=True)
    for c in found:
        d = c.degrees
        assert d.tp * d.pp * d.cp * d.dp == run.gpus and d.vpp and d.ep
        assert run.global_batch % (d.dp * c.micro_batch) == 0
        assert c.zero in (0, 1, 2, 3) and (d.dp * d.cp) % c.shard_ranks == 0
        assert c.attention in ("fused", "unfused") and (d.tp > 1 or not c.sequence_parallel)
        assert not run.precisions or c.precision in run.precisions
        assert run.recompute in (None, c.recompute) and run.micro_batch in (None, c.micro_batch)


def test_a_row_that_states_everything_has_one_setting():
    (found,) = candidates(one(notes="overlap_grad_reduce"))
    assert found == Candidate(
        weight=1.0, precision="bf16", degrees=Degrees(tp=2, pp=1, cp=1, dp=4, vpp=1, ep=1), micro_batch=1,
        recompute=Recomputation(kind="none"), zero=1, shard_ranks=4, sequence_parallel=True, attention="fused",
    )  # fmt: skip


@pytest.mark.slow
def test_every_row_of_the_hand_made_table():
    for run in read_runs(FILE).runs:
        check(run, candidates(run))


def test_micro_batch_that_is_not_stated():
    found = candidates(one(micro_batch="", recompute="full"))
    assert set(weights(found, "micro_batch")) == {1, 2, 4, 8}
    assert weights(found, "micro_batch")[1] == pytest.approx(0.5)
    odd = candidates(one(micro_batch="", recompute="full", global_batch_sequences="12"))
    assert set(weights(odd, "micro_batch")) == {1}


def test_accumulation_tells_the_micro_batch():
    assert {c.micro_batch for c in candidates(one(micro_batch="", schedule="grad-accum 8"))} == {4}


def test_recomputation_and_sharding_come_from_the_framework():
    modern = candidates(one(recompute="", zero_stage_or_fsdp="", framework="NeMo"))
    assert weights(modern, "recompute")[Recomputation(kind="none")] > 0.5 and weights(modern, "zero") == pytest.approx(
        {1: 1.0}
    )
    sharded = candidates(one(recompute="", zero_stage_or_fsdp="", framework="maxtext"))
    assert {c.recompute.kind for c in sharded} == {"full", "beside_projections", "beside_attention"}
    assert weights(sharded, "zero") == pytest.approx({3: 1.0})


def test_what_does_not_fit_on_the_device_may_be_on_its_host():
    """MaxText keeps no more on the device than fits; what lies on the host takes none of its memory."""
    long = {"seq_len": "131072", "global_batch_sequences": "8", "tp": "1", "micro_batch": "1", "recompute": ""}
    found = candidates(one(**long, zero_stage_or_fsdp="", framework="maxtext"))
    host = sum(c.weight for c in found if c.offload == {"activations"})
    assert host > 0.6 and all(not c.offload for c in candidates(one(**long)))
    assert {c.recompute.kind for c in found if not c.offload} == {"full"}
    stated = candidates(one(**(long | {"recompute": "full"}), zero_stage_or_fsdp="", framework="maxtext"))
    assert not any(c.offload for c in stated)
    run = one(**long, zero_stage_or_fsdp="", framework="maxtext")
    kept = {c.recompute.kind: c for c in found if c.offload}["beside_projections"]
    on_host, on_device = needed_bytes(run, [kept, replace(kept, offload=frozenset())])
    assert on_host < 0.7 * on_device


def test_the_recomputation_of_tuned_runs_is_what_memory_asks_for():
    """Where keeping what attention makes fits on the device, less belief in full recomputation there."""
    run = one(recompute="", seq_len="2048", zero_stage_or_fsdp="", framework="maxtext")
    kinds = weights(tuple(c for c in candidates(run) if not c.offload), "recompute")
    assert kinds[Recomputation(kind="full")] < kinds[Recomputation(kind="beside_attention")]


def test_what_does_not_fit_loses_its_weight():
    """8B with Adam on 8 x 80 GB at 32k tokens: without recomputation the activations alone exceed the memory."""
    changes = {"seq_len": "65536", "global_batch_sequences": "8", "tp": "1", "micro_batch": "1", "recompute": ""}
    found = candidates(one(**changes))
    assert found[0].recompute.kind == "full" and found[0].fits
    assert weights(found, "recompute")[Recomputation(kind="full")] > 0.8


def test_layers_are_recomputed_only_as_memory_asks():
    """Megatron recomputes nothing, or some layers, or all: the more, the less would have fitted."""
    small = weights(candidates(one(recompute="", framework="NeMo")), "recompute")
    assert set(small) >= {Recomputation(kind="full", share=share) for share in (0.25, 0.5, 1.0)}
    assert small[Recomputation(kind="none")] > 0.8, "recomputing would save memory that is not needed"
    changes = {"seq_len": "32768", "global_batch_sequences": "8", "tp": "1", "micro_batch": "1", "recompute": ""}
    large = candidates(one(framework="NeMo", **changes))
    assert not any(c.fits for c in large if c.recompute.kind == "none")
    assert large[0].recompute.kind == "full" and large[0].fits


def test_sequences_in_bins_of_like_lengths():
    """BERT of 512 tokens reads 256 of them and half a bin of 64; of 128 tokens, all; other models all, always."""
    bert = one(recompute="none", model="BERT-Large", source_key="dlexamples-bert")
    assert bert.model_kind == "encoder" and bert.framework == "ddp"
    assert [fed_length(replace(bert, seq_len=s)) for s in (128, 512, 1024)] == [128, 288, 1024]
    assert fed_length(replace(bert, seq_len=512, framework="megatron")) == 512
    assert fed_length(replace(bert, seq_len=512, model_kind="dense")) == 512
    assert settings_of(replace(bert, seq_len=512))[0].job.seq_len == 288


def test_a_run_that_says_it_hides_nothing():
    """Its transfers over tp show whole, where those of its framework hide behind products; so do its gradients."""
    plain = one(recompute="none", framework="NeMo")
    stated = replace(plain, notes="8 layers; no TP/DP overlap; x")
    assert said_to_overlap(plain.notes) == {} and said_to_overlap(stated.notes) == {"tp": False, "dp": False}
    hidden, shown = (settings_of(run)[0] for run in (plain, stated))
    assert {"dp", "tp"} <= hidden.job.overlap and not {"dp", "tp"} & shown.job.overlap
    links = [s.evaluate().works["layer"]["forward"].links_s["tp"] for s in (hidden, shown)]
    assert 0 <= links[0] < links[1]


def test_asynchronous_tensor_parallelism_hides_its_traffic():
    vanilla = one(recompute="none", framework="torchtitan", notes="vanilla TP; torch.compile")
    hidden = [settings_of(replace(vanilla, notes=notes))[0].job.overlap
              for notes in (vanilla.notes, "async TP; torch.compile", "async TP; no TP/DP overlap")]  # fmt: skip
    assert hidden == [{"dp"}, {"dp", "tp"}, set()]


def test_what_fp8_means_to_the_framework_of_a_run():
    def recipes(framework: str, dtype: str) -> set[str]:
        run = one(recompute="none", framework=framework, dtype=dtype)
        return {setting.job.precision.name for setting in settings_of(run)}

    assert recipes("NeMo", "FP8") == {"fp8-te"} and recipes("torchtitan", "Float8 linears (BF16 base)") == {
        "fp8-tensorwise"
    }
    assert recipes("NeMo", "FP8-CS") == recipes("torchtitan", "Float8 rowwise") == {"fp8-tensorwise"}
    assert recipes("torchtitan", "fp8-te") == {"fp8-te"}
    assert recipes("NeMo", "FP8 subchannel") == {"fp8-blockwise"} and recipes("torchtitan", "MXFP8") == {"mxfp8"}


@pytest.mark.parametrize(
    ("notes", "error"), [("+/-40% (shared)", 0.4), ("noise \u00b1 2.5 %; x", 0.025), ("40 % slower", 0.0), ("", 0.0)]
)
def test_an_error_that_the_row_states(notes: str, error: float):
    assert replace(one(), notes=notes).stated_error == pytest.approx(error)


def test_dtype_that_is_not_stated():
    assert weights(candidates(one("tokens", source_key="vtrain")), "precision") == {"fp16": 1.0}
    assert set(weights(candidates(one("guess", dtype="", source_key="mosaic")), "precision")) == {"fp16"}
    served = weights(candidates(one(dtype="", source_key="mlperf")), "precision")
    assert served == {"fp8": pytest.approx(6 / 7), "bf16": pytest.approx(1 / 7)}, "no nvfp4 on this device"
    assert set(weights(candidates(one(dtype="", source_key="mlperf", gpu="A100")), "precision")) == {"bf16"}
    assert weights(candidates(one(dtype="BF16/FP16")), "precision") == {"bf16": 0.5, "fp16": 0.5}


def test_eight_bits_of_devices_that_have_integers_only():
    run = one(dtype="", source_key="mlperf", gpu="TPU v5p")
    assert weights(candidates(run), "precision")["fp8"] == pytest.approx(6 / 7)
    fast, slow = (settings_of(replace(run, precisions=(name,)))[0].machine for name in ("fp8", "bf16"))
    assert fast.matrix_flops_per_s == 2 * slow.matrix_flops_per_s


def test_a_row_that_names_a_dispatcher_of_every_copy():
    experts = {"recompute": "none", "framework": "NeMo", "moe_experts": "8", "moe_topk": "2", "ffn_hidden": "1024"}
    said = {"": "deepep", "pad to capacity, alltoall dispatcher, 1 dense layer": "all_to_all", "HybridEP": "hybridep"}
    for notes, dispatcher in said.items():
        job = settings_of(one(**experts, notes=notes))[0].job
        assert (job.dispatcher, job.exchange_once) == (dispatcher, dispatcher != "all_to_all")
    assert one(recompute="none", notes="HybridEP").dispatcher is None, "the model has no experts"


def test_overlap_that_a_row_states_changes_what_hides():
    """On adds what the framework of 2021 does not hide, off takes away what later ones do."""
    older, newer = ({"recompute": "none", "framework": name} for name in ("Megatron-2021", "NeMo"))
    on = "trained with --overlap-grad-reduce --overlap-param-gather"
    assert ["dp" in settings_of(one(**older, notes=notes))[0].job.overlap for notes in ("", on)] == [False, True]
    off = "overlap_grad_reduce=False; x"
    assert ["dp" in settings_of(one(**newer, notes=notes))[0].job.overlap for notes in ("", off)] == [True, False]


def test_software_without_known_habits_may_hide_its_gradients_or_not():
    unknown = one(framework="Homegrown 1.0", notes="")
    assert weights(candidates(unknown), "overlaps_data") == pytest.approx({True: 0.5, False: 0.5})
    shown = [setting.job.overlap for setting in settings_of(unknown)]
    assert any("dp" in each for each in shown) and any("dp" not in each for each in shown)
    stated = replace(unknown, notes="no DP overlap")
    assert {"dp" in setting.job.overlap for setting in settings_of(stated)} == {False}


def test_shards_inside_a_node_are_not_those_of_all_ranks():
    plain = {"framework": "fms-fsdp", "tp": "1", "dp": "64", "n_gpus": "64", "global_batch_sequences": "64",
             "recompute": "none"}  # fmt: skip
    ranks = {
        said: {c.shard_ranks for c in candidates(one(**plain, zero_stage_or_fsdp=said)) if c.zero == 3}
        for said in ("FSDP full shard", "HSDP", "FSDP hybrid shard", "HSDP (dp_shard 16)", "")
    }
    assert ranks == {
        "FSDP full shard": {64},
        "HSDP": {8},
        "FSDP hybrid shard": {8},
        "HSDP (dp_shard 16)": {16},
        "": {8},
    }
    times = [float(settings_of(one(**plain, zero_stage_or_fsdp=said))[0].evaluate().step_time_s)
             for said in ("FSDP full shard", "HSDP")]  # fmt: skip
    assert times[0] != times[1]


def test_kernels_that_a_row_lists():
    """Of two fused kernels the older takes longer; norms without one are PyTorch's operators."""
    base = {"recompute": "none", "framework": "Homegrown", "attention_impl": "flash"}
    listed = {text: one(**base, notes=f"trial 1; kernel={text}; x")
              for text in ("flash_attention2 + RMS kernel", "flash_attention2", "flash_attentionv1.0.8")}  # fmt: skip
    assert [(run.kernel, run.plain_norms) for run in listed.values()] == [
        ("flash2", False), ("flash2", True), ("flash1", True),
    ]  # fmt: skip
    rms, plain, _ = (settings_of(run)[0] for run in listed.values())
    assert not rms.job.plain_norms and plain.job.plain_norms
    assert float(rms.evaluate().step_time_s) < float(plain.evaluate().step_time_s)
    assert not one(**base, notes="kernel opts: TE + DeepEP").plain_norms and not one(**base, notes="").plain_norms
    unfused = [one(**{**base, "attention_impl": text}) for text in ("torch (unfused)", "unfused, fused softmax")]
    assert [settings_of(run)[0].job.separate_kernels for run in unfused] == [True, False]


def test_virtual_stages_that_are_not_stated():
    changes = {"tp": "1", "pp": "4", "dp": "2", "vpp": "", "global_batch_sequences": "64"}
    for schedule in ("1F1B", "DualPipe"):
        assert {c.degrees.vpp for c in candidates(one(**changes, schedule=schedule))} == {1}
    woven = candidates(one(**changes, schedule="interleaved"))
    assert {c.degrees.vpp for c in woven} == {2, 8}
    either = candidates(one(**changes, schedule=""))
    assert {c.degrees.vpp for c in either} == {1, 2, 8}


@pytest.mark.parametrize(
    ("text", "schedule"),
    [("1F1B", "1f1b"), ("ZB-1p", "zb-1p"), ("ZB-H1", "zb-1p"), ("ZB-2p", "zb-2p"), ("DualPipe", "dualpipe")],
)
def test_schedules_with_a_closed_form(text: str, schedule: str):
    jobs = [setting.job for setting in settings_of(one("tokens", schedule=text, gpu="A100-SXM-80GB"))]
    assert jobs and {job.schedule for job in jobs} == {schedule}


def test_layers_of_transformer_engine_bring_their_attention():
    named, bare = (one(source_key="jax-toolbox", dtype=dtype, attention_impl="") for dtype in ("TE BF16", "BF16"))
    assert (named.attention, named.kernel, named.precisions) == ("fused", "newest", ("bf16",))
    assert (bare.attention, bare.kernel) == (None, None)
    assert one(source_key="jax-toolbox", dtype="TE BF16", attention_impl="no flash").attention == "unfused"
    said = ("te fp8", "Transformer Engine FP8", "BF16 without TE", "bf16 (no Transformer Engine)", "FP8 tensorwise")
    assert [one(dtype=dtype, attention_impl="").attention for dtype in said] == ["fused", "fused", None, None, None]


def test_an_encoder_is_trained_with_the_dropout_of_its_family():
    assert one(model="BERT-Large", gated_mlp="False", source_key="mlperf", framework="NeMo").model.dropout


@pytest.mark.parametrize(
    ("source", "framework", "drops"),
    [("mine", "Megatron-LM", True), ("mine", "MaxText", False), ("jax-toolbox", "", False), ("mlperf", "NeMo", False)],
)
def test_who_trains_gpt_without_dropout(source: str, framework: str, drops: bool):
    assert one(model="GPT", gated_mlp="False", source_key=source, framework=framework).model.dropout == drops


def test_the_vocabulary_of_a_source_that_does_not_state_it():
    plain, known = (one(model="GPT", gated_mlp="False", vocab="", source_key=key) for key in ("mine", "zero-bubble"))
    assert (plain.model.vocab, known.model.vocab) == (51200, 32000)
    assert one(model="GPT", gated_mlp="False", vocab="50304", source_key="zero-bubble").model.vocab == 50304


def test_ranks_of_experts_that_are_not_stated():
    """From those of a node to the most, these likeliest; one that gathers weights may keep all experts on a rank."""
    run = replace(one("moe", ep="", recompute="none"), framework="megatron-core", gpus=64)
    degrees = Degrees(tp=1, pp=1, cp=1, dp=64, vpp=1, ep=None)
    assert _expert_ranks(run, degrees) == [(size, size / 120) for size in (8, 16, 32, 64)]
    assert _expert_ranks(replace(run, gpus=4), replace(degrees, dp=4)) == [(4, 1.0)]
    whole = replace(run, framework="maxtext")
    assert _expert_ranks(whole, degrees) == [(1, 0.7), (8, 0.3)]
    assert _expert_ranks(replace(whole, gpus=1), replace(degrees, dp=1)) == [(1, 1.0)]


def test_models_with_experts_recompute_modules():
    """Megatron's recipes for them name modules, hardly ever layers; those without experts are as before."""
    run = replace(one("moe"), framework="megatron-core", recompute=None)
    by_kind = dict[str, float]()
    for recompute, weight in _recomputes(run):
        by_kind[recompute.kind] = by_kind.get(recompute.kind, 0.0) + weight
    assert by_kind == pytest.approx({"none": 0.4, "norms": 0.25, "modules": 0.3, "full": 0.05})
    dense = replace(one(), framework="megatron-core", recompute=None)
    assert {recompute.kind for recompute, _ in _recomputes(dense)} == {"none", "attention", "full"}
    assert RECOMPUTE["modules"] == (*RECOMPUTE["norms"], "activation")


@pytest.mark.slow
def test_degrees_that_are_not_stated():
    found = candidates(one("quiet"))
    assert len({c.degrees for c in found}) > 1
    fitting = [c for c in found if c.fits]
    assert sum(c.weight for c in fitting) > 0.7
    assert all(c.degrees.tp * c.degrees.pp * c.shard_ranks >= 16 for c in fitting), "70B needs 16 or more shards"
    sharded = candidates(one("quiet", framework="torchtitan"))
    assert {(c.degrees.tp, c.degrees.pp, c.degrees.dp, c.zero) for c in sharded} == {(1, 1, 64, 3)}


def test_stated_shards():
    assert {c.shard_ranks for c in candidates(one(zero_stage_or_fsdp="FSDP 2"))} == {2}
    assert {c.shard_ranks for c in candidates(one(zero_stage_or_fsdp="FSDP 3"))} == {4}
    assert {c.shard_ranks for c in candidates(one(zero_stage_or_fsdp="FSDP+DP, DP=2"))} == {2}
    assert weights(candidates(one(zero_stage_or_fsdp="0/1 (DeepSpeed)")), "zero") == pytest.approx(
        {0: 0.5, 1: 0.5}, abs=0.02
    )
    assert {c.shard_ranks for c in candidates(one(zero_stage_or_fsdp="0"))} == {1}


def test_the_measured_figures_have_no_say():
    """The same settings and weights, whatever time and memory were measured."""
    open_cells = {"micro_batch": "", "recompute": "", "zero_stage_or_fsdp": ""}
    first = candidates(one(**open_cells))
    other = candidates(one(**open_cells, metric_step_time_s="99", metric_peak_mem_gb="5", metric_mfu="0.1"))
    assert first == other


def test_what_settings_need_is_what_the_engine_says():
    """All settings at once as each alone, through the engine's own memory."""
    run = one(micro_batch="", recompute="", zero_stage_or_fsdp="", tp="2", pp="2", dp="2")
    found = candidates(run)
    alone = [float(memory_by_definition(s.evaluate())["device"]) for s in settings_of(run)]
    assert needed_bytes(run, found) == pytest.approx(alone, rel=1e-12)
    assert len(set(alone)) > 3


def test_weight_of_what_fits():
    assert fit_weight(40e9, 80e9) == pytest.approx(1.0, abs=1e-6) and fit_weight(1.0, 1.0) == 0.5
    assert fit_weight(3.0, 1.0) == 0.002 < fit_weight(1.1, 1.0) < 0.5


@pytest.mark.slow
@pytest.mark.shared
def test_every_shared_row_has_settings():
    for run in read_runs(require_data("measured_training.csv.gz")).runs[::7]:
        check(run, candidates(run))


def test_the_peak_of_fp8_is_that_of_int8_where_the_units_lack_fp8():
    changes = {
        "metric_step_time_s": "",
        "metric_tokens_per_s_per_gpu": "",
        "metric_mfu": "0.5",
        "tflops_definition": "",
    }
    narrow, wide = (one(gpu="TPU v5p", dtype=dtype, **changes).step_time_s for dtype in ("fp8", "bf16"))
    assert narrow == pytest.approx(0.5 * wide, rel=1e-12)


def test_cells_of_a_hundred_thousand_characters_are_read_in_one_pass():
    """Each of these took minutes: the time grew with the square of the length."""
    long = 100_000
    assert TableRow(1, {"metric_step_time_s": f"1{' ' * long}!"}).measured("metric_step_time_s") is None
    assert one(notes="adam" * (long // 4)).optimizer == "adam"
    adapted = one(workload="lora", notes=f"lora r{' ' * long}").adapter
    assert adapted is not None and adapted.assumed
