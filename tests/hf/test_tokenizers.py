"""tokenizer.json encodes like our tokenizers, but for special tokens, and has an end of text."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import ddl.models.tokenizers
from ddl.errors import InputError
from ddl.hf import load, save, to_fast
from ddl.hf.tokenization import FastTokenizer, from_files, load_tokenizer
from ddl.lab.data.prepare import choose_tokenizer
from ddl.models.tokenizers import (
    ByteTokenizer,
    CharTokenizer,
    FileTokenizer,
    GPT2Tokenizer,
    Tokenizer,
    describe,
    encode_prompt,
    restore,
)
from tests.support.hf_cases import byte_pair_files, model, small
from tests.support.prepare_cases import write_tokenizer

TABLE = sorted(set("To be, or not to be?\n\tÄß漢字🙂\u0301\r"))
# Every kind of character: ASCII, control characters, characters that stand for bytes in byte-level
# tokenizers, a special token's text, several Unicode planes.
PIECES = ["a", "The ", " ", "\n", "\r\n", "\0", "\x1f", "\x7f", "é", "e\u0301", "ß", "Ā", "Ċ", "Ġ"]
PIECES += ["漢", "🙂", "\u200b", "\ufffd", "\U0010ffff", "<|endoftext|>", "<0x0A>", "[UNK]", "ﬁ"]


def texts(number: int = 200) -> list[str]:
    choose = random.Random(0)
    return ["", *("".join(choose.choices(PIECES, k=choose.randrange(12))) for _ in range(number))]


def reloaded(fast: Any, directory: Path) -> Any:
    fast.save_pretrained(directory)
    return AutoTokenizer.from_pretrained(directory)


def assert_same(fast: Any, ours: Tokenizer, cases: list[str]) -> None:
    """The tokens are ours, but the name of the end of text is that token."""
    for text in cases:
        pieces = text.split(fast.eos_token) if fast.eos_token else [text]
        tokens = ours.encode(pieces[0])
        for piece in pieces[1:]:
            tokens += [fast.eos_token_id, *ours.encode(piece)]
        assert fast(text)["input_ids"] == tokens, text
        assert fast(text, split_special_tokens=True)["input_ids"] == ours.encode(text), text
        assert fast.decode(tokens) == text
        assert fast.decode(tokens, skip_special_tokens=True) == "".join(pieces)


@pytest.mark.parametrize("vocab_size", [256, 300])
def test_bytes(vocab_size: int, tmp_path: Path) -> None:
    config = small(vocab_size=vocab_size)
    for fast in (to_fast(ByteTokenizer(), config), reloaded(to_fast(ByteTokenizer()), tmp_path)):
        assert_same(fast, ByteTokenizer(), texts())


def test_every_byte_is_its_own_token() -> None:
    fast, ours, choose = to_fast(ByteTokenizer()), ByteTokenizer(), random.Random(0)
    assert len(fast) == 256
    for _ in range(500):  # mostly invalid UTF-8
        tokens = choose.choices(range(255), k=9)  # 255, which UTF-8 lacks, is the end of text
        assert fast.decode(tokens) == ours.decode(tokens)
    assert [fast.decode([byte]) for byte in range(128)] == [chr(byte) for byte in range(128)]


@pytest.mark.parametrize("vocab_size", [len(TABLE), 300])
def test_characters(vocab_size: int, tmp_path: Path) -> None:
    ours, config, choose = CharTokenizer(TABLE), small(vocab_size=vocab_size), random.Random(0)
    cases = ["".join(choose.choices(TABLE, k=choose.randrange(20))) for _ in range(200)]
    for fast in (to_fast(ours, config), reloaded(to_fast(ours, config), tmp_path)):
        assert_same(fast, ours, cases)


def test_characters_that_are_not_in_the_table() -> None:
    with pytest.raises(Exception, match=r"Missing \[UNK\] token"):
        to_fast(CharTokenizer(TABLE))("not x")


@pytest.mark.parametrize("entry", ["bytes?", [1], {"kind": "characters", "table": 3}])
def test_an_entry_that_is_none_of_ours(entry: Any, tmp_path: Path) -> None:
    to_fast(ByteTokenizer()).save_pretrained(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"ddl_tokenizer": entry}))
    with pytest.raises(InputError, match=r"^`tokenizer` must be bytes, gpt2 or characters with a"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("tokenizer", "vocab_size", "end", "token"),
    [
        (ByteTokenizer(), 256, "<|endoftext|>", 255),
        (ByteTokenizer(), 257, "<|endoftext|>", 256),
        (CharTokenizer("ab\nc"), 256, "<|endoftext|>", 4),
    ],
)
def test_end_of_text(
    tokenizer: Tokenizer, vocab_size: int, end: str, token: int, tmp_path: Path
) -> None:
    config = small(vocab_size=vocab_size)
    made = to_fast(tokenizer, config)
    for fast in (made, reloaded(made, tmp_path)):
        assert {fast.bos_token_id, fast.eos_token_id, fast.pad_token_id} == {token}
        assert fast.decode([token]) == end
        assert fast.model_max_length == config.block_size
        assert len(fast) <= vocab_size
        batch = fast(["ab", "b"], padding=True)
        assert batch["input_ids"] == [[*tokenizer.encode("ab")], [token, *tokenizer.encode("b")]]
        assert batch["attention_mask"] == [[1, 1], [0, 1]]
        assert set(batch) == {"input_ids", "attention_mask"}


@pytest.mark.parametrize(("table", "before"), [("ab\nc", 2), ("abc", 0)])
def test_a_full_table_has_no_end_of_text(table: str, before: int, tmp_path: Path) -> None:
    """Each of its characters is text: none may end a generation or be dropped as a marker."""
    made = to_fast(CharTokenizer(table), small(vocab_size=len(table)))
    for fast in (made, reloaded(made, tmp_path)):
        assert (fast.bos_token, fast.eos_token, fast.pad_token) == (None, None, None)
        assert len(fast) == len(table)
        assert fast.init_kwargs["ddl_before_text"] == before
        assert fast.decode(fast(table).input_ids, skip_special_tokens=True) == table


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), CharTokenizer(TABLE)])
def test_there_and_back(tokenizer: Tokenizer, tmp_path: Path) -> None:
    to_fast(tokenizer).save_pretrained(tmp_path / "once")
    AutoTokenizer.from_pretrained(tmp_path / "once").save_pretrained(tmp_path / "twice")
    for directory in ("once", "twice"):
        again = load_tokenizer(tmp_path / directory)
        assert again is not None
        assert type(again.of_training) is type(tokenizer)
        assert again.encode("to be\n") == tokenizer.encode("to be\n")
    assert load_tokenizer(tmp_path) is None


# --- a tokenizer.json -----------------------------------------------------------------------------


def from_file(directory: Path, document_token: int | None = None, **options: Any) -> FileTokenizer:
    file = write_tokenizer(directory / "given.json", **options)
    return FileTokenizer(file.read_text(encoding="utf-8"), document_token)


@pytest.mark.parametrize("vocab_size", [400, 512])
def test_a_file(vocab_size: int, tmp_path: Path) -> None:
    ours, config = from_file(tmp_path, 0), small(vocab_size=vocab_size)
    for fast in (to_fast(ours, config), reloaded(to_fast(ours, config), tmp_path)):
        assert_same(fast, ours, texts())
    again = load_tokenizer(tmp_path)
    assert again is not None
    assert [again.encode(text) for text in texts()] == to_fast(ours)(texts()).input_ids
    trained = again.of_training
    assert [trained.encode(text) for text in texts()] == [ours.encode(text) for text in texts()]
    kept = restore(json.loads(json.dumps(describe(ours))))
    assert describe(kept) == describe(ours)
    assert [kept.encode(text) for text in texts()] == [ours.encode(text) for text in texts()]


def test_settings_of_a_file_that_lose_or_draw_tokens(tmp_path: Path) -> None:
    ours = from_file(tmp_path)
    values = json.loads(ours.text)
    values["model"]["dropout"] = 0.5
    values["truncation"] = {
        "direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0,
    }  # fmt: skip
    values["padding"] = {
        "strategy": {"Fixed": 99}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
        "pad_type_id": 0, "pad_token": "<|endoftext|>",
    }  # fmt: skip
    values["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}],
        "pair": [],
        "special_tokens": {
            "<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}
        },
    }
    Backend.from_str(json.dumps(values))  # they are as the package knows them
    other = FileTokenizer(json.dumps(values))
    assert_same(to_fast(other), ours, texts())
    assert [other.encode(text) for text in texts()] == [ours.encode(text) for text in texts()]


@pytest.mark.parametrize(
    ("known", "document_token", "vocab_size", "end"),
    [
        ("<|endoftext|>", 0, 400, "<|endoftext|>"),
        ("<|endoftext|>", None, 400, "<|endoftext|>"),
        ("<s>", 0, 512, "<s>"),
        (None, None, 401, "<|endoftext|>"),
        (None, None, 400, None),
    ],
)
def test_end_of_text_of_a_file(
    known: str | None, document_token: int | None, vocab_size: int, end: str | None, tmp_path: Path
) -> None:
    ours = from_file(tmp_path, document_token, end=known)
    fast = to_fast(ours, small(vocab_size=vocab_size))
    assert (fast.bos_token, fast.eos_token, fast.pad_token) == (end, end, end)
    assert fast.eos_token_id == (None if end is None else 400 if vocab_size == 401 else 0)
    assert fast.init_kwargs.get("ddl_before_text") == (0 if end is None else None)
    assert len(fast) <= vocab_size


# --- GPT-2's --------------------------------------------------------------------------------------


class Encoding:
    """A stand-in for tiktoken's class with the methods used here: byte pairs over GPT-2's words.

    The ranks are learned here by counting, because GPT-2's would have to be fetched.
    """

    WORD = re.compile(r"'(?:[sdmt]|ll|ve|re)| ?[^\W\d_]+| ?\d+| ?(?:_|[^\s\w])+|\s+(?!\S)|\s+")

    def __init__(self, text: str, merges: int) -> None:
        self.ranks = {bytes([byte]): byte for byte in range(256)}
        words = Counter(tuple(bytes([b]) for b in w.encode()) for w in self.WORD.findall(text))
        for _ in range(merges):
            pairs: Counter[bytes] = Counter()
            for word, number in words.items():
                for i in range(len(word) - 1):
                    pairs[word[i] + word[i + 1]] += number
            best = next(pair for pair, _ in pairs.most_common() if pair not in self.ranks)
            self.ranks[best] = len(self.ranks)
            words = Counter({tuple(self.merge(list(w), best)): n for w, n in words.items()})

    @staticmethod
    def merge(parts: list[bytes], pair: bytes) -> list[bytes]:
        i = 0
        while i < len(parts) - 1:
            if parts[i] + parts[i + 1] == pair:
                parts[i : i + 2] = [pair]
            i += 1
        return parts

    def encode_ordinary(self, text: str) -> list[int]:
        tokens = []
        for word in self.WORD.findall(text):
            parts = [bytes([byte]) for byte in word.encode()]
            while True:
                pairs = {parts[i] + parts[i + 1] for i in range(len(parts) - 1)}
                known = [pair for pair in pairs if pair in self.ranks]
                if not known:
                    break
                best = min(known, key=self.ranks.__getitem__)
                parts = self.merge(parts, best)
            tokens += [self.ranks[part] for part in parts]
        return tokens

    def token_byte_values(self) -> list[bytes]:
        return sorted(self.ranks)

    def encode_single_token(self, piece: bytes) -> int:
        return self.ranks[piece]


TEXT = Path(__file__).read_text(encoding="utf-8")


@pytest.fixture
def encoding(monkeypatch: pytest.MonkeyPatch) -> Encoding:
    """Replace tiktoken's encoding by the stand-in."""
    made = Encoding(TEXT, 150)
    for module in ("ddl.models.tokenizers", "ddl.hf.tokenization"):
        monkeypatch.setattr(f"{module}.gpt2_encoding", lambda: made)
    return made


def test_byte_pairs(encoding: Encoding, tmp_path: Path) -> None:
    ours, config = GPT2Tokenizer(), small(vocab_size=50304)
    cases = [line for line in TEXT.splitlines(keepends=True) if line.isascii()] + texts()
    assert max(len(piece) for piece in encoding.ranks) > 4
    for fast in (to_fast(ours, config), reloaded(to_fast(ours, config), tmp_path)):
        assert_same(fast, ours, cases)
        assert fast.eos_token_id == fast.bos_token_id == fast.pad_token_id == 50256
        assert fast.decode([50256]) == "<|endoftext|>"
        assert fast.decode([50256], skip_special_tokens=True) == ""
    again = load_tokenizer(tmp_path)
    assert again is not None
    assert again.of_training.encode(TEXT) == ours.encode(TEXT)  # without tiktoken
    assert again.decode(again.encode(TEXT)) == TEXT
    assert to_fast(again) is again.fast


def test_byte_pairs_that_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "tiktoken", None)
    with pytest.raises(InputError, match=r"^GPT-2 tokens need the package tiktoken .*: pip"):
        to_fast(GPT2Tokenizer())


def test_byte_pairs_from_files(tmp_path: Path) -> None:
    """GPT-2's files as Hugging Face distributes them: one file, or the two older ones."""
    whole = byte_pair_files(tmp_path / "new")
    backend = Backend.from_file(str(whole / "tokenizer.json"))
    (tmp_path / "old").mkdir()
    backend.model.save(str(tmp_path / "old"))
    backend.encode_special_tokens = True  # encode special tokens in a text as plain text
    for kind in ("old", "new"):
        found = from_files(tmp_path / kind, small(vocab_size=300))
        assert found.of_training.encode(TEXT) == backend.encode(TEXT).ids
        assert found.vocab_size == 300
        assert found.fast.eos_token_id == 0
        assert found.fast.pad_token == "<|endoftext|>"
    sentence = (
        "`tokenizer` must have at most 299 tokens and <|endoftext|> among them, got 300 from "
        f"{tmp_path / 'new'}"
    )
    with pytest.raises(InputError, match=f"^{re.escape(sentence)}$"):
        from_files(tmp_path / "new", small(vocab_size=299))
    (tmp_path / "old" / "vocab.json").write_text("{")
    for damaged in (tmp_path, tmp_path / "old"):
        with pytest.raises(
            InputError, match=r"^`tokenizer` must be a directory with tokenizer.json"
        ):
            from_files(damaged, small())


def test_what_a_tokenizer_directory_says_of_itself(tmp_path: Path) -> None:
    to_fast(CharTokenizer("ab\nc")).save_pretrained(tmp_path)
    entry = json.loads((tmp_path / "tokenizer_config.json").read_text())["ddl_tokenizer"]
    assert entry == ddl.models.tokenizers.describe(CharTokenizer("ab\nc"))


@pytest.mark.parametrize("table", ["ab\n", "ab\n<|endoftx>"], ids=["cannot", "can"])
def test_the_end_of_text_as_a_text(table: str) -> None:
    """It is one token, even if the table cannot spell it: lm-eval encodes it as a stop string."""
    fast = to_fast(CharTokenizer(sorted(set(table))), small(vocab_size=40))
    assert fast("a" + fast.eos_token).input_ids[1:] == [fast.eos_token_id]
    with pytest.raises(
        InputError, match=r"^`text` must consist of the \d+ characters .* got '\?'$"
    ):
        FastTokenizer(fast, CharTokenizer(table)).encode("a<|endoftext|>?")


# --- special and added tokens, chat templates -----------------------------------------------------

ADDED = "<|user|>a<|endoftext|>\n<|mark|>b<|user|>"
TEMPLATE = "{% for m in messages %}<|user|>{{ m.content }}<|endoftext|>{% endfor %}"


@pytest.mark.parametrize("kind", ["bytes", "characters", "file"])
def test_tokens_and_template_that_a_user_adds(kind: str, tmp_path: Path) -> None:
    ours = {"bytes": ByteTokenizer(), "characters": CharTokenizer("ab\n")}
    gpt = model(vocab_size=410)
    save(gpt, ours.get(kind) or from_file(tmp_path), tmp_path / "one")
    fast = AutoTokenizer.from_pretrained(tmp_path / "one")
    size = len(fast)
    fast.add_special_tokens({"additional_special_tokens": ["<|user|>"]})
    fast.add_tokens(["<|mark|>"])
    fast.chat_template = TEMPLATE
    fast.save_pretrained(tmp_path / "one")
    save(*load(tmp_path / "one"), tmp_path / "two")
    save(gpt, fast, tmp_path / "three")
    for directory in ("one", "two", "three"):
        again = AutoTokenizer.from_pretrained(tmp_path / directory)
        read = load(tmp_path / directory)[1]
        assert isinstance(read, FastTokenizer)
        tokens = encode_prompt(ADDED, read)  # as `ddl sample` does
        assert tokens == again(ADDED).input_ids == fast(ADDED).input_ids
        a, b, newline = (fast(c).input_ids[0] for c in "ab\n")
        end, user, mark = fast.eos_token_id, size, size + 1
        assert tokens == [user, a, end, newline, mark, b, user]
        assert read.decode(tokens) == ADDED
        chat = again.apply_chat_template([{"role": "user", "content": "ab"}], return_dict=False)
        assert chat == [user, *fast("ab").input_ids, end]


def test_special_tokens_of_a_file(tmp_path: Path) -> None:
    """They are those of PreTrainedTokenizerFast with the same file."""
    ours = from_file(tmp_path, 0)
    values = json.loads(ours.text)
    token = values["added_tokens"][0]
    for number, special in ((400, True), (401, False)):
        values["added_tokens"].append(
            token | {"id": number, "content": f"<|{number}|>", "special": special}
        )
    (tmp_path / "more.json").write_text(json.dumps(values), encoding="utf-8")
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "more.json"))
    fast = reloaded(to_fast(FileTokenizer(json.dumps(values), 0)), tmp_path / "out")
    text = "the<|400|> <|401|>the<|endoftext|>"
    assert fast(text).input_ids == theirs(text).input_ids
    assert {0, 400, 401} < set(fast(text).input_ids)


@pytest.mark.parametrize("way", ["jinja", "config", "named", "folder"])
def test_a_chat_template_with_a_file(way: str, tmp_path: Path) -> None:
    """It is kept from `ddl prepare`, in the run, and with GPT-2's files, to the export."""
    folder = byte_pair_files(tmp_path / "files")
    named = {"default": TEMPLATE, "tools": "x"}
    if way in ("jinja", "folder"):
        (folder / "chat_template.jinja").write_text(TEMPLATE)
    else:
        listed = [{"name": name, "template": text} for name, text in named.items()]
        config = {"chat_template": TEMPLATE if way == "config" else listed}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if way == "folder":
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "tools.jinja").write_text("x")
    for path in (folder, folder / "tokenizer.json"):
        prepared, _ = choose_tokenizer(str(path), "auto")
        run = restore(json.loads(json.dumps(describe(prepared))))
        for fast in (to_fast(run), from_files(folder, small(vocab_size=300)).fast):
            again = reloaded(fast, tmp_path / "out")
            expected = named if way in ("named", "folder") else TEMPLATE
            assert again.chat_template == expected


def test_a_chat_template_that_cannot_be_read(tmp_path: Path) -> None:
    folder = byte_pair_files(tmp_path / "files")
    (folder / "tokenizer_config.json").write_text("{")
    sentence = f"`tokenizer` must have a readable chat template, got {folder}/tokenizer_config.json"
    with pytest.raises(InputError, match=f"^{re.escape(sentence)}: "):
        choose_tokenizer(str(folder), "auto")


def test_a_description_without_a_template_is_as_before(tmp_path: Path) -> None:
    """Checkpoints and prepared directories hold its checksum."""
    assert set(describe(from_file(tmp_path))) == {"kind", "text", "document_token"}
