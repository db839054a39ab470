"""The room of what runs inside one stage: checkpoint -> resident weights, layers, KV arrays, one step. No Ray."""

from __future__ import annotations

from shardline.stage.backends import backend_for
from shardline.stage.checkpoint import Checkpoint, open_checkpoint
from shardline.stage.errors import CheckpointError, PlanError, StageError
from shardline.stage.roles import matrix_shapes, vector_shapes
from shardline.stage.spec import ExpertsSpec, LayerSpec, ModelSpec, RopeSpec, StageSpec
from shardline.stage.stage import Stage

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "ExpertsSpec",
    "LayerSpec",
    "ModelSpec",
    "PlanError",
    "RopeSpec",
    "Stage",
    "StageError",
    "StageSpec",
    "backend_for",
    "matrix_shapes",
    "open_checkpoint",
    "vector_shapes",
]
