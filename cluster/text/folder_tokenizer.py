"""The tokenizer of a Hugging Face folder, from whichever file it has one in."""

from __future__ import annotations

from pathlib import Path

from shardline.cluster.errors import TokenizerError
from shardline.cluster.text.folder_files import brief
from shardline.cluster.text.folder_marks import FolderMarks
from shardline.cluster.text.json_tokenizer import read_json_tokenizer
from shardline.cluster.text.sentencepiece_tokenizer import read_sentencepiece_tokenizer
from shardline.cluster.text.tokenizer import Tokenizer

_CONVERT = "Save the tokenizer with transformers' save_pretrained, which writes a tokenizer.json, and put that here"
_OTHERS = {
    "tekken.json": "holds Mistral's own format",
    "tiktoken.model": "holds tiktoken's format",
    "vocab.json": "holds a vocabulary without the rules that cut a text into words",
    "vocab.txt": "holds a WordPiece vocabulary",
}
"""Files that a folder may have instead, and what is in them."""


def tokenizer_from_folder(folder: Path, marks: FolderMarks | None = None) -> Tokenizer:
    """The tokenizer of `tokenizer.json`, else of SentencePiece's `tokenizer.model`.

    Args:
        folder: The folder.
        marks: Its small files, if they are read already.

    Raises:
        TokenizerError: Something is missing, damaged or not supported; names the file, the field and the remedy.
    """
    if marks is None:
        marks = FolderMarks.read(folder)
    tokenizer = read_json_tokenizer(folder / "tokenizer.json", marks)
    if tokenizer is None:
        tokenizer = read_sentencepiece_tokenizer(folder / "tokenizer.model", marks)
    if tokenizer is not None:
        return tokenizer
    if marks.config.entries.get("auto_map") is not None:
        raise marks.config.error(
            "auto_map",
            f"is {brief(marks.config.entries['auto_map'])}: the tokenizer is a program in the folder, and programs of a"
            f" model are not run. {_CONVERT}",
        )
    for name, what in _OTHERS.items():
        if (folder / name).is_file():
            raise TokenizerError(str(folder / name), f"{what}, which is not supported. {_CONVERT}")
    raise TokenizerError(str(folder), f"has no tokenizer.json and no tokenizer.model. {_CONVERT}")
