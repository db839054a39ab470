"""How a model's makers advise to sample: read from a folder and from a GGUF file, and put beside what a user says."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardline.cluster import GenerationDefaults, TokenizerError
from shardline.cluster.text.folder_files import JsonObject
from shardline.cluster.text.model_text import ModelText
from shardline.scheduler import InvalidParameterError, SamplingParams


def of_json(**entries: Any) -> GenerationDefaults:
    return GenerationDefaults.from_json(JsonObject(Path("model/generation_config.json"), "", entries))


def of_gguf(**entries: Any) -> GenerationDefaults:
    return GenerationDefaults.from_metadata({f"general.sampling.{key}": value for key, value in entries.items()})


ADVICE = of_json(do_sample=True, temperature=0.6, top_k=20, top_p=0.95, min_p=0.0, repetition_penalty=1.05)


class TestReading:
    def test_all_of_it(self) -> None:
        assert GenerationDefaults(0.6, 20, 0.95, 0.0, 1.05, source="generation_config.json") == ADVICE

    @pytest.mark.parametrize(
        ("entries", "temperature"),
        [
            ({}, None),
            ({"top_p": 0.9}, None),
            ({"temperature": 0.6}, 0.6),
            ({"do_sample": True}, 1.0),
            ({"do_sample": True, "temperature": 0.6}, 0.6),
            ({"do_sample": False, "temperature": 0.6}, 0.0),
            ({"do_sample": None, "temperature": None}, None),
        ],
    )
    def test_whether_to_sample(self, entries: dict[str, Any], temperature: float | None) -> None:
        assert of_json(**entries).temperature == temperature

    def test_nothing_said_has_no_source(self) -> None:
        assert of_json(bos_token_id=1, max_length=4096, transformers_version="5.0") == GenerationDefaults()
        assert of_gguf() == GenerationDefaults()

    def test_a_gguf_file(self) -> None:
        said = of_gguf(temp=0.6, top_k=20, top_p=0.95, min_p=0.0, penalty_repeat=1.05, penalty_last_n=64, mirostat=0)
        assert said == GenerationDefaults(0.6, 20, 0.95, 0.0, 1.05, source="general.sampling.*")
        assert of_gguf(top_k=-1).top_k == 0
        assert of_json(top_k=-1).top_k == 0
        assert of_gguf(penalty_repeat=1.2, penalty_last_n=0).repetition_penalty is None

    @pytest.mark.parametrize(
        ("key", "value", "problem"),
        [
            ("temp", -0.1, "is -0.1; it is 0 or more and at most 100"),
            ("temp", float("nan"), "is NaN, not a number"),
            ("temp", 1000.0, "is 1000; it is 0 or more and at most 100"),
            ("temp", "hot", "is 'hot', not a number"),
            ("temp", True, "is true, not a number"),
            ("top_k", 2.5, "is 2.5, not an integer"),
            ("top_p", 0.0, "is 0; it is above 0 and at most 1"),
            ("min_p", 1.5, "is 1.5; it is 0 or more and at most 1"),
            ("penalty_repeat", 0.0, "is 0; it is above 0 and at most 100"),
            ("penalty_last_n", [1], "is a list of 1 entries, not an integer"),
        ],
    )
    def test_damage_in_a_gguf_file_is_named(self, key: str, value: Any, problem: str) -> None:
        with pytest.raises(TokenizerError) as caught:
            of_gguf(**{key: value})
        assert (caught.value.field, caught.value.problem) == (f"general.sampling.{key}", problem)

    @pytest.mark.parametrize("value", [101, 1e29])
    @pytest.mark.parametrize("key", ["temperature", "repetition_penalty"])
    def test_what_no_request_could_have_is_refused_with_the_file(self, key: str, value: float) -> None:
        with pytest.raises(TokenizerError, match=f"generation_config.json: {key}.*at most 100"):
            of_json(**{key: value})

    def test_what_is_not_supported_is_told_once(self, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.WARNING):
            of_json(typical_p=0.9, no_repeat_ngram_size=3, num_beams=4, temperature=0.5)
            of_gguf(xtc_probability=0.5, mirostat=2)
        folder, file = (record.getMessage() for record in caplog.records)
        assert "model/generation_config.json advises typical_p, no_repeat_ngram_size, num_beams, which is not" in folder
        assert "advises general.sampling.mirostat, general.sampling.xtc_probability, which" in file

    def test_what_changes_nothing_is_not_told(self, caplog: pytest.LogCaptureFixture) -> None:
        off = {
            "typical_p": 1.0,
            "num_beams": 1,
            "no_repeat_ngram_size": 0,
            "bad_words_ids": None,
            "guidance_scale": 1.0,
        }
        with caplog.at_level(logging.WARNING):
            of_json(**off, length_penalty=1.3, max_new_tokens=2048, cache_implementation="hybrid")
            of_gguf(xtc_probability=0.0, xtc_threshold=0.1, mirostat_tau=5.0)
        assert not caplog.records


class TestUse:
    def test_alone(self) -> None:
        assert ADVICE.params() == SamplingParams(temperature=0.6, top_k=20, top_p=0.95, repetition_penalty=1.05)
        assert GenerationDefaults().params(max_tokens=3) == SamplingParams(max_tokens=3)

    def test_what_is_given_wins_field_by_field(self) -> None:
        params = ADVICE.params(temperature=1.5, top_k=0, seed=3)
        assert params == SamplingParams(temperature=1.5, top_p=0.95, repetition_penalty=1.05, seed=3)

    def test_greedy_is_greedy_and_nothing_else(self) -> None:
        assert ADVICE.params(temperature=0) == SamplingParams(temperature=0)
        assert ADVICE.params(temperature=0.0, repetition_penalty=1.2) == SamplingParams(repetition_penalty=1.2)
        assert ADVICE.told(temperature=0) == ""

    def test_makers_who_do_not_sample_keep_their_penalty(self) -> None:
        said = of_json(do_sample=False, temperature=0.6, top_p=0.9, repetition_penalty=1.1)
        assert said.params().temperature == 0
        assert said.told() == "repetition penalty 1.1"
        assert said.told(temperature=0.5) == "top-p 0.9, repetition penalty 1.1"

    def test_in_words(self) -> None:
        assert ADVICE.told() == "temperature 0.6, top-k 20, top-p 0.95, repetition penalty 1.05"
        assert ADVICE.told(top_k=20, repetition_penalty=1.0) == "temperature 0.6, top-p 0.95"
        assert of_json(temperature=0.7, top_p=1.0, top_k=0).told() == "temperature 0.7"
        assert of_json(top_p=0.9).told() == "", "greedy takes the likeliest, whatever is filtered"

    def test_a_wrong_value_of_the_users_is_refused(self) -> None:
        with pytest.raises(InvalidParameterError, match="top_p"):
            ADVICE.params(top_p=2.0)


def test_a_gguf_files_text_has_them(smollm2_metadata: Any) -> None:
    metadata = {**smollm2_metadata, "general.sampling.temp": 0.25}
    checkpoint: Any = SimpleNamespace(text_folder=None, spec=SimpleNamespace(vocab_size=49152), metadata=metadata)
    text = ModelText.from_checkpoint(checkpoint)
    assert text.generation_defaults == GenerationDefaults(0.25, source="general.sampling.*")
    text.close()


def test_a_converted_gguf_file_keeps_them() -> None:
    from shardline.cluster.convert import _metadata_json

    kept = json.loads(_metadata_json({"general.sampling.temp": 0.25, "general.name": "x"}, Path("x.gguf")))
    assert kept == {"general.sampling.temp": 0.25}
