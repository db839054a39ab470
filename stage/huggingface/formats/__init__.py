"""The integer formats of Hugging Face folders as `GroupedMatrix`, and our own quantizer for folders of floats.

Functions of arrays: they know no file and no model. What is wrong raises ValueError; the caller adds the file and the
tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardline.stage.huggingface.formats.awq import AwqFormat, awq_matrix
from shardline.stage.huggingface.formats.compressed_tensors import CompressedTensorsFormat, compressed_matrix
from shardline.stage.huggingface.formats.config import choice
from shardline.stage.huggingface.formats.gptq import GptqFormat, gptq_matrix
from shardline.stage.huggingface.formats.mxfp4 import Mxfp4Format, mxfp4_expert, mxfp4_matrix
from shardline.stage.huggingface.formats.quantize import quantize, quantized_bytes
from shardline.stage.huggingface.formats.scheme import Scheme

__all__ = [
    "AwqFormat",
    "CompressedTensorsFormat",
    "Format",
    "GptqFormat",
    "Mxfp4Format",
    "Scheme",
    "awq_matrix",
    "compressed_matrix",
    "gptq_matrix",
    "mxfp4_expert",
    "mxfp4_matrix",
    "quantize",
    "quantized_bytes",
    "read_config",
]

Format = GptqFormat | AwqFormat | CompressedTensorsFormat | Mxfp4Format

_FORMATS: dict[str, type[Format]] = {
    "gptq": GptqFormat,
    "awq": AwqFormat,
    "compressed-tensors": CompressedTensorsFormat,
    "mxfp4": Mxfp4Format,
}


def read_config(config: Mapping[str, Any]) -> Format:
    """The format that a `quantization_config` describes. Raises ValueError: it is not supported, by key and value."""
    if config.get("quant_method") is None:
        raise ValueError("quant_method is missing")
    return _FORMATS[choice(config, "quant_method", tuple(_FORMATS), "")](config)
