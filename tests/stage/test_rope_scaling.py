"""Rotary scalings against numbers worked out by hand; `tests/peer` compares whole tables with transformers."""

from __future__ import annotations

import math

import pytest

from shardline.stage import rope_scaling


def test_linear_is_exact():
    assert rope_scaling.linear(2.5, 3) == (2.5, 2.5, 2.5)


def test_llama3_between_its_wavelengths():
    """Base 16 over 8 channels: frequencies 1, 1/2, 1/4, 1/8. An original context of 2 pi * 8 turns 8, 4, 2 and 1 times:
    what is above 4 stays, what is below 1 is divided, and 2 lies a third of the way."""
    got = rope_scaling.llama3(16.0, 8, 10.0, 1.0, 4.0, 2 * math.pi * 8)
    assert got == pytest.approx((1.0, 1.0, 1 / (1 / 3 + 2 / 3 / 10), 10.0), rel=1e-11)
    assert got[0] == 1.0


def test_yarn_between_its_channels():
    """Channel c turns 64 / 2^c times in a context of 2 pi * 64 (base 2^8 over 16 channels): 32 times at channel 1, once
    at channel 6. Kept shares fall from 1 to 6 by fifths."""
    got = rope_scaling.yarn(256.0, 16, 4.0, 2 * math.pi * 64, 32.0, 1.0, False)
    shares = (1, 1, 4 / 5, 3 / 5, 2 / 5, 1 / 5, 0, 0)
    assert got == pytest.approx([1 / (share + (1 - share) / 4) for share in shares], rel=1e-11)


def test_yarn_with_whole_ends():
    """Of 24 and 1.5 turns: the channels 1.415 and 5.415 become 1 and 6."""
    context = 2 * math.pi * 64
    whole = rope_scaling.yarn(256.0, 16, 4.0, context, 24.0, 1.5, True)
    assert whole == pytest.approx(rope_scaling.yarn(256.0, 16, 4.0, context, 32.0, 1.0, False), rel=1e-11)
    assert whole != pytest.approx(rope_scaling.yarn(256.0, 16, 4.0, context, 24.0, 1.5, False), rel=1e-3)


def test_yarn_where_no_channel_is_slow():
    """A context in which the slowest channel still turns often scales nothing."""
    assert rope_scaling.yarn(10.0, 8, 4.0, 1 << 20, 32.0, 1.0, True) == (1.0,) * 4


def test_attention_factors():
    assert rope_scaling.yarn_attention_factor(32.0) == pytest.approx(0.1 * math.log(32) + 1, rel=1e-11)
    assert rope_scaling.yarn_attention_factor(32.0, 1.0, 1.0) == 1.0
    assert rope_scaling.yarn_attention_factor(0.5) == 1.0
    expected = (0.1 * 0.7 * math.log(40) + 1) / (0.1 * 0.9 * math.log(40) + 1)
    assert rope_scaling.yarn_attention_factor(40.0, 0.7, 0.9) == pytest.approx(expected, rel=1e-11)
    assert rope_scaling.longrope_attention_factor(32.0, 4096) == pytest.approx(math.sqrt(1 + 5 / 12), rel=1e-11)
    assert rope_scaling.longrope_attention_factor(1.0, 1) == 1.0


def test_factors_keep_forty_bits():
    """So that two math libraries that differ in the last bit of a float64 give the same factors."""
    for factor in (*rope_scaling.yarn(1e6, 128, 4.0, 32768, 32.0, 1.0, True), rope_scaling.yarn_attention_factor(3.0)):
        assert (math.frexp(factor)[0] * 2**40).is_integer()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rope_scaling.linear(0.0, 4), "factor 0.0 is not a finite number above 0"),
        (lambda: rope_scaling.linear(math.nan, 4), "factor nan is not"),
        (
            lambda: rope_scaling.llama3(1e4, 8, 8.0, 4.0, 4.0, 64),
            "high_freq_factor 4.0 is not above low_freq_factor 4.0",
        ),
        (lambda: rope_scaling.llama3(1e4, 8, 8.0, 0.0, 4.0, 64), "above low_freq_factor 0.0 above 0"),
        (lambda: rope_scaling.llama3(1.0, 8, 8.0, 1.0, 4.0, 64), "base 1.0 is not a finite number above 1"),
        (lambda: rope_scaling.llama3(1e4, 8, 8.0, 1.0, 4.0, 0), "original_context 0 is not"),
        (lambda: rope_scaling.yarn(1e4, 8, math.inf, 64, 32.0, 1.0, True), "factor inf is not"),
        (lambda: rope_scaling.yarn(1e4, 8, 4.0, 64, 1.0, 32.0, True), "beta_fast 1.0 is not above beta_slow 32.0"),
        (lambda: rope_scaling.yarn(1.0, 8, 4.0, 64, 32.0, 1.0, True), "base 1.0 is not"),
        (lambda: rope_scaling.longrope_attention_factor(2.0, 1), "original_context 1 is not"),
    ],
)
def test_numbers_that_define_no_scaling_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
