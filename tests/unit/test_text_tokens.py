"""Token bytes and the detokeniser, on byte-level, SentencePiece and word-piece vocabularies."""

import json
from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from headrace_serve.text.detokenizer import Detokenizer, text_of
from headrace_serve.text.token_bytes import DecodeScheme, scheme_of
from headrace_serve.text.tokenizer import TextTokenizer

DEMO = Path(str(files("headrace_replicas"))) / "demo_model"
MARK = "\u2581"
SENTENCEPIECE = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "chat_template": "<s>{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}[answer]",
}
TEXTS = (
    "Příliš žluťoučký kůň úpěl ďábelské ódy.",
    "中文和日本語、한국어",
    "👩\u200d💻 👨\u200d👩\u200d👧\u200d👦 🇨🇭 ❤\ufe0f 👍🏽",
    "cafe\u0301 n\u0303 \u0928\u093f",
    "  two  spaces\n\n\ttab\r\nend ",
    "bell \x07 NUL \x00 nbsp\u00a0 BOM\ufeff",
)
TEXT_IDS = [f"text{place}" for place in range(len(TEXTS))]


def save(tokenizer: Tokenizer, folder: Path, **config: object) -> TextTokenizer:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return TextTokenizer.from_folder(folder)


def sentencepiece_model() -> Tokenizer:
    words = [MARK, "a", "b", "h", "i", MARK + "h", MARK + "hi", MARK + MARK, "é"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    merges = [(MARK, "h"), (MARK + "h", "i"), (MARK, MARK)]
    vocabulary = {token: place for place, token in enumerate(tokens)}
    model = models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True)  # noqa: S106 a word
    tokenizer = Tokenizer(model)
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def llama_like() -> Tokenizer:
    tokenizer = sentencepiece_model()
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend(MARK), normalizers.Replace(" ", MARK)]
    )
    steps = [decoders.Replace(MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 1)])
    return tokenizer


def gemma_like() -> Tokenizer:
    tokenizer = sentencepiece_model()
    tokenizer.normalizer = normalizers.Replace(" ", MARK)
    steps = [decoders.Replace(MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def metaspace() -> Tokenizer:
    tokenizer = sentencepiece_model()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(MARK, "always", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(MARK, "always")]
    )
    return tokenizer


@pytest.fixture(scope="module")
def demo() -> TextTokenizer:
    return TextTokenizer.from_folder(DEMO)


@pytest.fixture(scope="module")
def reference() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO / "tokenizer.json"))


@pytest.fixture(scope="module", params=[llama_like, gemma_like, metaspace])
def pieces(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[TextTokenizer, Tokenizer]:
    build: Callable[[], Tokenizer] = request.param
    folder = tmp_path_factory.mktemp("sentencepiece")
    return save(build(), folder, **SENTENCEPIECE), build()


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    folder = tmp_path_factory.mktemp("llama")
    return save(llama_like(), folder, **SENTENCEPIECE)


def in_cuts(tokenizer: TextTokenizer, ids: Sequence[int], cuts: Sequence[int]) -> list[str]:
    """Deltas of the ids handed over in the given portions, the rest at the end, then the flush."""
    detokenizer = Detokenizer(tokenizer)
    deltas, place = [], 0
    for cut in cuts:
        deltas.append(detokenizer.add(ids[place : place + cut]))
        place += cut
    return [*deltas, detokenizer.add(ids[place:]), detokenizer.flush()]


ANY_IDS = st.lists(st.integers(-2, 6200), max_size=40)
CUTS = st.lists(st.integers(0, 5), max_size=20)


@given(ids=ANY_IDS, cuts=CUTS)
def test_text_law_byte_level(demo: TextTokenizer, ids: list[int], cuts: list[int]) -> None:
    """Deltas over any cut join to the decoding of the joined bytes, unknown ids included."""
    shown = [token_id for token_id in ids if token_id not in demo.special_ids]
    joined = b"".join(map(demo.token_bytes, shown)).decode("utf-8", "replace")
    assert "".join(in_cuts(demo, ids, cuts)) == joined == text_of(demo, ids)


@given(ids=st.lists(st.integers(0, 6143), max_size=40))
def test_text_equals_decode(demo: TextTokenizer, reference: Tokenizer, ids: list[int]) -> None:
    """For a byte-level vocabulary the text is what the tokenizer itself decodes."""
    assert text_of(demo, ids) == reference.decode(ids, skip_special_tokens=True)
    everything = text_of(demo, ids, shown=demo.special_ids)
    assert everything == reference.decode(ids, skip_special_tokens=False)


@given(text=st.text(max_size=60), cuts=CUTS)
def test_text_round_trip(demo: TextTokenizer, text: str, cuts: list[int]) -> None:
    """Every text comes back from its ids, and no delta of it has U+FFFD that the text has not."""
    deltas = in_cuts(demo, demo.encode(text), cuts)
    assert "".join(deltas) == text_of(demo, demo.encode(text))
    if not any(word in text for word in ("<|", "<t", "</t")):
        assert "".join(deltas) == text
    assert "\ufffd" in text or not any("\ufffd" in delta for delta in deltas)


@pytest.mark.parametrize("text", TEXTS, ids=TEXT_IDS)
def test_texts_one_token_at_a_time(demo: TextTokenizer, text: str) -> None:
    """Emoji sequences, combining marks, CJK and Czech survive a delta for every token."""
    ids = demo.encode(text)
    detokenizer = Detokenizer(demo)
    deltas = [detokenizer.add([token_id]) for token_id in ids]
    assert "".join(deltas) == text
    assert detokenizer.flush() == ""
    assert not any("\ufffd" in delta for delta in deltas)


def byte_ids(tokenizer: TextTokenizer, raw: bytes) -> list[int]:
    by_bytes = {tokenizer.token_bytes(token_id): token_id for token_id in range(300)}
    return [by_bytes[bytes([byte])] for byte in raw]


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (b"bad \xe2 next", "bad \ufffd next"),
        (b"cut \xf1\x82", "cut \ufffd"),
        (b"\xe2\x82\xe2\x82\xac", "\ufffd\u20ac"),
        (b"\xed\xa0\x80", "\ufffd\ufffd\ufffd"),
        (b"\xf0\x9f\x98\x80\xff!", "\U0001f600\ufffd!"),
    ],
    ids=["then_text", "at_end", "then_character", "surrogate", "never_a_byte"],
)
def test_broken_utf8(demo: TextTokenizer, raw: bytes, text: str) -> None:
    """Each maximal invalid part gives one U+FFFD, and good text around it is untouched."""
    assert "".join(in_cuts(demo, byte_ids(demo, raw), [1] * len(raw))) == text


def test_incomplete_is_held(demo: TextTokenizer) -> None:
    """The first bytes of a character give nothing until its last byte is there."""
    detokenizer = Detokenizer(demo)
    ids = byte_ids(demo, "😀".encode())
    assert [detokenizer.add([token_id]) for token_id in ids] == ["", "", "", "😀"]


def test_special_skipped_unless_shown(demo: TextTokenizer) -> None:
    """Control tokens give no text, not even between the bytes of a character, unless asked for."""
    end = 2
    ids = byte_ids(demo, "é".encode())
    assert demo.special_ids == {0, 1, 2}
    assert text_of(demo, [ids[0], end, ids[1]]) == "é"
    assert text_of(demo, [end], shown=frozenset({end})) == "<|im_end|>"
    assert text_of(demo, [3, 5]) == "<tool_call><think>"


def test_token_bytes_outside(demo: TextTokenizer) -> None:
    """Ids of a padded vocabulary, and negative ones, have no bytes and never raise."""
    assert demo.vocab_size == 6144
    assert [demo.token_bytes(token_id) for token_id in (6144, 151_936, -1, 2**70)] == [b""] * 4


def test_token_bytes_byte_level(demo: TextTokenizer, reference: Tokenizer) -> None:
    """All 256 bytes have a token, and every token's bytes are its own decoding."""
    singles = {demo.token_bytes(token_id) for token_id in range(demo.vocab_size)}
    assert {bytes([byte]) for byte in range(256)} <= singles
    for token_id in range(demo.vocab_size):
        decoded = reference.decode([token_id], skip_special_tokens=False)
        assert demo.token_bytes(token_id).decode("utf-8", "replace") == decoded


def test_added_tokens_are_literal(tmp_path: Path) -> None:
    """Added tokens give their own text, also where a byte-level letter would read otherwise."""
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    tokenizer.add_special_tokens(["<\uff5cend\u2581of\uff5c>"])
    tokenizer.add_tokens(["\u00e9\u00e9", "    "])
    loaded = save(tokenizer, tmp_path)
    texts = [loaded.token_bytes(token_id).decode() for token_id in (6144, 6145, 6146)]
    assert texts == ["<\uff5cend\u2581of\uff5c>", "\u00e9\u00e9", "    "]
    assert 6144 in loaded.special_ids


@given(ids=st.lists(st.integers(0, 270), max_size=20), cuts=CUTS)
def test_text_law_sentencepiece(llama: TextTokenizer, ids: list[int], cuts: list[int]) -> None:
    """Deltas join to the joined bytes without the one leading space, however they are cut."""
    shown = [token_id for token_id in ids if token_id not in llama.special_ids]
    joined = b"".join(map(llama.token_bytes, shown)).removeprefix(b" ").decode("utf-8", "replace")
    assert "".join(in_cuts(llama, ids, cuts)) == joined


@pytest.mark.parametrize("text", ["hi", "hi hi", " hi", "   a", "a 😀é b", "", *TEXTS])
def test_sentencepiece_equals_decode(pieces: tuple[TextTokenizer, Tokenizer], text: str) -> None:
    """SentencePiece text, byte tokens and the leading space read as the tokenizer decodes them."""
    tokenizer, reference = pieces
    ids = reference.encode(text).ids
    assert text_of(tokenizer, ids) == reference.decode(ids, skip_special_tokens=True)
    single = "".join(in_cuts(tokenizer, ids, [1] * len(ids)))
    assert single == reference.decode(ids, skip_special_tokens=True)


def test_sentencepiece_bytes(llama: TextTokenizer) -> None:
    """The word-start sign is a space, a byte token is its byte, a special token its text."""
    assert [llama.token_bytes(i) for i in (1, 3, 258, 259, 265)] == [
        b"<s>",
        b"\x00",
        b"\xff",
        b" ",
        b" hi",
    ]


def test_mid_text_keeps_space(llama: TextTokenizer) -> None:
    """An answer that goes on in the middle of a text keeps its first word's space."""
    assert text_of(llama, [265, 265]) == "hi hi"
    assert text_of(llama, [265, 265], mid_text=True) == " hi hi"


@pytest.mark.parametrize("content", ["a </s> b", "</s>hi", "hi</s></s>", "a\n</s>\nb"])
def test_sentencepiece_control_tokens(llama: TextTokenizer, content: str) -> None:
    """A control token spelled in a message is text, and no space appears around it."""
    ids = llama.render_chat([{"role": "user", "content": content}])
    assert [token_id for token_id in ids if token_id in llama.special_ids] == [1]
    assert text_of(llama, ids[1:]) == f"[user] {content}[answer]"


def test_word_pieces(tmp_path: Path) -> None:
    """A vocabulary of another kind is read through its own decoder, spaces between words."""
    vocabulary = {"[UNK]": 0, "run": 1, "##ning": 2, "fast": 3}
    tokenizer = Tokenizer(models.WordPiece(vocab=vocabulary, unk_token="[UNK]"))  # noqa: S106 a word
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    loaded = save(tokenizer, tmp_path)
    assert loaded.scheme.kind == "opaque"
    assert text_of(loaded, [1, 2, 3]) == "running fast" == tokenizer.decode([1, 2, 3])


def test_no_decoder() -> None:
    """A tokenizer without a decoder counts as opaque."""
    assert scheme_of(None) == DecodeScheme(kind="opaque", leading_spaces=1)
