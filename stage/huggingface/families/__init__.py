"""Model families as data: from a config.json's keys to a `ModelSpec`, and from roles to the names of tensors."""

from __future__ import annotations

from shardline.stage.huggingface.families.family import MODEL, Family, Place
from shardline.stage.huggingface.families.gemma import GEMMA2, GEMMA3, GEMMA3_WITH_IMAGES
from shardline.stage.huggingface.families.glm4 import GLM4, GLM4_MOE
from shardline.stage.huggingface.families.gpt_oss import GPT_OSS
from shardline.stage.huggingface.families.llama import LLAMA, MISTRAL, SMOLLM3
from shardline.stage.huggingface.families.mixtral import MIXTRAL
from shardline.stage.huggingface.families.phi3 import PHI3
from shardline.stage.huggingface.families.qwen import OLMOE, QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE

__all__ = ["FAMILIES", "MODEL", "Family", "Place"]

FAMILIES = {
    family.architecture: family
    for family in (
        LLAMA,
        MISTRAL,
        SMOLLM3,
        MIXTRAL,
        QWEN2,
        QWEN3,
        QWEN2_MOE,
        QWEN3_MOE,
        OLMOE,
        PHI3,
        GEMMA2,
        GEMMA3,
        GEMMA3_WITH_IMAGES,
        GLM4,
        GLM4_MOE,
        GPT_OSS,
    )
}
