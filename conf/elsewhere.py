"""What options are called elsewhere: by transformers, vLLM, SGLang, SpecForge, speculators, EAGLE and Medusa.

Knows names, and where what goes by another name counts otherwise. Does not know which options a program has.
"""

from collections.abc import Collection

# Option here -> its names elsewhere. Where several options go by one name, the first that a program has is meant.
ELSEWHERE = {
    # training
    "train.lr": ("learning_rate",),
    "train.steps": ("max_steps", "max_train_steps", "num_train_steps", "num_steps", "total_steps"),
    "train.epochs": ("num_train_epochs", "max_epochs"),
    "train.batch_tokens": ("batch_size", "train_batch_size", "micro_batch_size", "per_device_train_batch_size"),
    "train.accumulate": ("gradient_accumulation_steps", "draft_accumulation_steps"),
    "train.warmup": ("warmup_steps", "warmup_ratio", "num_warmup_steps"),
    "train.schedule": ("lr_scheduler", "lr_scheduler_type"),
    "train.clip": ("max_grad_norm", "grad_clip", "clip_grad_norm", "gradient_clipping"),
    "train.betas": ("adam_beta1", "adam_beta2"),
    "train.save_every": ("save_steps", "save_interval"),
    "train.keep": ("save_total_limit",),
    "train.log_every": ("logging_steps", "log_interval"),
    "train.compile": ("torch_compile",),
    "eval.every": ("eval_steps", "eval_interval"),
    "out": ("output_dir", "output_path", "save_dir", "save_path"),
    "resume": ("resume_from_checkpoint",),
    "dtype": ("bf16", "fp16", "torch_dtype", "mixed_precision"),
    "tracker": ("report_to", "wandb"),
    "tracker.project": ("wandb_project",),
    "trunk": ("lora", "use_lora"),
    "trunk.rank": ("lora_r", "lora_rank"),
    "trunk.alpha": ("lora_alpha",),
    "trunk.modules": ("target_modules", "lora_target_modules"),
    # data
    "data.path": ("data_path", "train_data_path", "train_file", "dataset", "dataset_name", "dataset_path"),
    "given.path": ("data_path", "dataset", "dataset_name", "dataset_path"),
    "data.max_length": ("max_seq_len", "max_seq_length", "seq_length", "model_max_length", "block_size"),
    "data.limit": ("max_samples", "max_train_samples"),
    "count": ("max_samples", "num_samples"),
    "data.held_out": ("val_split", "test_size", "validation_split"),
    "data.template": ("chat_template",),
    "data.features_in": ("hidden_states_path", "train_hidden_states_path"),
    # the target and its drafter
    "target.path": (
        "model",
        "model_name",
        "model_name_or_path",
        "model_path",
        "base_model",
        "base_model_path",
        "target_model",
        "target_model_path",
        "verifier_name_or_path",
    ),
    "target.quantize": ("load_in_8bit", "load_in_4bit", "quantization"),
    "target.device": ("device_map",),
    "drafter": ("draft_model", "draft_model_path", "assistant_model", "ea_model_path", "speculative_model"),
    "method.heads": ("num_heads", "num_medusa_heads", "medusa_num_heads", "num_nextn_predict_layers"),
    "method.modules": ("num_layers", "num_nextn_predict_layers"),
    "method.blocks": ("num_layers", "medusa_num_layers"),
    "method.target_layers": ("num_layers", "num_hidden_layers"),
    "method.draft_vocab": ("draft_vocab_size",),
    "method.unroll": ("ttt_length", "ttt_steps", "num_speculative_steps"),
    "method.taps": ("target_layer_ids", "eagle_aux_hidden_state_layer_ids"),
    "method.layer.heads": ("num_heads", "num_attention_heads"),
    "method.layer.kv_heads": ("num_key_value_heads",),
    "method.layer.intermediate": ("intermediate_size",),
    # decoding
    "decode.depth": (
        "num_speculative_tokens",
        "num_assistant_tokens",
        "num_draft_tokens",
        "speculative_num_steps",
    ),
    "decode.nodes": ("total_token", "speculative_num_draft_tokens"),
    "decode.width": ("speculative_eagle_topk",),
    "decode.temperature": ("do_sample",),
    "ngram.longest": ("prompt_lookup_max", "max_matching_ngram_size"),
    "ngram.shortest": ("prompt_lookup_min",),
    "eval.max_new_tokens": ("max_tokens", "max_new_token", "max_output_tokens"),
    "max_new_tokens": ("max_tokens", "max_new_token", "max_output_tokens"),
    "eval.batch": ("batch_size", "eval_batch_size", "per_device_eval_batch_size", "max_num_seqs"),
    "batch": ("batch_size", "max_num_seqs"),
    "eval.limit": ("max_samples", "num_samples", "num_prompts"),
}

# What is given here, of options that elsewhere take something else.
GIVEN = {
    "train.batch_tokens": "tokens of a step, over all processes",
    "train.warmup": "a share of the steps",
    "train.betas": "both, as [0.9,0.95]",
    "dtype": "bfloat16, float16 or float32",
    "tracker": "none or wandb",
    "trunk": "frozen, lora or full",
    "data.path": "with data=jsonl, parquet, text or hub",
    "target.path": "with target=hf",
    "target.quantize": "none, 8bit or 4bit",
    "method.target_layers": "which of the target's, as [0,1,28,29]",
    "decode.temperature": "0 is greedy",
}


def here(name: str, valid: Collection[str]) -> str | None:
    """The option among `valid` that goes by the last part of `name` elsewhere; None where that is no name for any.

    Nor where an option itself ends so, in whatever section: that one is meant, and `nearest` finds it.
    """
    last = name.rpartition(".")[2]
    if any(option.rpartition(".")[2] == last for option in valid):
        return None
    return next((option for option, names in ELSEWHERE.items() if last in names and option in valid), None)
