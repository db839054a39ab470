"""SmolLM2 against transformers in float32 on the same weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.peer

LOSSES = Path(__file__).parents[1] / "stage" / "data" / "smollm2_losses.npz"

MAX_KL = 1e-4
CLEAR_GAP = 1e-2


def log_softmax(logits: np.ndarray) -> np.ndarray:
    logits = logits.astype(np.float64)
    logits = logits - logits.max(axis=1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


@pytest.mark.parametrize("prompt", ["short", "long", "scripts", "code"])
def test_logits_at_every_position(prompt, smollm2, transformers_llama, reference_logits, whole_model):
    token_ids = reference_logits.prompts(transformers_llama.vocabulary)[prompt]
    assert len(token_ids) == 600 or prompt != "long"
    expected = log_softmax(transformers_llama.logits(token_ids))
    got = log_softmax(whole_model(smollm2, 640)(token_ids))

    divergence = (np.exp(expected) * (expected - got)).sum(axis=1)
    assert divergence.max() < MAX_KL, divergence.argmax()
    largest = np.sort(expected, axis=1)[:, -2:]
    clear = largest[:, 1] - largest[:, 0] > CLEAR_GAP
    assert clear.mean() > 0.9
    assert np.array_equal(got.argmax(axis=1)[clear], expected.argmax(axis=1)[clear])


@pytest.mark.timeout(1200)
def test_perplexity(smollm2, transformers_llama, whole_model, record_testsuite_property):
    """The help texts that ship with Python, in windows of 1024 tokens that know nothing of each other."""
    from pydoc_data.topics import topics

    window, windows = 1024, 20
    token_ids = transformers_llama.vocabulary.encode("\n".join(topics.values()))[: window * windows]
    assert len(token_ids) == window * windows
    ours = whole_model(smollm2, window)

    def loss(logits: np.ndarray, piece: list[int]) -> float:
        logits = logits[:-1] - logits[:-1].max(axis=1, keepdims=True)
        total = np.log(np.exp(logits).sum(axis=1, dtype=np.float64))
        return float((total - logits[np.arange(len(logits)), piece[1:]]).sum())

    with np.load(LOSSES) as file:
        kept = {tuple(piece): lost for piece, lost in zip(file["token_ids"].tolist(), file["losses"], strict=True)}
    got = expected = 0.0
    for start in range(0, len(token_ids), window):
        piece = token_ids[start : start + window]
        got += loss(ours(piece), piece)
        lost = loss(transformers_llama.logits(piece), piece)
        expected += lost
        # What is kept for the same comparison on a GPU; another Python has another text.
        assert lost == pytest.approx(kept.get(tuple(piece), lost), rel=1e-5)
    count = windows * (window - 1)
    perplexity, reference = np.exp(got / count), np.exp(expected / count)
    record_testsuite_property("perplexity", perplexity)
    record_testsuite_property("reference_perplexity", reference)
    assert perplexity == pytest.approx(reference, rel=1e-3)
