"""Patterns over module names match as `re.match` does, and none takes for ever."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardline.stage.huggingface.formats.patterns import Pattern

NAMES = [
    "lm_head",
    "model.embed_tokens",
    "model.layers.0.self_attn.q_proj",
    "model.layers.11.self_attn.k_proj",
    "model.layers.1.mlp.gate",
    "model.layers.1.mlp.gate_proj",
    "model.layers.3.mlp.experts.17.down_proj",
    "model.layers.3.mlp.shared_expert_gate",
    "vision_tower.blocks.2.attn.qkv",
    "",
]


@pytest.mark.parametrize(
    "text",
    [
        ".*lm_head",
        ".*mlp.gate$",
        r".*mlp\.gate$",
        r"model\.layers\.\d+\.self_attn\.(q|k|v)_proj",
        r"^model\.layers\.(0|1|2)\.",
        r"^(?!.*(experts|lm_head)).*$",
        r".*\.(?:down|up)_proj$",
        r"model.layers.[0-9]{2}.*",
        r"model.layers.[0-9]{1,2}\..*",
        r".*layers\.(?P<n>[1-3]|1[0-9])\..*_proj",
        r"[^v].*",
        r"[]v].*",
        r"[\w.]+\bmlp\b",
        r"[a-z_.\d-]+$",
        r".*?proj\Z",
        r"(?=.*gate)model.*(?!gate)",
        r"(model\.)?(layers\.)*",
        r"\D*\S\W",
        r"()",
        r"a{}|.{,3}$",
        r"x{|l{1}m",
        r"(|l)*lm",
    ],
)
def test_matches_as_re_does(text):
    pattern = Pattern(text)
    for name in NAMES:
        assert pattern.matches(name) == (re.match(text, name) is not None), name


def patterns():
    atoms = st.sampled_from(
        ["a", "b", r"\.", ".", "[ab]", "[^a]", r"\d", r"\w", "^", "$", r"\b", r"\B", "(?=a)", "(?!b)"]
    )

    def larger(inner):
        repeat = st.sampled_from(["*", "+", "?", "*?", "{2}", "{1,2}", "{0,}"])
        return (
            st.lists(inner, min_size=1, max_size=4).map("".join)
            | st.lists(inner, min_size=2, max_size=3).map(lambda parts: f"({'|'.join(parts)})")
            | st.tuples(inner, repeat).map(lambda parts: f"(?:{parts[0]}){parts[1]}")
            | inner.map(lambda part: f"(?!{part})")
        )

    return st.recursive(atoms, larger, max_leaves=8)


@settings(max_examples=600, deadline=None)
@given(patterns(), st.text("ab.1", min_size=1, max_size=8))
def test_random_patterns_match_as_re_does(text, name):
    assert Pattern(text).matches(name) == (re.match(text, name) is not None)


@pytest.mark.parametrize(
    "text", ["(a+)+$", "(a|a)*$", "(.*)*x", "(a?){50}a{50}$", ".*.*.*.*.*.*.*.*.*.*x", "(?:(?:a*)*)*b"]
)
def test_patterns_that_re_hangs_on(text):
    assert not Pattern(text).matches("a" * 200 + "!" * 200)


def test_a_pattern_that_takes_too_long_is_refused():
    pattern = Pattern("(?:(?=.*).)*c")
    assert not pattern.matches("a" * 100)
    with pytest.raises(ValueError, match=r"the pattern '.*' on the name 'a+\.\.\.': it takes too long"):
        pattern.matches("a" * 1000)
    with pytest.raises(ValueError, match="a name of 1001 characters"):
        pattern.matches("a" * 1001)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("(", "a parenthesis that nothing closes"),
        ("a)", "a closing parenthesis that nothing opened"),
        ("*a", r"a \* with nothing to repeat"),
        ("a**", "a repetition of a repetition"),
        ("a*+", "possessive repetition is not supported"),
        ("a{2}{3}", "a repetition of a repetition"),
        ("[a", "it ends too early"),
        ("\\", "it ends too early"),
        ("[z-a]", "a range z-a that is the wrong way round"),
        (r"[a-\d]", "a range that ends in a class"),
        (r"(a)\1", r"\\1 is not supported"),
        (r"\p{L}", r"\\p is not supported"),
        ("(?i)a", "this kind of group is not supported"),
        ("(?<=a)b", "this kind of group is not supported"),
        ("(?P<1>a)", "a group without a proper name"),
        ("a{3,2}", "a repetition .3,2. that is not between"),
        ("a{2000}", "not between 0 and 1000"),
        ("(" * 30 + ")" * 30, "groups more than 20 deep"),
        ("a" * 3000, "a pattern of 3000 characters"),
    ],
)
def test_what_is_not_supported_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        Pattern(text)
