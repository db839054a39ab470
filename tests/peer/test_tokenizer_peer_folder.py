"""Tokenizers and templates of Hugging Face folders, against transformers, tokenizers and sentencepiece."""

from __future__ import annotations

import importlib.util
import json
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from pydoc_data.topics import topics
from types import ModuleType
from typing import Any

import pytest

from shardline.cluster.text.detokenizer import Detokenizer
from shardline.cluster.text.folder_marks import FolderMarks
from shardline.cluster.text.folder_template import template_from_folder
from shardline.cluster.text.model_text import ModelText
from shardline.cluster.text.tokenizer import Tokenizer

pytestmark = pytest.mark.peer


def _sibling(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CORPUS: list[str] = _sibling("test_tokenizer_peer").CORPUS

SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|endoftext|>"]
PLAIN = ["<tool>", "<repo_name>", "a b"]


def mixtures() -> list[str]:
    """What is likely to go wrong, mixed at random."""
    draw = random.Random(7)
    parts = [
        *SPECIAL,
        *PLAIN,
        " ",
        "  ",
        "\u2581",
        "\u2581\u2581",
        "\n\n",
        "\t",
        "<0x41>",
        "<x>",
        "ab",
        "the ",
        "T",
        "\xdf",
    ]
    parts += [
        "\ufb01",
        "\xe9",
        "e\u0301",
        "\uff76\uff9e",
        "\u212b",
        "\u3000",
        "\u6f22",
        "\u0301",
        "\xa0",
        "1",
        "23",
        "'ll",
        "7",
    ]
    parts += [
        "\U0001f469\u200d\U0001f469\u200d\U0001f467",
        "\U0001f1e9\U0001f1ea",
        "<unk>",
        "<|im_end",
        "|>",
        "\0",
        "\ufffd",
    ]
    return ["".join(draw.choices(parts, k=draw.randrange(1, 20))) for _ in range(4000)]


TEXTS = [*CORPUS, *mixtures(), "", " ", "\u2581"]

# Special tokens are written in no text that a vocabulary is trained on.
TRAINING = [text for text in CORPUS[::7] if "|>" not in text and "<|" not in text]

GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
UPPER, LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
CONTRACTED = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
O200K = "|".join(
    [
        rf"[^\r\n\p{{L}}\p{{N}}]?[{UPPER}]*[{LOWER}]+{CONTRACTED}",
        rf"[^\r\n\p{{L}}\p{{N}}]?[{UPPER}]+[{LOWER}]*{CONTRACTED}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)


def byte_level(pattern: str | None, *, nfc: bool = False, ignore_merges: bool = False) -> Any:
    """A byte-level BPE tokenizer, trained on the spot."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    if nfc:
        tokenizer.normalizer = normalizers.NFC()
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    if pattern is None:
        tokenizer.pre_tokenizer = bytes_only
    else:
        split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_only])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=3000, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([*topics.values(), *TRAINING], trainer)
    return tokenizer


def byte_fallback(kind: str) -> Any:
    """BPE with bytes for unknown characters: as Llama 2's older and newer files have it, and as Gemma's."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    replaced = normalizers.Replace(" ", "\u2581")
    if kind == "prepend":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), replaced])
    elif kind == "gemma":
        tokenizer.normalizer = replaced
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=kind, split=False)
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    if kind != "gemma":
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    reserved = ["<unk>", *SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(
        vocab_size=3000, special_tokens=reserved, limit_alphabet=400, show_progress=False, max_token_length=16
    )
    # Short lines, for one without spaces between words is one word to a trainer.
    lines = [line[:60] for text in topics.values() for line in text.splitlines()][:6000]
    tokenizer.train_from_iterator([*lines, *TRAINING], trainer)
    # The trainer makes the bytes special tokens, which they are in no model.
    document = json.loads(tokenizer.to_str())
    document["added_tokens"] = [token for token in document["added_tokens"] if not token["content"].startswith("<0x")]
    return Tokenizer.from_str(json.dumps(document))


def unigram() -> Any:
    """As T5 has it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=2000, unk_token="<unk>", special_tokens=["<unk>", *SPECIAL], show_progress=False
    )
    tokenizer.train_from_iterator([text[:2000] for text in topics.values()], trainer)
    return tokenizer


KINDS: Mapping[str, Callable[[], Any]] = {
    "gpt2": lambda: byte_level(None),
    "qwen2": lambda: byte_level(QWEN2, nfc=True),
    "llama3": lambda: byte_level(LLAMA3, ignore_merges=True),
    "o200k": lambda: byte_level(O200K),
    "llama2-legacy": lambda: byte_fallback("prepend"),
    "llama2": lambda: byte_fallback("first"),
    "metaspace-always": lambda: byte_fallback("always"),
    "gemma": lambda: byte_fallback("gemma"),
    "unigram": unigram,
}

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as transformers writes it."""
    from tokenizers import AddedToken, processors
    from transformers import PreTrainedTokenizerFast

    tokenizer = KINDS[request.param]()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.add_special_tokens(
        [AddedToken("<|pad|>", rstrip=True, lstrip=True), AddedToken("<mask>", single_word=True)]
    )
    tokenizer.add_tokens([AddedToken(content, normalized=content != "<tool>") for content in PLAIN])
    bos = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", bos)]
    )
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<|pad|>", chat_template=TEMPLATE
    )
    path = tmp_path_factory.mktemp(request.param)
    theirs.save_pretrained(str(path))
    (path / "config.json").write_text(json.dumps({"model_type": "gpt_neox", "eos_token_id": bos}))
    return path


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder))


@pytest.fixture(scope="module")
def ours(folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(folder)


def differing(ours: Sequence[object], theirs: Sequence[object], texts: Sequence[object] = TEXTS) -> list[object]:
    assert len(ours) == len(theirs) == len(texts)
    return [case for case in zip(texts, ours, theirs, strict=True) if case[1] != case[2]][:5]


class TestJson:
    def test_ids_and_text(self, ours: Tokenizer, theirs: Any) -> None:
        expected = theirs(TEXTS, add_special_tokens=False)["input_ids"]
        found = [ours.encode(text, add_special=False, parse_special=True) for text in TEXTS]
        assert differing(found, expected) == []
        for skip in (True, False):
            texts = theirs.batch_decode(expected, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert differing([ours.decode(ids, skip_special=skip) for ids in found], texts) == []

    def test_plain_text_holds_no_special_tokens(self, ours: Tokenizer, theirs: Any) -> None:
        texts = [text for text in TEXTS[::3] if "<unk>" not in text]
        special = {i for i in range(ours.vocab_size) if ours.is_special(i) and ours.token_text(i) != "<unk>"}
        found = [ours.encode(text, add_special=False, parse_special=False) for text in texts]
        assert not any(special & set(ids) for ids in found)
        expected = theirs(texts, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        # transformers lets the model's own vocabulary make special tokens of text all the same.
        pairs = [case for case in zip(texts, found, expected, strict=True) if not special & set(case[2])]
        assert len(pairs) > 0.8 * len(texts)
        assert [case for case in pairs if case[1] != case[2]][:5] == []

    def test_begin_token_once(self, ours: Tokenizer, theirs: Any) -> None:
        texts = [text for text in TEXTS[::20] if not text.startswith("<s>")]
        found = [ours.encode(text, add_special=True, parse_special=True) for text in texts]
        assert differing(found, theirs(texts)["input_ids"], texts) == []
        once = ours.encode("<s>" + texts[0], add_special=True, parse_special=True)
        assert once == theirs("<s>" + texts[0], add_special_tokens=False)["input_ids"]

    def test_any_ids(self, ours: Tokenizer, theirs: Any) -> None:
        """What a model may say: ids at random, so that characters break.

        transformers writes one U+FFFD for each byte of a run of byte tokens that is no UTF-8 as a whole, its good
        characters included; no such runs are made here.
        """
        draw = random.Random(3)
        assert ours.vocab_size == len(theirs)
        special = sorted({*theirs.all_special_ids, *range(8)})
        sequences = [
            [
                *draw.choices(range(ours.vocab_size), k=draw.randrange(1, 12)),
                *draw.choices(special, k=draw.randrange(3)),
            ]
            for _ in range(4000)
        ]
        for sequence in sequences:
            draw.shuffle(sequence)
        by_bytes = [ours.token_text(i).startswith("<0x") for i in range(ours.vocab_size)]
        if any(by_bytes):
            sequences = [
                [i for i in ids if not by_bytes[i] or int(ours.token_text(i)[3:5], 16) < 128] for ids in sequences
            ]
        for skip in (True, False):
            texts = theirs.batch_decode(sequences, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert differing([ours.decode(ids, skip_special=skip) for ids in sequences], texts, sequences) == []
            for ids, text in zip(sequences, texts, strict=True):
                stream = Detokenizer(ours, skip_special=skip)
                assert "".join(stream.feed([token_id]) for token_id in ids) + stream.finish() == text

    def test_chat(self, folder: Path, ours: Tokenizer, theirs: Any) -> None:
        template = template_from_folder(folder, FolderMarks.read(folder))
        for text in ("hi", " two  spaces ", "<s>", "\u6f22\U0001f600", *TEXTS[:200]):
            chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}]
            rendered = template.render(chat)
            assert rendered == theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
            ids = ours.encode(rendered, add_special=False, parse_special=True)
            assert ids == theirs.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)

    def test_special_tokens(self, folder: Path, ours: Tokenizer, theirs: Any) -> None:
        assert ours.bos_id == theirs.bos_token_id
        assert ours.eos_ids == {theirs.eos_token_id, theirs.bos_token_id}
        assert {i for i in range(ours.vocab_size) if ours.is_special(i)} >= set(theirs.all_special_ids)
        assert ModelText.from_folder(folder, len(theirs)).num_ids == len(theirs)


@pytest.fixture(scope="module")
def bare_json() -> str:
    """A tokenizer.json without any added token."""
    return byte_level(QWEN2).to_str()


@pytest.fixture
def bare(bare_json: str, tmp_path: Path) -> Path:
    """A folder with no more than that."""
    (tmp_path / "tokenizer.json").write_text(bare_json)
    (tmp_path / "config.json").write_text('{"model_type": "gpt_neox"}')
    return tmp_path


class TestSmallFiles:
    """Folders whose tokens are spread over several files."""

    def check(self, path: Path) -> Tokenizer:
        from transformers import AutoTokenizer

        theirs = AutoTokenizer.from_pretrained(str(path))
        ours = Tokenizer.from_folder(path)
        texts = TEXTS[::6]
        expected = theirs(texts, add_special_tokens=False)["input_ids"]
        assert differing([ours.encode(t, add_special=False, parse_special=True) for t in texts], expected, texts) == []
        for skip in (True, False):
            found = [ours.decode(ids, skip_special=skip) for ids in expected]
            assert differing(found, theirs.batch_decode(expected, skip_special_tokens=skip), texts) == []
        assert ours.vocab_size == len(theirs)
        assert (ours.bos_id, ours.eos_ids) == (theirs.bos_token_id, {theirs.eos_token_id})
        return ours

    def test_added_tokens_decoder(self, bare: Path) -> None:
        flags = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False, "special": True}
        tokens = {
            3000: {**flags, "content": "<s>"},
            3001: {**flags, "content": "</s>", "rstrip": True},
            3002: {**flags, "content": "<|im_start|>", "lstrip": True},
            3003: {**flags, "content": "<|im_end|>"},
            3004: {**flags, "content": "<tool>", "special": False, "single_word": True},
            3005: {**flags, "content": "a b", "special": False, "normalized": True},
        }
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "added_tokens_decoder": {str(i): token for i, token in tokens.items()},
            "bos_token": {"__type": "AddedToken", **flags, "content": "<s>"},
            "eos_token": "</s>",
            "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        }
        (bare / "tokenizer_config.json").write_text(json.dumps(config))
        ours = self.check(bare)
        assert [ours.is_special(i) for i in range(3000, 3006)] == [True] * 4 + [False] * 2

    def test_files_from_before_it(self, bare: Path) -> None:
        (bare / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "x"}')
        special = {"bos_token": {"content": "<s>", "lstrip": True}, "eos_token": "</s>", "pad_token": "</s>"}
        (bare / "special_tokens_map.json").write_text(json.dumps(special))
        added = {"<s>": 3000, "</s>": 3001, "<|im_end|>": 3002, "<tool>": 3003, "a b": 3004}
        (bare / "added_tokens.json").write_text(json.dumps(added))
        ours = self.check(bare)
        assert [ours.is_special(i) for i in range(3000, 3005)] == [True, True, False, False, False]


SENTENCEPIECE: Mapping[str, Mapping[str, Any]] = {
    "llama": {"model_type": "bpe", "normalization_rule_name": "identity", "remove_extra_whitespaces": False},
    "gemma": {
        "model_type": "bpe",
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "add_dummy_prefix": False,
        "user_defined_symbols": ["\u2581\u2581", "\u2581\u2581\u2581", "\n\n", "\t", "<x>", "ab"],
    },
    "bpe-nfkc": {
        "model_type": "bpe",
        "normalization_rule_name": "nmt_nfkc",
        "byte_fallback": False,
        "user_defined_symbols": ["<x>", "\ufb01", "the  T"],
    },
    "unigram": {"model_type": "unigram", "normalization_rule_name": "identity", "remove_extra_whitespaces": False},
    "unigram-nfkc": {
        "model_type": "unigram",
        "normalization_rule_name": "nmt_nfkc",
        "byte_fallback": False,
        "user_defined_symbols": ["<x>", "ab", "the "],
        "control_symbols": ["<|im_end|>"],
    },
    "unigram-cased": {"model_type": "unigram", "normalization_rule_name": "nmt_nfkc_cf", "add_dummy_prefix": False},
    "unigram-spaces": {
        "model_type": "unigram",
        "normalization_rule_name": "nfkc",
        "remove_extra_whitespaces": False,
        "allow_whitespace_only_pieces": True,
    },
}


@pytest.fixture(scope="module", params=SENTENCEPIECE)
def sentencepiece_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with nothing but a tokenizer.model, trained on the spot."""
    import sentencepiece

    path = tmp_path_factory.mktemp(request.param)
    training = path / "training"
    training.write_text("\n".join([*topics.values(), *TRAINING]).replace("\0", ""), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        **{"byte_fallback": True, "character_coverage": 0.99, "vocab_size": 3000, **SENTENCEPIECE[request.param]},
        input=str(training),
        model_prefix=str(path / "tokenizer"),
        num_threads=1,
        minloglevel=2,
    )
    return path


class TestSentencePiece:
    def test_ids_and_text(self, sentencepiece_folder: Path) -> None:
        import sentencepiece

        theirs = sentencepiece.SentencePieceProcessor(str(sentencepiece_folder / "tokenizer.model"))
        ours = Tokenizer.from_folder(sentencepiece_folder)
        expected = theirs.encode(TEXTS)
        # Control tokens are none of sentencepiece's business: it never reads them from a text.
        found = [ours.encode(text, add_special=False, parse_special=False) for text in TEXTS]
        assert differing(found, expected) == []
        known = [ids for ids in found if theirs.unk_id() not in ids]
        assert len(known) > 8000
        assert differing([ours.decode(ids) for ids in known], theirs.decode(known), known) == []

    def test_any_ids(self, sentencepiece_folder: Path) -> None:
        """Without bytes from the middle of characters, of which sentencepiece makes other numbers of U+FFFD."""
        import sentencepiece

        theirs = sentencepiece.SentencePieceProcessor(str(sentencepiece_folder / "tokenizer.model"))
        ours = Tokenizer.from_folder(sentencepiece_folder)
        as_bytes = {i: int(theirs.id_to_piece(i)[3:5], 16) for i in range(ours.vocab_size) if theirs.is_byte(i)}
        # A space that is a byte stays at a text's beginning there; here, as in transformers, none does.
        usable = [i for i in range(ours.vocab_size) if i != theirs.unk_id() and 32 != as_bytes.get(i, 0) < 128]
        draw = random.Random(4)
        sequences = [draw.choices(usable, k=draw.randrange(1, 12)) for _ in range(3000)]
        texts = theirs.decode(sequences)
        assert differing([ours.decode(ids) for ids in sequences], texts, sequences) == []
        for ids, text in zip(sequences, texts, strict=True):
            stream = Detokenizer(ours)
            assert "".join(stream.feed([token_id]) for token_id in ids) + stream.finish() == text

    @pytest.mark.parametrize("sentencepiece_folder", ["llama"], indirect=True)
    def test_chat_tokens_as_transformers_has_them(self, sentencepiece_folder: Path) -> None:
        from transformers import AutoTokenizer

        added = {0: "<unk>", 1: "<s>", 2: "</s>", 3000: "<|im_start|>", 3001: "<|im_end|>", 3002: "<tool>"}
        flags = {"lstrip": False, "single_word": False, "normalized": False}
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "legacy": True,
            "add_bos_token": True,
            "bos_token": "<s>",
            "eos_token": "</s>",
            "unk_token": "<unk>",
            "added_tokens_decoder": {
                str(i): {**flags, "content": content, "special": content != "<tool>", "rstrip": content == "<|im_end|>"}
                for i, content in added.items()
            },
        }
        (sentencepiece_folder / "tokenizer_config.json").write_text(json.dumps(config))
        (sentencepiece_folder / "config.json").write_text('{"model_type": "gpt_neox"}')
        theirs = AutoTokenizer.from_pretrained(str(sentencepiece_folder))
        ours = Tokenizer.from_folder(sentencepiece_folder)
        texts = [text for text in TEXTS[::4] if not text.startswith("<s>")]
        expected = theirs(texts)["input_ids"]
        assert differing([ours.encode(t, add_special=True, parse_special=True) for t in texts], expected, texts) == []
        for skip in (True, False):
            found = [ours.decode(ids, skip_special=skip) for ids in expected]
            assert differing(found, theirs.batch_decode(expected, skip_special_tokens=skip), texts) == []
        assert (ours.bos_id, ours.eos_ids) == (1, {2})


REAL = [
    ("mistral_common", "data/tokenizer.model.v1"),
    ("mistral_common", "data/mistral_instruct_tokenizer_240323.model.v3"),
    ("litellm", "litellm_core_utils/tokenizers/deepseek_tokenizer.json"),
    ("litellm", "litellm_core_utils/tokenizers/anthropic_tokenizer.json"),
]


@pytest.mark.parametrize(("package", "name"), REAL)
def test_a_real_vocabulary(tmp_path: Path, package: str, name: str) -> None:
    """Of the packages that carry one."""
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        pytest.skip(f"needs {package}, which carries a vocabulary")
    source = Path(found.submodule_search_locations[0]) / name
    if source.suffix == ".json":
        from tokenizers import Tokenizer as Library

        (tmp_path / "tokenizer.json").symlink_to(source)
        library = Library.from_file(str(source))
        expected = [encoding.ids for encoding in library.encode_batch(TEXTS, add_special_tokens=False)]
        decode = library.decode_batch
    else:
        import sentencepiece

        (tmp_path / "tokenizer.model").symlink_to(source)
        processor = sentencepiece.SentencePieceProcessor(str(source))
        expected, decode = processor.encode(TEXTS), processor.decode
    ours = Tokenizer.from_folder(tmp_path)
    parse = source.suffix == ".json"
    assert differing([ours.encode(t, add_special=False, parse_special=parse) for t in TEXTS], expected) == []
    draw = random.Random(6)
    # Without sentencepiece's unknown token, which has a sign of its own there, and its bytes: see above.
    ids = range(259, ours.vocab_size)
    sequences = expected[::5] + [draw.choices(ids, k=draw.randrange(1, 10)) for _ in range(2000)]
    assert differing([ours.decode(ids) for ids in sequences], decode(sequences), sequences) == []
