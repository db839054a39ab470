"""Sampling parameters and configuration: a wrong value is refused where it is built, by name."""

from __future__ import annotations

import dataclasses

import pytest

import shardline.scheduler
from shardline.scheduler import InvalidParameterError, SamplingParams, SchedulerConfig

NAN, INFINITE = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("max_tokens", [0, -1, 1.0, True, "3"]),
        ("temperature", [-0.1, 101, NAN, INFINITE, "1", None, True]),
        ("top_k", [-1, 1.5, None]),
        ("top_p", [0, -0.1, 1.01, NAN]),
        ("min_p", [-0.1, 1.1, NAN]),
        ("repetition_penalty", [0, -1, 101, NAN, INFINITE]),
        ("presence_penalty", [-101, 101, NAN]),
        ("frequency_penalty", [-101, 101, NAN]),
        ("logit_bias", [[(1, 1.0)], {1: 1.0}, ((1,),), ((-1, 1.0),), ((1, NAN),), ((1, 1001.0),), ([1, 1.0],)]),
        ("seed", [-1, 2**64, 1.0]),
        ("logprobs", [-1, 65, True]),
        ("stop", ["end", ("",), (1,), ["end"]]),
        ("stop_token_ids", [[1], (-1,), (1.0,), (2**31,), 5]),
        ("ignore_eos", [1, None, "yes"]),
        ("n", [0, 129, 1.0, None]),
    ],
)
def test_wrong_parameters(field, values):
    for value in values:
        with pytest.raises(InvalidParameterError, match=f"{field}.*not allowed: give") as caught:
            SamplingParams(**{field: value})
        assert caught.value.field.startswith(field)


def test_right_parameters():
    params = SamplingParams(
        max_tokens=1,
        temperature=100,
        top_k=10**6,
        top_p=1,
        min_p=1,
        repetition_penalty=0.5,
        presence_penalty=-2,
        frequency_penalty=2,
        logit_bias=((0, -1000), (2**31 - 1, 1000.0)),
        seed=2**64 - 1,
        logprobs=64,
        stop=("a", "b"),
        stop_token_ids=(0, 1),
        ignore_eos=True,
        n=128,
    )
    assert dataclasses.replace(params) == params
    assert SamplingParams().needs_history is False


@pytest.mark.parametrize(
    "changes", [{"repetition_penalty": 1.1}, {"presence_penalty": 0.1}, {"frequency_penalty": -0.1}]
)
def test_penalties_need_the_tokens_before(changes):
    assert SamplingParams(**changes).needs_history


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("num_blocks", [0, -1, 1.5, True]),
        ("block_size", [0, 4, 7, 12, 100, 8.0]),
        ("max_context", [0]),
        ("depth", [0]),
        ("max_step_tokens", [0]),
        ("prefill_chunk", [0, None]),
        ("max_sequences", [0]),
        ("min_microbatch", [0]),
        ("max_waiting", [0]),
        ("watermark", [-1, 64, 1.5]),
        ("vocab_size", [0]),
        ("priority_span", [0]),
        ("ahead", [1, None]),
    ],
)
def test_wrong_configuration(config, field, values):
    for value in values:
        with pytest.raises(InvalidParameterError, match=field):
            config(**{field: value})


def test_configuration_is_frozen(config):
    with pytest.raises(dataclasses.FrozenInstanceError):
        config().depth = 2
    assert isinstance(config(), SchedulerConfig)


def test_public_names_exist_and_are_sorted():
    names = shardline.scheduler.__all__
    assert names == sorted(names)
    assert all(hasattr(shardline.scheduler, name) for name in names)
