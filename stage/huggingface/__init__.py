"""Hugging Face folders: safetensors files, a config.json, and the integer formats that they come in."""
