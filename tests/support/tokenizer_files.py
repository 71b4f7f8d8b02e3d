"""Tokenizers of the package tokenizers, of every kind: byte-level, byte fallback, words, …"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, trainers
from tokenizers import pre_tokenizers as pre

END = "<|endoftext|>"


def byte_level(texts: Sequence[str], *, prefix: bool = False, normalizer: Any = None) -> Tokenizer:
    """Byte pairs of which few are merged, so that tokens split characters."""
    made = Tokenizer(models.BPE())
    made.normalizer = normalizer
    made.pre_tokenizer = pre.ByteLevel(add_prefix_space=prefix)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=[END],
        initial_alphabet=pre.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(texts, trainer)
    return made


def byte_fallback() -> Tokenizer:
    """Llama's kind: a space before every text, and bytes for characters that are not known."""
    made = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    made.train_from_iterator(
        ["the cat sat on the mat with a hat"],
        trainers.BpeTrainer(vocab_size=40, special_tokens=["<unk>", END], show_progress=False),
    )
    content, vocabulary = json.loads(made.to_str()), made.get_vocab()
    bytes_ = {f"<0x{byte:02X}>": len(vocabulary) + byte for byte in range(256)}
    content["model"]["vocab"] = vocabulary | bytes_
    return Tokenizer.from_str(json.dumps(content))


def metaspace(texts: Sequence[str]) -> Tokenizer:
    made = Tokenizer(models.Unigram())
    made.pre_tokenizer, made.decoder = pre.Metaspace(), decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=200, unk_token="<unk>", special_tokens=["<unk>", END], show_progress=False
    )
    made.train_from_iterator(texts, trainer)
    return made


def word_pieces(texts: Sequence[str]) -> Tokenizer:
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.pre_tokenizer, made.decoder = pre.WhitespaceSplit(), decoders.WordPiece(cleanup=False)
    trainer = trainers.WordPieceTrainer(
        vocab_size=200, special_tokens=["[UNK]", END], show_progress=False
    )
    made.train_from_iterator(texts, trainer)
    return made


def words(texts: Sequence[str]) -> Tokenizer:
    """Without a decoder, which means spaces between tokens."""
    known = {word: i for i, word in enumerate(sorted({w for t in texts for w in t.split()}))}
    made = Tokenizer(models.WordLevel(known, unk_token="<unk>"))
    made.pre_tokenizer = pre.WhitespaceSplit()
    made.add_special_tokens([END])
    return made


def characters(texts: Sequence[str], *, decoder: Any = None) -> Tokenizer:
    table = sorted({c for text in texts for c in text})
    made = Tokenizer(models.WordLevel({c: i for i, c in enumerate(table)}))
    made.pre_tokenizer, made.decoder = pre.Split(Regex(r"[\s\S]"), "isolated"), decoder
    made.add_tokens([AddedToken("<code>", special=False, normalized=False)])
    made.add_special_tokens([END])
    return made
