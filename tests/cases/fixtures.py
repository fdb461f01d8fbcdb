"""The tiny checkpoints that request files name as their `fixture`."""

from collections.abc import Mapping
from dataclasses import dataclass

from tests.support.checkpoints import TemplateName


@dataclass(frozen=True, slots=True, kw_only=True)
class Fixture:
    """How a tiny checkpoint is made.

    Attributes:
        template: Its chat template, by the name in `tests.support.checkpoints`.
        breaks: What is broken in it, by the names there.
    """

    template: TemplateName = "plain"
    breaks: tuple[str, ...] = ()


FIXTURES: Mapping[str, Fixture] = {
    "scripted": Fixture(),
    "strict_alternate": Fixture(template="strict_alternate"),
    "text_only": Fixture(template="text_only"),
    "open_think": Fixture(template="open_think"),
    "no_template": Fixture(breaks=("no_template",)),
    "eos_mismatch": Fixture(breaks=("eos_mismatch",)),
}
