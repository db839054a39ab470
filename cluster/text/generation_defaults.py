"""How a model's makers advise to sample from it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardline.cluster.errors import TokenizerError
from shardline.cluster.text.folder_files import JsonObject, brief
from shardline.scheduler import SamplingParams

_logger = logging.getLogger(__name__)

_MOST = 100.0
"""The largest temperature and penalty that `SamplingParams` takes."""

_FIELDS = {
    "temperature": "temperature",
    "top_k": "top-k",
    "top_p": "top-p",
    "min_p": "min-p",
    "repetition_penalty": "repetition penalty",
}

# Of `generation_config.json`: what would change which tokens are drawn and is not done here, with the values that mean
# "off" (besides null, false, zero and what is empty). What only beams, lengths or caches need is not listed.
_NOT_APPLIED: Mapping[str, object] = {
    "typical_p": 1,
    "epsilon_cutoff": 0,
    "eta_cutoff": 0,
    "top_h": None,
    "penalty_alpha": 0,
    "no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1,
    "exponential_decay_length_penalty": None,
    "bad_words_ids": None,
    "sequence_bias": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "guidance_scale": 1,
    "watermarking_config": None,
    "num_beams": 1,
}

_GGUF = "general.sampling."
_GGUF_NAMES = {
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}
# llama.cpp's other samplers; what is off by default there is off at zero.
_GGUF_NOT_APPLIED: Mapping[str, object] = {"mirostat": 0, "xtc_probability": 0, "sequence": None}


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """What a model says of sampling; None where it says nothing. `params` makes them a request's.

    Attributes:
        temperature: From 0, which is greedy, to 100.
        top_k: 0 or more; 0 is no limit.
        top_p: Above 0, at most 1.
        min_p: From 0 to 1.
        repetition_penalty: Above 0, at most 100; 1 is none.
        source: What says so; empty if nothing does.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    source: str = ""

    @classmethod
    def from_json(cls, config: JsonObject) -> GenerationDefaults:
        """Read a folder's `generation_config.json`.

        `do_sample` false is greedy whatever temperature stands beside it, as transformers has it; true without a
        temperature is a temperature of 1. Raises TokenizerError, which names the field, where a value has a wrong type
        or range; methods that are not supported are told in a warning, for the advice is no part of the model.
        """
        temperature = _number(config, "temperature", least=0.0, most=_MOST)
        sample = config.flag("do_sample")
        if sample is not None:
            temperature = (1.0 if temperature is None else temperature) if sample else 0.0
        _tell(str(config.path), config.entries, _NOT_APPLIED)
        return cls._of(
            config.path.name,
            temperature=temperature,
            top_k=_count(config, "top_k"),
            top_p=_number(config, "top_p", above=0.0, most=1.0),
            min_p=_number(config, "min_p", least=0.0, most=1.0),
            repetition_penalty=_number(config, "repetition_penalty", above=0.0, most=_MOST),
        )

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> GenerationDefaults:
        """Read the keys `general.sampling.*` of a GGUF file, which llama.cpp's converter writes from the same advice.

        Raises TokenizerError as `from_json` does.
        """
        fields = _MetadataFields(metadata)
        _tell("the file", {key: metadata.get(_GGUF + key) for key in _GGUF_NOT_APPLIED}, _GGUF_NOT_APPLIED, _GGUF)
        top_k = fields.integer("top_k")
        # Over no tokens at all the penalty is none.
        penalized = fields.integer("penalty_last_n") != 0
        penalty = _number(fields, "repetition_penalty", above=0.0, most=_MOST)
        return cls._of(
            _GGUF + "*",
            temperature=_number(fields, "temperature", least=0.0, most=_MOST),
            # llama.cpp takes what is below zero for no limit too.
            top_k=None if top_k is None else max(0, top_k),
            top_p=_number(fields, "top_p", above=0.0, most=1.0),
            min_p=_number(fields, "min_p", least=0.0, most=1.0),
            repetition_penalty=penalty if penalized else None,
        )

    @classmethod
    def _of(cls, source: str, **values: Any) -> GenerationDefaults:
        return cls(**values, source=source if any(value is not None for value in values.values()) else "")

    def params(self, **given: Any) -> SamplingParams:
        """A request's parameters: what is given here (fields of `SamplingParams`) as it is, and the model's own for the
        rest. A temperature of 0 is greedy and nothing else: the model's filters and penalty stay out.

        Raises InvalidParameterError.
        """
        return SamplingParams(**{**self._beside(given), **given})

    def told(self, **given: Any) -> str:
        """What `params` takes of the model's own, in words; empty if that is nothing, or changes nothing."""
        params = self.params(**given)
        neutral = SamplingParams()
        taken = [
            f"{_FIELDS[field]} {getattr(params, field):g}"
            for field in self._beside(given)
            if getattr(params, field) != getattr(neutral, field)
            and (params.temperature or field == "repetition_penalty")
        ]
        return ", ".join(taken)

    def _beside(self, given: Mapping[str, Any]) -> dict[str, Any]:
        if "temperature" in given and not given["temperature"]:
            return {}
        own = {field: getattr(self, field) for field in _FIELDS}
        return {field: value for field, value in own.items() if value is not None and field not in given}


class _MetadataFields:
    """The keys of a GGUF file by the names that `generation_config.json` has for them."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._metadata = metadata

    def error(self, key: str, problem: str) -> TokenizerError:
        return TokenizerError(self._name(key), problem)

    def integer(self, key: str) -> int | None:
        value = self._metadata.get(self._name(key))
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise self.error(key, f"is {brief(value)}, not an integer")
        return value

    def number(self, key: str) -> float | None:
        value = self._metadata.get(self._name(key))
        if value is None:
            return None
        # NaN is smaller than nothing.
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e30:
            raise self.error(key, f"is {brief(value)}, not a number")
        return float(value)

    def _name(self, key: str) -> str:
        return _GGUF + _GGUF_NAMES.get(key, key)


def _count(config: JsonObject, key: str) -> int | None:
    """0 where it is -1, which some files have for no limit."""
    value = config.integer(key)
    if value is not None and value < -1:
        raise config.error(key, f"is {value}; it is 0 or more, or -1 for no limit")
    return None if value is None else max(0, value)


def _number(
    config: JsonObject | _MetadataFields,
    key: str,
    *,
    most: float,
    least: float | None = None,
    above: float | None = None,
) -> float | None:
    value = config.number(key)
    if value is None:
        return None
    bounds = f"{least:g} or more" if least is not None else f"above {above:g}"
    too_low = value < least if least is not None else above is not None and value <= above
    if too_low or value > most:
        raise config.error(key, f"is {value:g}; it is {bounds} and at most {most:g}")
    return value


def _tell(where: str, entries: Mapping[str, Any], off: Mapping[str, object], prefix: str = "") -> None:
    asked = [prefix + key for key, neutral in off.items() if (value := entries.get(key)) and value != neutral]
    if asked:
        _logger.warning("%s advises %s, which is not supported: sampling goes without it", where, ", ".join(asked))
