def recipe():
    cfg = _default_config()
    cfg.mixed_precision = _perf_precision("bf16")
    cfg.model.tensor_model_parallel_size = 2
    cfg.model.pipeline_model_parallel_size = 8
    cfg.model.virtual_pipeline_model_parallel_size = 4
    cfg.model.expert_model_parallel_size = 64
    cfg.model.sequence_parallel = True
    cfg.model.recompute_modules = ["mla_up_proj", "mlp"]
    cfg.train.global_batch_size = 16384
    cfg.train.micro_batch_size = 1
    return cfg
