"""Prompts of a published crash: numbered lines of one pattern, and a request to summarise them.

A server that streamed experts met them at 104 to 873 tokens with a cold page cache; its command
buffers waited for reads, and the GPU's watchdog ended them.
"""

from dataclasses import dataclass

from headrace_serve.text.tokenizer import TextTokenizer

LENGTHS_TOKENS = (104, 213, 433, 653, 873)
_QUESTIONS = (
    "Summarize the list.",
    "Summarise the items.",
    "Please summarize the above.",
    "Please summarise all of this.",
    "Summarize the above in one sentence.",
    "What is this about? Summarise it.",
    "Write a summary.",
)
_LEAD_INS = ("", "Here is a list:\n", "Summarize this:\n", "Read the following list of items:\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemPrompt:
    """One of them.

    Attributes:
        text: What the user says.
        ids: Rendered with the model's chat template.
        items: How many lines it has.
    """

    text: str
    ids: tuple[int, ...]
    items: int

    @property
    def summary(self) -> str:
        """The right answer, in the words that the demo model learned."""
        return (
            f"There are {self.items} items. The first is 1 with 7, the last is {self.items} with "
            f"{self.items * 7}. The rule is: the second number is 7 times the first."
        )


def item_prompts(tokenizer: TextTokenizer) -> tuple[ItemPrompt, ...]:
    """A prompt for each length, as close to it as whole lines and a few questions allow."""
    return tuple(_closest(tokenizer, length) for length in LENGTHS_TOKENS)


def _closest(tokenizer: TextTokenizer, length: int) -> ItemPrompt:
    guess = length // 21
    prompts = [
        _prompt(tokenizer, items, lead_in, question)
        for items in range(max(1, guess - 2), guess + 3)
        for lead_in in _LEAD_INS
        for question in _QUESTIONS
    ]
    return min(prompts, key=lambda prompt: abs(len(prompt.ids) - length))


def _prompt(tokenizer: TextTokenizer, items: int, lead_in: str, question: str) -> ItemPrompt:
    lines = "\n".join(
        f"Item {i}: the quick brown fox number {i} jumps over lazy dog {i * 7}."
        for i in range(1, items + 1)
    )
    text = f"{lead_in}{lines}\n\n{question}"
    ids = tokenizer.render_chat([{"role": "user", "content": text}])
    return ItemPrompt(text=text, ids=ids, items=items)
