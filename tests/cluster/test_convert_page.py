"""docs/models.md names what the code reads."""

from __future__ import annotations

from pathlib import Path

from shardline.stage.gguf.blocks import SUPPORTED
from shardline.stage.gguf.families import FAMILIES as GGUF_FAMILIES
from shardline.stage.huggingface.families import FAMILIES

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "models.md").read_text(encoding="utf-8")


def test_every_family_is_named():
    rows = [line for line in PAGE.splitlines() if line.startswith("|")]
    for family in FAMILIES:
        assert any(f"`{family}`" in row for row in rows), family
    for family in GGUF_FAMILIES:
        assert any(row.rstrip("| ").endswith(f"`{family}`") for row in rows), family


def test_every_type_of_tensor_is_named():
    words = PAGE.replace(",", " ").replace("|", " ").split()
    for kind in SUPPORTED:
        assert kind.name in words, kind.name
