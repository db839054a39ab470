"""Reading a quantization config, which a stranger wrote: every key is understood or refused with its value."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

# fmt: off
HISTORY = frozenset((
    "desc_act", "static_groups", "true_sequential", "damp_percent", "damp_auto_increment", "act_group_aware", "mse",
    "dataset", "tokenizer", "batch_size", "model_seqlen", "seqlen", "max_input_length", "pad_token_id", "nsamples",
    "block_name_to_quantize", "to_quant_block_names", "module_name_preceding_first_block", "lm_head",
    "modules_in_block_to_quantize", "modules_to_not_convert", "cache_block_outputs", "cache_examples_on_gpu",
    "use_exllama", "disable_exllama", "exllama_config", "use_cuda_fp16", "use_triton", "do_fuse", "fuse_max_seq_len",
    "modules_to_fuse", "model_name_or_path", "model_file_base_name", "quantizer", "provider", "autoround_version",
    "iters", "lr", "minmax_lr", "gradient_accumulate_steps", "enable_minmax_tuning", "enable_quanted_input",
    "enable_norm_bias_tuning", "low_gpu_mem_usage", "scale_dtype", "amp", "meta",
))
# fmt: on
"""Keys of GPTQ and AWQ configs that say how the file was made, or how some program should run it. Which modules have
integers, the tensors themselves say. So nothing here changes what a tensor means."""


def text(value: Any) -> str:
    """A value as the config has it, cut short."""
    shown = json.dumps(value, default=repr)
    return shown if len(shown) <= 80 else f"{shown[:77]}..."


def refuse_unknown(config: Mapping[str, Any], known: Collection[str]) -> None:
    """Raise ValueError if a key is neither known nor says nothing (null, false, empty)."""
    for key, value in config.items():
        if key not in known and value not in (None, False, "", [], {}):
            raise ValueError(f"{text(key)}: {text(value)} is not supported")


def integer(config: Mapping[str, Any], key: str, default: int) -> int:
    """An integer. Raises ValueError."""
    value = config.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{key}: {text(value)} is no integer")
    return value


def flag(config: Mapping[str, Any], key: str, default: bool) -> bool:
    """true or false; null is the default. Raises ValueError."""
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ValueError(f"{key}: {text(value)} is neither true nor false")
    return value


def choice(config: Mapping[str, Any], key: str, supported: tuple[str, ...], default: str) -> str:
    """One of some names, whatever their case; null is the default. Raises ValueError."""
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, str) or value.lower() not in supported:
        raise ValueError(f"{key}: {text(value)} is not supported, only {', '.join(supported)}")
    return value.lower()
