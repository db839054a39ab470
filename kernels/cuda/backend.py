"""The CUDA backend: `Backend` on one NVIDIA GPU with our own kernels."""

from __future__ import annotations

from typing import ClassVar

from shardline.kernels.cuda.attention_ops import AttentionOps
from shardline.kernels.cuda.entry import on_its_device
from shardline.kernels.cuda.expert_ops import ExpertOps
from shardline.kernels.cuda.sampling_ops import SamplingOps


@on_its_device
class CudaBackend(ExpertOps, AttentionOps, SamplingOps):
    """See `Backend`; core.py for what the ops share."""

    name: ClassVar[str] = "cuda"
