"""config.json: which model a folder holds, and how it is quantized."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardline.stage.errors import CheckpointError, shown
from shardline.stage.huggingface import formats
from shardline.stage.huggingface.families import FAMILIES, Family
from shardline.stage.huggingface.files import read_json
from shardline.stage.huggingface.keys import Keys
from shardline.stage.spec import ModelSpec

_logger = logging.getLogger(__name__)

CONFIG = "config.json"
CONFIG_LIMIT = 8 << 20
"""Bytes; the longest have a list of modules that are not quantized."""


@dataclass(frozen=True, slots=True)
class Config:
    """A config.json that is understood.

    Attributes:
        family: The class of model.
        spec: The model; its head is tied as the file says.
        keys: Those that the model was read from.
        format: How its modules are quantized; None: they are floats.
        raw: The file's bytes.
    """

    family: Family
    spec: ModelSpec
    keys: Keys
    format: formats.Format | None
    raw: bytes


def read_config(folder: Path) -> Config:
    """Read and check a folder's config.json. Raises CheckpointError."""
    path = folder / CONFIG
    values, raw = read_json(path, CONFIG_LIMIT)
    family = _family(path, values)
    _check_remote_code(path, values, family)
    top = Keys(path, values)
    quantization = top.section("quantization_config")
    own, prefix = values, ""
    if family.section is not None:
        prefix = f"{family.section}."
        section = values.get(family.section)
        if not isinstance(section, dict):
            raise CheckpointError(path, family.section, f"{shown(section)} is not an object")
        own = section
        if values.get("tie_word_embeddings") is not None:
            own = own | {"tie_word_embeddings": top.flag("tie_word_embeddings", True)}
        for key in (family.section, *family.beside):
            top.get(key)
        top.refuse_unread()
    keys = Keys(path, {**family.defaults, **own}, prefix)
    if family.section is None:
        keys.get("quantization_config")
    spec = family.read(keys)
    family.unused(keys, spec)
    keys.refuse_unread()
    if spec.experts is not None and not any(layer.experts for layer in spec.layers):
        raise CheckpointError(path, "num_hidden_layers", "no layer has experts, though the model is one of experts")
    return Config(family, spec, keys, _format(path, values.get("quantization_config"), quantization), raw)


def _family(path: Path, values: Mapping[str, Any]) -> Family:
    names = values.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise CheckpointError(path, "architectures", f"{shown(names)} is not a list of one class of models")
    family = FAMILIES.get(names[0])
    if family is None:
        raise CheckpointError(path, "architectures", f"{shown(names[0])} is not supported; {', '.join(FAMILIES)} are")
    model_type = values.get("model_type")
    if model_type != family.model_type:
        raise CheckpointError(
            path, "model_type", f"{shown(model_type)} is not {family.model_type}, as {family.architecture} has it"
        )
    return family


def _check_remote_code(path: Path, values: Mapping[str, Any], family: Family) -> None:
    """A folder may name code of its own. It is never run: it is let be where it is of a class that is known here, whose
    arithmetic is then transformers', and refused where it is of another."""
    auto_map = values.get("auto_map")
    if not auto_map:
        return
    model = auto_map.get("AutoModelForCausalLM") if isinstance(auto_map, dict) else auto_map
    if model is not None and (not isinstance(model, str) or model.rpartition(".")[2] != family.architecture):
        raise CheckpointError(
            path,
            "auto_map",
            f"{shown(model)}: the model is code of the folder's own, which is never run; only the classes that are "
            "known here are supported",
        )
    _logger.info("%s: the code that auto_map names is not run: %s is known here", path, family.architecture)


def _format(path: Path, config: Any, section: Keys | None) -> formats.Format | None:
    if section is None:
        return None
    try:
        return formats.read_config(config)
    except ValueError as error:
        raise CheckpointError(path, "quantization_config", str(error)) from None
