"""Text to token ids and back, with the checkpoint's own tokenizer and chat template.

Loading and templates are transformers' work; encoding goes to its `tokenizers` backend directly,
whose calls share no mutable state, so several threads may encode at once.

What special tokens in given text mean:

* In a raw prompt (`encode`) they are special tokens, as the tokenizer reads them by default:
  whoever writes a raw prompt writes the whole format, fill-in-the-middle markers included.
* In chat (`render_chat`) only the template may write them. The same letters inside a message, a
  tool or a template switch stay plain text (see `control_tokens`). Replayed history loses
  nothing: reasoning, tool calls and content come in their own fields, and the template writes
  the markers between them.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from tokenizers import Tokenizer

from headrace_replicas.contract.errors import InvalidRequestError
from headrace_serve.text.chat_template import ChatTemplate
from headrace_serve.text.checkpoint_files import load_tokenizer
from headrace_serve.text.control_tokens import ControlTokens
from headrace_serve.text.token_bytes import (
    DecodeScheme,
    byte_level_bytes,
    scheme_of,
    sentencepiece_bytes,
)


class TextTokenizer:
    """One checkpoint's tokenizer and chat template.

    Attributes:
        special_ids: Control tokens, whose text is never part of an answer.
        longest_token_bytes: No token stands for more bytes than this; by it a text that cannot fit
            is known without encoding it.
        vocab_size: One more than the highest id that stands for something. A model may have
            more logits than this; those ids have no bytes.
        scheme: How the vocabulary spells bytes.
        turn_end_ids: The tokenizer's end of sequence, and the control token that the chat
            template puts right after an answer. Generation must stop at any of them, beside
            those that the checkpoint's configuration names.
    """

    def __init__(self, loaded: Any) -> None:
        backend: Tokenizer = loaded.backend_tokenizer
        # A checkpoint may ship the truncation of its training run; a prompt is never cut.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._template = ChatTemplate(loaded)
        self._bos: str | None = loaded.bos_token
        self.scheme: DecodeScheme = _scheme(backend)
        added = backend.get_added_tokens_decoder()
        self._added = {token_id: token.content for token_id, token in added.items()}
        flagged = {token_id for token_id, token in added.items() if token.special}
        self.special_ids: frozenset[int] = frozenset(flagged.union(loaded.all_special_ids))
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self.vocab_size: int = max(vocabulary.values(), default=-1) + 1
        self.longest_token_bytes = max((len(text.encode()) for text in vocabulary), default=1)
        self._bytes: dict[int, bytes] = {}
        special_texts = [self.token_bytes(token_id).decode() for token_id in self.special_ids]
        self._control = ControlTokens(special_texts)
        self._spelled_out = self._spell_out(special_texts)
        eos = loaded.eos_token_id
        self.turn_end_ids: frozenset[int] = frozenset(
            {*self._first_special(self._template.text_after_answer()), eos} - {None}
        )

    @classmethod
    def from_folder(cls, path: Path) -> Self:
        """Loads the tokenizer of a checkpoint folder, without the network.

        Raises:
            CheckpointError: There is no tokenizer, it does not load, or its chat template does
                not parse. The message names the file.
        """
        loaded = load_tokenizer(path)
        tokenizer = cls(loaded)
        if tokenizer.has_chat_template:
            tokenizer._template.check_syntax()
        return tokenizer

    @property
    def has_chat_template(self) -> bool:
        """Whether this model can chat at all."""
        return self._template.exists

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of a raw prompt.

        Special tokens in the text are recognised, and the tokenizer's own beginning of sequence
        is put before it unless the text begins with it.
        """
        has_bos = self._bos is not None and text.startswith(self._bos)
        return self._ids(text, add_special_tokens=not has_bos)

    def render_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The text that the chat template makes of the messages: to look at, not to tokenize.

        Raises:
            InvalidRequestError: As `render_chat`.
        """
        return self._template.render(list(messages), template_kwargs)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> tuple[int, ...]:
        """Token ids of a conversation and of the opening of its answer.

        Args:
            messages: Normalised messages (see `messages.normalise`).
            template_kwargs: `tools`, `documents`, and the template's own switches such as
                `enable_thinking`. A switch that is not given keeps the template's default.

        Raises:
            InvalidRequestError: There is no template, or it refuses the messages; then the
                message is the template's own.
        """
        given: list[Any] = [list(messages), dict(template_kwargs or {})]
        try:
            marked: Any = self._control.mark(given) if self._control.occur_in(given) else given
        except RecursionError as error:
            raise InvalidRequestError("The messages are nested too deeply.", "messages") from error
        rendered = self._template.render(*marked)
        if marked is given:
            return self._ids(rendered, add_special_tokens=False)
        return self._ids_of_marked(rendered)

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes of one token; none for an id that the vocabulary does not have.

        A character may be spread over several tokens, so these are not always valid UTF-8.
        Added tokens, special ones among them, give their literal text.
        """
        known = self._bytes.get(token_id)
        if known is None:
            known = self._compute_bytes(token_id)
            if known:  # ids without bytes have no bound, so they are not remembered
                self._bytes[token_id] = known
        return known

    def _compute_bytes(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self._backend.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None
        if token is None:
            return b""
        if self.scheme.kind == "byte_level":
            return byte_level_bytes(token)
        if self.scheme.kind == "sentencepiece":
            return sentencepiece_bytes(token, byte_tokens=self.scheme.byte_tokens)
        # Said twice, the second time is how the token reads inside a text.
        once = self._backend.decode([token_id], skip_special_tokens=False)
        twice = self._backend.decode([token_id, token_id], skip_special_tokens=False)
        return (twice.removeprefix(once) if twice.startswith(once) else once).encode()

    def _ids(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        # The batch call lets other threads run meanwhile, which the call for one text does not.
        [encoding] = self._backend.encode_batch_fast(
            [_well_formed(text)], add_special_tokens=add_special_tokens
        )
        return tuple(encoding.ids)

    def _ids_inside(self, text: str) -> tuple[int, ...]:
        """Ids of text that follows other text: SentencePiece adds no space of its own before it."""
        if self.scheme.kind == "sentencepiece":
            newline = self._ids("\n", add_special_tokens=False)
            ids = self._ids("\n" + text, add_special_tokens=False)
            if ids[: len(newline)] == newline:
                return ids[len(newline) :]
        return self._ids(text, add_special_tokens=False)

    def _ids_of_marked(self, rendered: str) -> tuple[int, ...]:
        ids: list[int] = []
        for text, is_plain in self._control.pieces(rendered):
            if is_plain:
                ids.extend(self._plain_ids_of(text))
            else:
                ids.extend(
                    self._ids_inside(text) if ids else self._ids(text, add_special_tokens=False)
                )
        return tuple(ids)

    def _plain_ids_of(self, special_text: str) -> tuple[int, ...]:
        ids = self._spelled_out[special_text]
        if self.special_ids.intersection(ids):
            raise InvalidRequestError(
                f"The messages contain {special_text!r}, a control token of this model that its "
                "tokenizer cannot write as plain text. Take it out.",
                "messages",
            )
        return ids

    def _spell_out(self, special_texts: Iterable[str]) -> dict[str, tuple[int, ...]]:
        """Each control token's text as ordinary tokens.

        Computed once: reading special tokens as text is a switch on the shared backend, which
        must not be turned while somebody encodes.
        """
        self._backend.encode_special_tokens = True
        spelled = {text: self._ids_inside(text) for text in special_texts}
        self._backend.encode_special_tokens = False
        return spelled

    def _first_special(self, text: str) -> frozenset[int]:
        first = self._ids(text, add_special_tokens=False)[:1]
        return self.special_ids.intersection(first)


def _scheme(backend: Tokenizer) -> DecodeScheme:
    decoder = backend.decoder
    return scheme_of(None if decoder is None else json.loads(decoder.__getstate__()))


def _well_formed(text: str) -> str:
    """The text without lone surrogates, which no tokenizer can read.

    Clients that cut strings by UTF-16 units send half of an emoji. Halves that meet again are
    joined; a lone one becomes U+FFFD, as browsers do it.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text
