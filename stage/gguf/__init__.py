"""GGUF files: header, block formats, families, and the checkpoint made of them."""
