"""Rows of the embedding and the head that no token has are never loaded, taken or sampled."""

from __future__ import annotations

import numpy as np
import pytest

from shardline.scheduler import SamplingParams
from shardline.stage import PlanError, open_checkpoint
from shardline.stage.vocabulary import without_padding

VOCAB, TOKENS = 101, 90
PROMPT = (3, 1, 4, 1, 5, 9, 2, 6)


def loud_padding(tensors):
    """Give the padding's rows weights that win every choice: Q8_0 blocks of a large scale."""
    for name in ("token_embd.weight", "output.weight"):
        if name in tensors:
            data, kind = tensors[name]
            data = data.copy()
            blocks = data[TOKENS:].reshape(VOCAB - TOKENS, -1, 34)
            blocks[:, :, :2] = np.array([30], np.float16).view(np.uint8)
            tensors[name] = (data, kind)


@pytest.fixture(params=["tied", "untied"])
def padded(request, tiny_model):
    import gguf

    def edit(tensors):
        if "output.weight" in tensors:
            rng = np.random.default_rng(1)
            values = rng.normal(0, 0.1, (VOCAB, 64)).astype(np.float32)
            kind = gguf.GGMLQuantizationType.Q8_0
            tensors["output.weight"] = (gguf.quantize(values, kind), kind)
        loud_padding(tensors)

    return tiny_model(tied=request.param == "tied", vocab=VOCAB, edit=edit)


@pytest.mark.parametrize("cuts", [(), (1,), (0, 3)])
def test_padding_is_never_sampled(padded, stage_row, cuts):
    def sampled(num_tokens, params):
        row = stage_row(padded, cuts, num_tokens=num_tokens)
        tokens = []
        for index in range(6):
            output = row.run(row.plan({index: PROMPT[index:]}, samples=True, params=params))
            tokens += [token.token_id for token in output.tokens]
        return tokens

    drawn = SamplingParams(temperature=2.0, seed=7)
    assert any(token >= TOKENS for token in sampled(0, SamplingParams(seed=0)))
    assert any(token >= TOKENS for token in sampled(0, drawn))
    for params in (SamplingParams(seed=0), drawn):
        assert all(token < TOKENS for token in sampled(TOKENS, params))


def all_logits(row):
    return row.logits(row.plan({0: PROMPT}))[0]


def test_the_other_logits_stay_what_they_were(padded, stage_row):
    whole = all_logits(stage_row(padded))
    cut = all_logits(stage_row(padded, num_tokens=TOKENS))
    assert whole.shape == (len(PROMPT), VOCAB)
    assert np.array_equal(cut, whole[:, :TOKENS])
    assert np.array_equal(all_logits(stage_row(padded, num_tokens=VOCAB)), whole)


def test_padding_is_not_taken_either(padded, stage_row):
    row = stage_row(padded, num_tokens=TOKENS)
    with pytest.raises(PlanError, match="token"):
        row.run(row.plan({0: (TOKENS,)}))
    row = stage_row(padded, num_tokens=TOKENS)
    with pytest.raises(PlanError, match="logit_bias"):
        row.run(row.plan({0: (TOKENS - 1,)}, params=SamplingParams(seed=0, logit_bias=((TOKENS, 5.0),))))


def test_the_cut_matrices(padded):
    checkpoint = open_checkpoint(padded)
    cut = without_padding(checkpoint, TOKENS)
    assert cut.spec.vocab_size == TOKENS
    for role in ("embed", "head"):
        whole = checkpoint.matrix(role, None)
        assert np.array_equal(cut.matrix(role, None).dequantize(), whole.dequantize()[:TOKENS])
        assert cut.matrix_bytes(role, None) == cut.matrix(role, None).nbytes
    assert np.array_equal(cut.matrix("q", 0).dequantize(), checkpoint.matrix("q", 0).dequantize())
    assert cut.matrix_bytes("q", 0) == checkpoint.matrix_bytes("q", 0)
    assert without_padding(checkpoint, 0) is checkpoint
    checkpoint.close()
