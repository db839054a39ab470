"""Which files of a folder a stage reads, told by config.json and the index alone: so that no other need be fetched."""

from __future__ import annotations

import os
from pathlib import Path

from shardline.stage.errors import CheckpointError
from shardline.stage.huggingface.config import read_config
from shardline.stage.huggingface.families import MODEL
from shardline.stage.huggingface.folder import INDEX, SINGLE, Folder


def weight_files(folder: Path) -> set[str]:
    """All of a folder's files of weights, which need not be there yet. Raises CheckpointError."""
    return set(_shards(folder).values()) or {SINGLE}


def needed_files(folder: Path, first_layer: int, end_layer: int, *, has_embed: bool, has_head: bool) -> set[str]:
    """Of those, what a stage with the layers first_layer <= i < end_layer reads, and opening the folder does.

    Raises CheckpointError: config.json or the index is damaged, or of a model that is not supported.
    """
    shards = _shards(folder)
    if not shards:
        return {SINGLE}
    config = read_config(folder)
    module = MODEL["embed"].module
    prefixes = config.family.prefixes
    found = [pair for pair in prefixes if any(name.startswith(f"{pair[0]}{module}.") for name in shards)]
    if not found:
        raise CheckpointError(folder, f"tensor {prefixes[0][0]}{module}.weight", "is missing")
    prefix, head = found[0]
    embed = {file for name, file in shards.items() if name.startswith(f"{prefix}{module}.")}
    tied = config.spec.tied_embeddings
    own_head = {file for name, file in shards.items() if name.startswith(f"{head}.")}
    # A head that is there although config.json says that it is the embedding is compared with it.
    files = embed | own_head if tied and own_head else set()
    if has_embed or (has_head and tied):
        files |= embed
    if has_head:
        norm = f"{prefix}{MODEL['final_norm'].module}."
        files |= own_head | {file for name, file in shards.items() if name.startswith(norm)}
    layers = tuple(f"{prefix}layers.{layer}." for layer in range(first_layer, end_layer))
    return files | {file for name, file in shards.items() if name.startswith(layers)}


def _shards(folder: Path) -> dict[str, str]:
    """What the index says; nothing where there is none, and so one file."""
    if not os.path.lexists(folder / INDEX):
        return {}
    found = Folder(folder)
    found.close()
    return dict(found.shards)
