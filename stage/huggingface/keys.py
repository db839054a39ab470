"""The keys of a config.json: typed reads that note what was read, so that what was not can be refused.

A model is accepted when every key is understood or known to have no part in what it computes. To ignore the others
would be to run another model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shardline.stage.errors import CheckpointError, shown

MAX_SIZE = 1 << 24
MAX_LAYERS = 4096
MAX_HEAD_DIM = 4096

# No part in what is computed from given token ids: how the model was trained, written, sampled from, is to be run.
_WITHOUT_EFFECT = """
    architectures model_type auto_map transformers_version torch_dtype dtype _name_or_path name_or_path _commit_hash
    tokenizer_class prefix model_max_length is_llama_config transformers.js_config unsloth_version unsloth_fixed
    initializer_range attention_dropout hidden_dropout resid_pdrop embd_pdrop pretraining_tp router_jitter_noise
    output_router_logits router_aux_loss_coef finetuning_task task_specific_params problem_type id2label label2id
    num_labels return_dict output_hidden_states output_attentions
    use_cache cache_implementation chunk_size_feed_forward torchscript use_bfloat16 tf_legacy_loss attn_implementation
    _attn_implementation _attn_implementation_autoset _experts_implementation
    bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id max_length min_length do_sample
    early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p typical_p repetition_penalty
    length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences
    forced_bos_token_id forced_eos_token_id remove_invalid_values suppress_tokens begin_suppress_tokens
    exponential_decay_length_penalty return_dict_in_generate output_scores
"""

# The one value that changes nothing, for keys that some other value of changes what is computed.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "is_encoder_decoder": (False,),
    "is_decoder": (False, True),
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (),
    "tie_encoder_decoder": (False,),
    "pruned_heads": ({},),
    "per_layer_config": ({},),
    "rope_interleaved": (False,),
    "use_mrope": (False,),
    "mup_enabled": (False,),
}

_KNOWN_WITHOUT_EFFECT = frozenset(_WITHOUT_EFFECT.split())


class Keys:
    """One object of a config.json. A key whose value is null counts as absent.

    Attributes:
        path: The file, for errors.
    """

    def __init__(self, path: Path, values: Mapping[str, Any], prefix: str = "") -> None:
        self.path = path
        self._values = values
        self._prefix = prefix
        self._read: set[str] = set()

    def error(self, key: str, problem: str) -> CheckpointError:
        """An error of that key."""
        return CheckpointError(self.path, self._prefix + key, problem)

    def get(self, key: str) -> Any:
        """A value as it is; None if it is absent."""
        self._read.add(key)
        return self._values.get(key)

    def size(self, key: str, default: int | None = None, *, least: int = 1, most: int = MAX_SIZE) -> int:
        """A count. Raises CheckpointError."""
        value = self._given(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.error(key, f"{shown(value)} is not an integer from {least} to {most}")
        return value

    def same_size(self, *names: str) -> int:
        """A count that may be under several names, but then the same. Raises CheckpointError."""
        found = {self.size(name) for name in names if self.get(name) is not None}
        if len(found) > 1:
            raise self.error(names[0], f"{sorted(found)}: {' and '.join(names)} say different things")
        return found.pop() if found else self.size(names[0])

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number above zero. Raises CheckpointError."""
        value = self._given(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
            raise self.error(key, f"{shown(value)} is not a number above zero")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """true or false. Raises CheckpointError."""
        value = self._given(key, default)
        if not isinstance(value, bool):
            raise self.error(key, f"{shown(value)} is neither true nor false")
        return value

    def cap(self, key: str) -> float:
        """A soft cap: above zero, or zero for none. Raises CheckpointError."""
        return 0.0 if self.get(key) is None else self.number(key)

    def integers(self, key: str, least: int, most: int) -> tuple[int, ...] | None:
        """A list of integers. Raises CheckpointError."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or not all(type(entry) is int and least <= entry <= most for entry in value):
            raise self.error(key, f"{shown(value)} is not a list of integers from {least} to {most}")
        return tuple(value)

    def numbers(self, key: str, count: int) -> tuple[float, ...]:
        """A list of that many numbers above zero. Raises CheckpointError."""
        value = self._given(key, None)
        if (
            not isinstance(value, list)
            or len(value) != count
            or not all(type(entry) in (int, float) and 0 < entry < 1e30 for entry in value)
        ):
            raise self.error(key, f"{shown(value)} is not a list of {count} numbers above zero")
        return tuple(map(float, value))

    def text(self, key: str, default: str | None = None) -> str:
        """A text. Raises CheckpointError."""
        value = self._given(key, default)
        if not isinstance(value, str):
            raise self.error(key, f"{shown(value)} is not a text")
        return value

    def section(self, key: str) -> Keys | None:
        """An object of its own. Raises CheckpointError."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(key, f"{shown(value)} is not an object")
        return Keys(self.path, value, f"{self._prefix}{key}.")

    def only(self, key: str, allowed: Callable[[Any], bool], meaning: str) -> None:
        """Refuse the key unless it is absent or has a value that changes nothing. Raises CheckpointError."""
        value = self.get(key)
        if value is not None and not allowed(value):
            raise self.error(key, f"{shown(value)}: {meaning} is not supported")

    def refuse_unread(self) -> None:
        """Refuse every key that was not read and may change what is computed. Raises CheckpointError."""
        for key, value in self._values.items():
            if key in self._read or key in _KNOWN_WITHOUT_EFFECT or value is None:
                continue
            if not any(value == neutral and type(value) is type(neutral) for neutral in _NEUTRAL.get(key, ())):
                raise CheckpointError(
                    self.path,
                    self._prefix + shown(key),
                    f"{shown(value)}: the key is unknown here and may change what the model computes",
                )

    def _given(self, key: str, default: Any) -> Any:
        value = self.get(key)
        if value is None:
            if default is None:
                raise self.error(key, "the key is missing")
            return default
        return value
