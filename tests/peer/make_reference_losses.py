"""What transformers loses on a text with SmolLM2's weights dequantized to float32: for a perplexity without torch.

Run it with the extra `peer`:

    python tests/peer/make_reference_losses.py MODEL.gguf tests/stage/data/smollm2_losses.npz

The text is Python's own help, in windows of 1024 tokens that know nothing of each other. Kept are its tokens, because
another Python has another text, and the sum of each window's losses in float64.
"""

from __future__ import annotations

import sys
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
from make_reference_logits import TransformersLlama

WINDOW, WINDOWS = 1024, 20


def loss(logits: np.ndarray, token_ids: np.ndarray) -> float:
    """Of predicting each token but the first, summed."""
    logits = logits[:-1].astype(np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    return float((np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(len(logits)), token_ids[1:]]).sum())


def main() -> None:
    """Write the file."""
    model = TransformersLlama(Path(sys.argv[1]))
    token_ids = np.array(model.vocabulary.encode("\n".join(topics.values()))[: WINDOW * WINDOWS], np.uint16)
    windows = token_ids.reshape(WINDOWS, WINDOW)
    losses = np.array([loss(model.logits(window.tolist()), window) for window in windows])
    np.savez_compressed(sys.argv[2], token_ids=windows, losses=losses)


if __name__ == "__main__":
    main()
