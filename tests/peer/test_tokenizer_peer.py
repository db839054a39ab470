"""Our tokenizer and chat template against others: transformers, llama.cpp, sentencepiece and plain Python."""

from __future__ import annotations

import itertools
import random
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import util
from pathlib import Path
from typing import Any

import pytest

from shardline.cluster.text.chat_template import ChatTemplate
from shardline.cluster.text.tokenizer import Tokenizer

pytestmark = pytest.mark.peer

PRE = ("smollm", "qwen2", "llama-bpe", "gpt-2", "default")


def one_of_each_block() -> Iterator[int]:
    """Blocks begin and end at multiples of 16: an assigned character of each 16, or of larger pieces of the long blocks
    of Han, Hangul, Tangut and private use. What is below 0x3000 is taken whole."""
    pieces = [(0x3000, 0x3400, 16), (0x3400, 0xA000, 64), (0xA000, 0xAC00, 16), (0xAC00, 0xD700, 256)]
    pieces += [(0xD700, 0x17000, 16), (0x17000, 0x18B00, 256), (0x18B00, 0x20000, 16), (0x20000, 0x40000, 64)]
    pieces += [(0xE0000, 0xE0200, 16), (0xF0000, 0x110000, 4096)]
    for first, end, size in pieces:
        for start in range(first, end, size):
            points = range(start, start + size)
            assigned = [point for point in points if unicodedata.category(chr(point)) not in ("Cn", "Cs")]
            if assigned:
                yield assigned[start // size * 7 % len(assigned)]


def corpus() -> list[str]:
    """More than 20,000 texts: every character of the Unicode blocks that people write in, some of every other, runs of
    whitespace, digits, look-alikes of special tokens, code, and random mixtures."""
    draw = random.Random(2)
    texts = [
        "Hello, world! It's 2024; we've 12345 things.",
        "DON'T I'LL he'd WE'Ve don\u2019t '\u017fa it'\u017f'S",
        "123 4567 \u0663\u0664\u0665 \u00bd \u00b2 \u2167 1,234.5e-6",
        "\t\tif x:\n\t\t\treturn  None\r\n\r\n\n",
        "<|im_start|>user\nhi<|im_end|> <|im_start <|im_end|>>< |im_end|> <|endoftext|><|endoftext|>",
        "<repo_name><file_sep>x<jupyter_start ><empty_output>",
        "\u00a0nbsp\u3000ideo\u2028ls\x85nel\x0b\x0c\x1c\u200b\u2060\ufeff",
        "$100+\u20ac5<=>^~|`#foo_bar@baz.com https://example.org/a?b=c&d=%20",
        "\u05e9\u05c1\u05b8\u05dc\u05d5\u05b9\u05dd \u05e2\u05d5\u05dc\u05dd",
        "\u0645\u0631\u062d\u0628\u0627 \u0928\u092e\u0938\u094d\u0924\u0947",
        "\U0001f469\u200d\U0001f469\u200d\U0001f467\U0001f3fd \U0001f1e9\U0001f1ea \U0001f3f4\u200d\u2620\ufe0f",
        "e\u0301 \u00e9 \u1e69 s\u0323\u0307 \ud55c \u1112\u1161\u11ab \ufb01 \u212b",
        *(" " * count + "x" for count in range(20)),
        *("a" + "\n" * count + " " * count + "b" for count in range(12)),
        *("7" * count for count in range(1, 12)),
    ]
    everyday = range(1, 0x3000)
    others = range(0x3000, 0x30000, 31)
    tail = range(0xE0000, 0xE0200, 3)
    for code_point in itertools.chain(everyday, others, tail, one_of_each_block()):
        if not 0xD800 <= code_point < 0xE000:
            character = chr(code_point)
            texts.append(f"a{character} {character}{character}1{character}")
    source = Path(__file__).read_text(encoding="utf-8")
    texts += [source[start : start + 97] for start in range(0, len(source), 97)]
    mixture = [
        *" \t\n\r'sSdDlLaA1\u00b2\u00bd.,!<|>_-\u00e9\u0301\u6f22\u05e9\u00a0\u200d\U0001f600",
        "  ",
        "'ll",
        "<|im_end|>",
    ]
    texts += ["".join(draw.choices(mixture, k=draw.randrange(1, 24))) for _ in range(5000)]
    return texts


CORPUS = corpus()
# The peers carry different versions of Unicode; what this Python's version has, all of them have.
ASSIGNED = [text for text in CORPUS if all(unicodedata.category(character) != "Cn" for character in text)]
assert len(ASSIGNED) > 20_000


def differing(
    ours: Callable[[str], Sequence[int]], theirs: Callable[[str], Sequence[int]], texts: Sequence[str]
) -> list[str]:
    return [text for text in texts if list(ours(text)) != list(theirs(text))]


def encoder(tokenizer: Tokenizer) -> Callable[[str], list[int]]:
    return lambda text: tokenizer.encode(text, add_special=False, parse_special=True)


@pytest.fixture(scope="module")
def hf(smollm2: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(smollm2.parent), gguf_file=smollm2.name)


class TestTransformers:
    def test_ids(self, smollm2_metadata: Mapping[str, Any], hf: Any) -> None:
        """transformers reads no pre-tokenizer named smollm from a GGUF file and falls back on GPT-2's. SmolLM2's own
        tokenizer.json takes digits apart first, which is put back here."""
        from tokenizers import pre_tokenizers

        backend = hf.backend_tokenizer
        gpt2 = backend.pre_tokenizer
        backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2])
        try:
            theirs = lambda text: backend.encode(text, add_special_tokens=False).ids  # noqa: E731
            assert differing(encoder(Tokenizer.from_metadata(smollm2_metadata)), theirs, CORPUS) == []
        finally:
            backend.pre_tokenizer = gpt2

    def test_ids_where_digits_do_not_matter(self, smollm2_metadata: Mapping[str, Any], hf: Any) -> None:
        texts = [text for text in CORPUS if not any(character.isnumeric() for character in text)]
        texts += [text.replace("1", "") for text in CORPUS if text.count("1") == 1]
        texts = [text for text in texts if not any(unicodedata.category(character)[0] == "N" for character in text)]
        assert len(texts) > 15_000
        theirs = lambda text: hf(text, add_special_tokens=False)["input_ids"]  # noqa: E731
        assert differing(encoder(Tokenizer.from_metadata(smollm2_metadata)), theirs, texts) == []

    def test_text(self, smollm2_metadata: Mapping[str, Any], hf: Any) -> None:
        tokenizer = Tokenizer.from_metadata(smollm2_metadata)
        draw = random.Random(3)
        for _ in range(3000):
            ids = [draw.randrange(tokenizer.vocab_size) for _ in range(draw.randrange(1, 12))]
            ids += draw.choices(range(20), k=draw.randrange(3))
            for skip in (True, False):
                theirs = hf.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
                assert tokenizer.decode(ids, skip_special=skip) == theirs

    def test_chat(self, smollm2_metadata: Mapping[str, Any], hf: Any) -> None:
        template = ChatTemplate.from_metadata(smollm2_metadata)
        tokenizer = Tokenizer.from_metadata(smollm2_metadata)
        chats = [
            [{"role": "user", "content": "hi"}],
            [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "one\ntwo"}],
            [{"role": r, "content": c} for r, c in zip(["user", "assistant"] * 2, "abcd", strict=True)],
        ]
        for chat in chats:
            for prompt in (True, False):
                text = template.render(chat, prompt)
                assert text == hf.apply_chat_template(chat, tokenize=False, add_generation_prompt=prompt)
                theirs = hf(text, add_special_tokens=False)["input_ids"]
                assert tokenizer.encode(text, add_special=True, parse_special=True) == theirs

    @pytest.mark.parametrize(
        "source",
        [
            "{%- if tools %}{{ '<tools>' }}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}"
            "{%- for m in messages %}\n  {%- if m.role == 'user' %}\n    {{ m.content }}\n  {%- endif %}\n{% endfor %}",
            "{{ bos_token }}{% for m in messages %}{% generation %}{{ m['content'] | trim }}{% endgeneration %}"
            "{% endfor %}",
            "{% set ns = namespace(n=0) %}{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}"
            "{% set ns.n = ns.n + 1 %}{{ loop.index0 ~ '/' ~ loop.length }}{{ '\\n' if not loop.last }}{% endfor %}"
            "{{ ns.n }}",
            "{% for m in messages | rejectattr('role', 'equalto', 'system') %}{{ loop.revindex }}"
            "{{ m | tojson(indent=2) }}{% endfor %}{{ strftime_now('%Y') }}",
            "{% macro turn(m) -%}\n  <{{ m.role }}>\n{%- endmacro %}\n{% for m in messages %}\n{{ turn(m) }}\n"
            "{% endfor %}\n",
            "{{ messages[0]['content'].split(' ')[-1] }}{{ messages[1:] | length }}"
            "{{ messages | map(attribute='role') | join(',') }}{{ 'a\\nb' | indent(3) }}"
            "{{ 'aba' | replace('a', 'c') }}",
        ],
    )
    def test_template_language(self, source: str) -> None:
        from transformers.utils.chat_template_utils import render_jinja_template

        messages = [
            {"role": "system", "content": " be <brief> & \u00e9 "},
            {"role": "user", "content": "hi there\n"},
            {"role": "assistant", "content": "ok"},
        ]
        tools = [{"type": "function", "function": {"name": "f", "parameters": {"x": "<\u00e9>"}}}]
        theirs, _ = render_jinja_template(
            [messages], tools=tools, chat_template=source, bos_token="<s>", eos_token="</s>"
        )
        special = {"bos_token": "<s>", "eos_token": "</s>"}
        assert ChatTemplate(source, special=special).render(messages, False, tools) == theirs[0]


def spelling() -> dict[int, str]:
    printing = [byte for byte in range(256) if 0x21 <= byte < 0x7F or (byte >= 0xA1 and byte != 0xAD)]
    rest = [byte for byte in range(256) if byte not in printing]
    return {byte: chr(byte) for byte in printing} | {byte: chr(256 + index) for index, byte in enumerate(rest)}


SPELLING = spelling()
PAIRS = list(SPELLING.values()) + [left + right for left in SPELLING.values() for right in SPELLING.values()]
"""A vocabulary of every byte and every pair of bytes: two bytes that no pre-tokenizer parts become one token, so that
a difference in where words end shows in the ids, which a trained vocabulary would hide."""
PAIR_MERGES = [f"{left} {right}" for left in SPELLING.values() for right in SPELLING.values()]


def pairs_metadata(pre: str) -> dict[str, Any]:
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": PAIRS,
        "tokenizer.ggml.token_type": [1] * len(PAIRS),
        "tokenizer.ggml.merges": PAIR_MERGES,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 0,
    }


def write_vocabulary(path: Path, metadata: Mapping[str, Any]) -> None:
    """A GGUF file without tensors, for llama.cpp."""
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(64)
    writer.add_block_count(1)
    writer.add_feed_forward_length(64)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    for key, value in metadata.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        else:
            writer.add_uint32(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def llama_cpp_encoder(tmp_path: Path) -> Iterator[Callable[[Mapping[str, Any]], Callable[[str], list[int]]]]:
    llama_cpp = pytest.importorskip("llama_cpp", reason="needs llama-cpp-python")
    opened: list[Any] = []

    def make(metadata: Mapping[str, Any]) -> Callable[[str], list[int]]:
        path = tmp_path / f"vocabulary-{len(opened)}.gguf"
        write_vocabulary(path, {key: value for key, value in metadata.items() if key.startswith("tokenizer.ggml.")})
        model = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
        opened.append(model)
        return lambda text: model.tokenize(text.encode(), add_bos=False, special=True)

    yield make
    for model in opened:
        model.close()


Encoders = Callable[[Mapping[str, Any]], Callable[[str], list[int]]]


class TestLlamaCpp:
    @pytest.mark.parametrize("pre", PRE)
    @pytest.mark.parametrize("vocabulary", ["smollm2", "pairs"])
    def test_byte_level(
        self, pre: str, vocabulary: str, smollm2_metadata: Mapping[str, Any], llama_cpp_encoder: Encoders
    ) -> None:
        metadata = pairs_metadata(pre) if vocabulary == "pairs" else {**smollm2_metadata, "tokenizer.ggml.pre": pre}
        ours = encoder(Tokenizer.from_metadata(metadata))
        theirs = llama_cpp_encoder(metadata)
        if pre == "qwen2":
            # Qwen2's own tokenizer composes its text first; llama.cpp leaves that out.
            theirs = composed(theirs)
        assert differing(ours, theirs, ASSIGNED) == []

    def test_scored(self, trained: Mapping[str, Any], llama_cpp_encoder: Encoders) -> None:
        ours = encoder(Tokenizer.from_metadata(trained))
        assert differing(ours, llama_cpp_encoder(trained), CORPUS) == []


class TestSentencePiece:
    def test_ids_and_text(self, trained: Mapping[str, Any], sentencepiece_model: Any) -> None:
        tokenizer = Tokenizer.from_metadata(trained)
        # Control tokens are none of sentencepiece's business: it never reads them from a text.
        ours = lambda text: tokenizer.encode(text, add_special=False, parse_special=False)  # noqa: E731
        assert differing(ours, sentencepiece_model.encode, CORPUS) == []
        for text in CORPUS:
            ids = ours(text)
            # The sign that stands for a space inside cannot be told from one.
            assert tokenizer.decode(ids) == text.replace("\u2581", " ") == sentencepiece_model.decode(ids)
            assert tokenizer.encode(text, add_special=True, parse_special=False) == [tokenizer.bos_id, *ids]


def composed(encode: Callable[[str], list[int]]) -> Callable[[str], list[int]]:
    return lambda text: encode(unicodedata.normalize("NFC", text))


def sentencepiece_metadata(model: Any) -> dict[str, Any]:
    ids = range(model.vocab_size())
    kinds = [(model.is_unknown, 2), (model.is_control, 3), (model.is_unused, 5), (model.is_byte, 6)]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [model.id_to_piece(i) for i in ids],
        "tokenizer.ggml.scores": [model.get_score(i) for i in ids],
        "tokenizer.ggml.token_type": [next((kind for test, kind in kinds if test(i)), 1) for i in ids],
        "tokenizer.ggml.bos_token_id": model.bos_id(),
        "tokenizer.ggml.eos_token_id": model.eos_id(),
        "tokenizer.ggml.unknown_token_id": model.unk_id(),
    }


@pytest.fixture(scope="module", params=["trained here", "Mistral's"])
def sentencepiece_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model of the kind that Llama 2 and Mistral have: BPE with scores and byte fallback."""
    sentencepiece = pytest.importorskip("sentencepiece", reason="needs sentencepiece")
    if request.param == "Mistral's":
        package = util.find_spec("mistral_common")
        if package is None or not package.submodule_search_locations:
            pytest.skip("needs mistral-common, which carries a vocabulary")
        return sentencepiece.SentencePieceProcessor(
            str(Path(package.submodule_search_locations[0]) / "data" / "tokenizer.model.v1")
        )
    from pydoc_data.topics import topics

    folder = tmp_path_factory.mktemp("sentencepiece")
    text = folder / "text"
    text.write_text("\n".join([*topics.values(), *CORPUS[:3000]]).replace("\0", ""), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(text),
        model_prefix=str(folder / "trained"),
        model_type="bpe",
        vocab_size=4000,
        byte_fallback=True,
        character_coverage=0.99,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(str(folder / "trained.model"))


@pytest.fixture(scope="module")
def trained(sentencepiece_model: Any) -> dict[str, Any]:
    return sentencepiece_metadata(sentencepiece_model)
