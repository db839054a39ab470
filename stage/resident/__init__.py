"""Folders of per-layer shards in the resident format: written by `shardline convert`, read at disk speed."""
