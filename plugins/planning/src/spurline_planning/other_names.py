"""List what other trainers call a setting, for the nearest fix of an unknown key and the page that compares them.

Names of TRL with transformers' `TrainingArguments`, Axolotl, verl and PEFT, as their documentation had them in November
2026. docs/coming-from.md has the same in tables.
"""

from __future__ import annotations

from collections.abc import Mapping

from spurline.plugins.registry import OtherNames

OTHER_NAMES: Mapping[str, str] = {
    # The run.
    "output_dir": "run_dir",
    "default_local_dir": "run_dir",
    "max_steps": "steps",
    "total_training_steps": "steps",
    "num_epochs": "epochs",
    "num_train_epochs": "epochs",
    "total_epochs": "epochs",
    "train_batch_size": "batch_size",
    "micro_batch_size": "backend.rows_per_microbatch",
    "per_device_eval_batch_size": "evaluation.batch_size",
    # Model and adapters.
    "base_model": "model.path",
    "model_name": "model.path",
    "model_name_or_path": "model.path",
    "tokenizer_name": "model.tokenizer",
    "unfrozen_parameters": "model.freeze",
    "adapter": "backend.lora",
    "peft": "backend.lora",
    "peft_config": "backend.lora",
    "r": "backend.lora.rank",
    "lora_r": "backend.lora.rank",
    "lora_rank": "backend.lora.rank",
    "lora_alpha": "backend.lora.alpha",
    "lora_dropout": "backend.lora.dropout",
    "lora_target_modules": "backend.lora.target_modules",
    "use_dora": "backend.lora.dora",
    "use_rslora": "backend.lora.rslora",
    "load_in_4bit": "backend.lora.base_dtype: nf4",
    # Data.
    "datasets": "data.train",
    "dataset_name": "data.train",
    "train_files": "data.train",
    "eval_dataset": "data.eval",
    "test_datasets": "data.eval",
    "val_files": "data.eval",
    "val_set_size": "data.eval",
    "max_len": "data.max_length",
    "max_seq_length": "data.max_length",
    "sequence_len": "data.max_length",
    "dataset_text_field": "data.train.columns",
    "assistant_only_loss": "data.train_on: all_assistants",
    "train_on_inputs": "data.train_on",
    "group_by_length": "data.order: length_grouped",
    "packing": "collator: packed",
    "sample_packing": "collator: packed",
    "use_remove_padding": "collator: packed",
    # Optimizer and schedule.
    "lr": "optimizer.learning_rate",
    "wd": "optimizer.weight_decay",
    "optim": "optimizer",
    "clip_grad": "optimizer.max_grad_norm",
    "grad_clip": "optimizer.max_grad_norm",
    "lr_scheduler": "schedule",
    "lr_scheduler_type": "schedule",
    "lr_warmup_steps": "schedule.warmup_steps",
    "lr_warmup_steps_ratio": "schedule.warmup_ratio",
    # Memory, speed and ranks.
    "bf16": "backend.precision: bf16",
    "dtype": "backend.precision",
    "torch_dtype": "backend.precision",
    "gradient_checkpointing": "backend.activation_checkpointing",
    "enable_gradient_checkpointing": "backend.activation_checkpointing",
    "ppo_max_token_len_per_gpu": "backend.max_tokens_per_microbatch",
    "use_liger_kernel": "backend.kernels: liger",
    "torch_compile": "backend.compile",
    "fsdp": "backend: fsdp",
    "nproc": "backend.ranks",
    "nproc_per_node": "backend.ranks",
    "num_gpus": "backend.ranks",
    "num_processes": "backend.ranks",
    "world_size": "backend.ranks",
    "n_gpus_per_node": "backend.ranks_per_node",
    "tp": "backend.tensor",
    "tensor_parallel": "backend.tensor",
    "tensor_parallel_size": "backend.tensor",
    "tensor_model_parallel_size": "backend.tensor",
    "pp": "backend.pipeline",
    "pipeline_parallel_size": "backend.pipeline",
    "pipeline_model_parallel_size": "backend.pipeline",
    "context_parallel_size": "backend.context",
    "ulysses_sequence_parallel_size": "backend.context",
    "expert_parallel_size": "backend.expert",
    "expert_model_parallel_size": "backend.expert",
    # Checkpoints, evaluation, trackers.
    "save_steps": "checkpoint.every_steps",
    "save_freq": "checkpoint.every_steps",
    "save_total_limit": "checkpoint.keep_last",
    "load_best_model_at_end": "checkpoint.keep_best",
    "metric_for_best_model": "checkpoint.keep_best",
    "eval_steps": "evaluation.every_steps",
    "test_freq": "evaluation.every_steps",
    "early_stopping_patience": "stop_when.patience",
    "report_to": "trackers",
    "wandb_project": "trackers: [{name: wandb, project: ...}]",
    # Reinforcement learning and preferences.
    "num_generations": "source.samples_per_prompt",
    "group_size": "source.samples_per_prompt",
    "rollout_n": "source.samples_per_prompt",
    "rollout_batch_size": "source.prompts_per_step",
    "max_completion_length": "source.sampling.max_new_tokens",
    "max_response_length": "source.sampling.max_new_tokens",
    "reward": "source.environment.rewards",
    "reward_funcs": "source.environment.rewards",
    "reward_function": "source.environment.rewards",
    "custom_reward_function": "source.environment.rewards",
    "adv_estimator": "source.advantage",
    "scale_rewards": "source.advantage.normalize_std",
    "norm_adv_by_std_in_grpo": "source.advantage.normalize_std",
    "num_iterations": "minibatches.update_epochs",
    "ppo_epochs": "minibatches.update_epochs",
    "ppo_mini_batch_size": "minibatches.prompts_per_minibatch",
    "epsilon": "loss.clip_low",
    "epsilon_high": "loss.clip_high",
    "clip_ratio_low": "loss.clip_low",
    "clip_ratio_high": "loss.clip_high",
    "kl_coef": "source.kl_in_reward.coefficient",
    "kl_loss_coef": "loss.kl.coefficient",
    "entropy_coeff": "loss.entropy_coefficient",
    "use_vllm": "source.engine: vllm",
    "vllm_mode": "source.engine.mode",
    "vllm_gpu_memory_utilization": "source.engine.gpu_memory_utilization",
}
"""Their name -> our key path, or `key: value` if one value of ours means the same."""

REPLACED: Mapping[str, str] = {
    "shuffle": (
        " The order of samples is data.order: `order: sequential` for file order, `order: uniform` (the default) for a "
        "new shuffle in each epoch."
    ),
    "success_reward": (
        " A success is judged by one named reward, not by the weighted sum: write `success: {reward: NAME, "
        "at_least: 1}`."
    ),
    "per_device_train_batch_size": (
        " batch_size is the samples of an optimizer step, over all devices: theirs times accumulation times devices. "
        "backend.rows_per_microbatch is what one device computes at once."
    ),
    "gradient_accumulation_steps": (
        " It is not needed: batch_size is the samples of an optimizer step, over all devices, and "
        "backend.max_tokens_per_microbatch (or backend.rows_per_microbatch) bounds what is computed at once."
    ),
    "logging_steps": " Every step is recorded; the terminal shows every `trackers: [{name: console, every_steps: N}]`.",
    "resume_from_checkpoint": " The same command goes on from the last checkpoint; `--resume PATH` takes another one.",
    "deepspeed": " `plugins: [fsdp_backend]` with `backend: fsdp` divides weights, gradients and optimizer (ZeRO 3).",
}
"""Name of a setting of other trainers or earlier versions that has no equivalent -> what to do instead, in a sentence.
"""

_FSDP = " Several ranks train together with `plugins: [fsdp_backend]` and `backend: {name: fsdp, ranks: N}`."
_DEVICE = " The setting `device` says where the backend computes: `backend: {device: cuda}`, or cpu."

RECIPES: Mapping[str, str] = {
    "loss/dapo": (
        " DAPO is `loss: {name: ppo, clip_high: 0.28}` with `zero_variance: refill` and `overlong: {buffer_tokens: N}` "
        "in source."
    ),
    "loss/ipo": " IPO is `loss: {name: dpo, loss_type: ipo}`.",
    "backend/deepspeed": REPLACED["deepspeed"],
    "backend/accelerate": _FSDP,
    "backend/ddp": _FSDP,
    "backend/fsdp2": _FSDP,
    "backend/cpu": _DEVICE,
    "backend/cuda": _DEVICE,
    "backend/gpu": _DEVICE,
    "rollout_engine/sglang": " The engine for serving is vLLM: `plugins: [async_rl]` with `engine: vllm`.",
}
"""`KIND/NAME` of a component that does not exist here -> a sentence that says how to write it."""

NAMES = OtherNames(settings=OTHER_NAMES, replaced=REPLACED, components=RECIPES)
