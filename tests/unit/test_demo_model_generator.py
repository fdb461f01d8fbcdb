"""The demo model's data generator: the same seeds give the data that the model was trained on."""

import hashlib
import json
import re
from collections.abc import Callable, Iterable
from functools import cache
from itertools import islice
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from tools.demo_model.evaluation.scoring import Case, cases, is_right
from tools.demo_model.generator.conversation import Dialog, Exchange
from tools.demo_model.generator.dialogs import dialog
from tools.demo_model.generator.draw import Draw
from tools.demo_model.generator.held_out import evaluation_sets, unseen_words
from tools.demo_model.generator.material import Material, load_material
from tools.demo_model.generator.packing import Block, blocks
from tools.demo_model.generator.render import BLOCK_TOKENS, segments
from tools.demo_model.generator.skills.catalogue import SKILLS
from tools.demo_model.generator.skills.numbers import arithmetic
from tools.demo_model.generator.stories import story, summarise_story
from tools.demo_model.paths import MODEL_DIR

# Recorded from the programs that made the shipped model, before they were put into this form.
TRAINING_DIGESTS = {
    1000: "7174740019a20fcbca569f39ed9653abcc61c92b42a55c7e4c89bf924e31ea3a",
    1001: "2a438d14e5f21cd59392b00a7b75f1c8f9ed1478e7f8e6228be837442c497952",
    1002: "c521af7f09236888cdcfeef15890787a8e9ce798a0055cd3e2ef3d8591f31c0e",
    1003: "f2bb8d2b464d6d31bd0bc851994d0a136ec066e7b0492e094d5e3c1c95d8134a",
    1004: "62637ec9d7ee717941a09cf552178790837e63854a9133e8eafbc62292ec4418",
    1005: "d09adc148faf34f6836261e4c139a50c7a0c9bb64b1227aa931a61a040e82787",
    1006: "e8205d5d18972aa851b89bafba7f1170fb4dabb30a4820902f08632b78986a63",
    1007: "b6e4ac9d56523aaeafea2f2db460122efaeccfc7e04436ac9184bdc70becfd33",
    1008: "8a931315a828f55ded39d088b2364b1544cf9aa2f77fde1343aba7f02a90da48",
    1009: "eeecc5e6d32e07421b0c9490ed31f33c641a96cea7878a62962435ca23b1291f",
    1010: "2729deaffe51c568779014cd4b1d1f1f4a4c954b88e2598531d4770a458eadbd",
    1011: "eea6dde6bda67600fa31ab94455af53a16dc1460b612b0a7df97d519df4cce9b",
    1012: "6a9c756c99b944cf3442d80eb412536f7ef7f189d4b87ae3b44780b789971133",
    1013: "bb046f9bedd679389c72f1eb6a47212bfdb1eaed592a8c44519a2f2046a2dba8",
}
SKILL_DIGESTS = {
    "identity": "8d84e5762c9c948512be5d40892d46cd1d1b852a193e5b825414b394548491cc",
    "smalltalk": "68a0cd3764bea39e4cf3d6122f4a22e8e4ae9fab11d04b64d03ea39b3dcd3259",
    "counting": "54fa4d49a6e94ca8e5caf9a060588ea29b423c3247c0572ff38048526a667661",
    "sequences": "bfb0b88b2ce9b2e897a69e66effb9a3154bf7184ae9f41867292418576826e18",
    "arithmetic": "6eed334ddf946cc05f1ebedebe653a2666acf9b4a23143ead1cc3a277c214b73",
    "comparing": "497874d07dceda880603a34348aaf93178d20e097e97e155fd5a7e17d9b59adb",
    "echo": "b18309b65078fb3b967578678e7d65cf85091b0301e54421dbd2008564f31d09",
    "listing": "888b257f3f05f5b5f616bcec0cda21cac161fb4e252c700de41efd3234a141aa",
    "case": "800da750fe7e23a6a18dcc370f8ce9e68739fe6b8733ee762d9fc95a9a62da98",
    "spelling": "178eb093cef190e17db0c633f5b24fc11bedaba3bd819dfff320f7ea11dd9853",
    "facts": "db89a3207c2cbf165d7e16d3b2b19f3e204bb0915d6f763c849f8940ee2df6d4",
    "define": "73c40ab53c8364758d810ddcb248bcdc20648fa4af8f83716809f9086f55bc89",
    "json": "8fcf082e4e9bfa2f53922b83a4feacdb7e1ef879dd7909a499321690d7a54495",
    "code": "ca26f4e13798f64a194897fbdfc4ca0c19905b6ecbdea1d37ce47d62639d3664",
    "unknown": "3a173558243897c54199b5802747e73f5f35bb6f08b5d943f06594420077a54c",
    "story": "6586f8345504bbbddba2b9e2725004810fe56909f332164ba523726494989d0f",
    "summary": "b5de88f7963a8f7b08b5c8cb6bd732c94aea08b357864a5d8aba2e7fc8bd3922",
}
EVALUATION_DIGESTS = {
    "identity": "b89bafc960c1036aa6345c80a88868d43fde0dbb0f7cf67c912dea6f2f503e85",
    "smalltalk": "99a3e584053e9534df4a4ba926285386030d3d565d9569e4259943b68d7f04b5",
    "counting": "4b8626ae286a7f635d3988eb24c805fd72fdacd5765687012907233bc62a3d40",
    "sequences": "3217c96f39a3f5765024a3c9f575b5ec0b4d79c6a0cb13c7c04d8b749bfc2bfa",
    "arithmetic": "b2d4f5454c16e867367019f2f3d6096a2d39ddc0b82b0f4204662bbdbab238a6",
    "comparing": "707e4019440987324c0bf4aa0ade171f98db3a78c093042797dcaf1217b700a8",
    "echo": "12c2d0f59c12f72647568c25bcf3fe9159a2bdb4950f82fa07ad7a03ad148795",
    "listing": "5ffd47668c5db9a9dc4eec9515366c77aa8d8cb2278db21c47b20a5209f1d4f2",
    "case": "481df1d822a6175800f1e7111a151f5cade09c94807fd54a9b64111a9d8b125c",
    "spelling": "b26be283bbfda4830571bd8056a91b39055a96ba05f30d0e8ce6b90ee2617e6d",
    "facts": "0a004740639c076ff4e37aba3f839c49b831f0b96a16ec344af34b8aa1cb88b8",
    "define": "e789796911065e49a0963d90a790b8deeb60b3a8012341c58592a2b82043acb6",
    "json": "958ae6637246fa2896cf50c9174627f509ed497443f515be0c61aca71507eb59",
    "code": "b2f4533666d50018a907602102dcdee9ae091911d0b7b277468b6b33a5e86850",
    "unknown": "be258bb1670e234746ef5b3186c0b64dd6379021058b9570f470564d8fbc5f2d",
    "story": "9463779bd85eee52bbc4941d42cc188cd273ddc8d57c13e7aafab9e29b554c92",
    "summary": "ef51895a2e175d3df03068845a321fdf0e0d0578fcf731d584aa48f53db57193",
    "needle": "92b87e2933a1f4a3bf0a7fce3363ec87b07ba5459e95ba28c247ae650201e8bd",
    "needle_long": "99339a79d8bf70b88f3ec491ee27353a0ac7d848ff1d6054ea0d0c6a6a087076",
    "items": "3c30d9e996726fe7a81c0d5c169992a6dd350b02bfd44e89b7cbabf097f5b06a",
    "memory": "c3b48272644ce014066eaba14d9210c8b2c61e6b6423ba56b09af866329e5196",
    "tools_call": "728bb9a090ec747ea88f1b16812848bfc168340f81253710ab4a05d5405ef227",
    "tools_parallel": "a2d6ea34bd0fa59653a9f46d0c88387947499fd8ad3500713ee9e898ace5e733",
    "tools_result": "b29d726c6541ecce3dbb3e7fea03c68d524e95d7a38fab5e0f4c69161d96404c",
    "tools_none": "05d437a0479a5640c225badcb0b2ef74814365306e1f8c63cddbe8e35d6d437d",
}
FIRST_BLOCKS_DIGESTS = [
    "d25ada26aefe8ab86fde50f251512a32a0f8c8617920c0c3827446c09d700331",
    "422955a2dbb801f37207238a0b344333adc6efb283172280c4fd24d55940eca2",
]
RECORDED_DIALOGS = 300
RECORDED_EXCHANGES = 6000
RECORDED_PER_SKILL = 4


@pytest.fixture(scope="module")
def material() -> Material:
    return load_material()


@cache
def shipped_tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))


def training_dialogs(material: Material, seed: int, count: int) -> list[Dialog]:
    draw = Draw(seed, material)
    return [dialog(draw) for _ in range(count)]


def dialogs_digest(dialogs: Iterable[Dialog]) -> str:
    digest = hashlib.sha256()
    for d in dialogs:
        digest.update(json.dumps([d.skill, d.messages, d.tools, d.contains]).encode() + b"\n")
    return digest.hexdigest()


def block_digest(block: Block) -> str:
    digest = hashlib.sha256()
    for array in block:
        digest.update(array.tobytes())
    return digest.hexdigest()


@pytest.mark.parametrize("seed", TRAINING_DIGESTS)
def test_a_training_seed_gives_the_recorded_conversations(material: Material, seed: int) -> None:
    """The first 300 conversations of a worker are those that the shipped model saw."""
    made = training_dialogs(material, seed, RECORDED_DIALOGS)
    assert dialogs_digest(made) == TRAINING_DIGESTS[seed]


@pytest.mark.parametrize("skill", SKILL_DIGESTS)
def test_a_skill_gives_the_recorded_exchanges(material: Material, skill: str) -> None:
    """Every wording and every case of a single skill is as the shipped model saw it."""
    draw, make = Draw(99, material), (SKILLS | {"story": story, "summary": summarise_story})[skill]
    digest = hashlib.sha256()
    for x in (make(draw) for _ in range(RECORDED_EXCHANGES)):
        digest.update(json.dumps([x.user, x.answer, x.think, x.contains]).encode() + b"\n")
    assert digest.hexdigest() == SKILL_DIGESTS[skill]


def test_the_evaluation_asks_the_recorded_questions(material: Material) -> None:
    """The scores of the model card can be measured again on the same questions."""
    sets = evaluation_sets(material, RECORDED_PER_SKILL)
    digests = {skill: dialogs_digest(rows) for skill, rows in sets.items()}
    assert digests == EVALUATION_DIGESTS


def test_packing_gives_the_recorded_blocks(material: Material) -> None:
    """Tokens, document numbers and loss weights are those of the training run."""
    made = islice(blocks(shipped_tokenizer(), material, 1000), len(FIRST_BLOCKS_DIGESTS))
    assert [block_digest(block) for block in made] == FIRST_BLOCKS_DIGESTS


def test_a_block_is_full_and_starts_each_document_without_weight(material: Material) -> None:
    """Padding and first tokens are never targets, and documents are numbered from 0."""
    block = next(blocks(shipped_tokenizer(), material, 7))
    assert [array.shape for array in block] == [(BLOCK_TOKENS,)] * 3
    numbers = block.documents.tolist()
    starts = [i for i, number in enumerate(numbers) if i == 0 or number != numbers[i - 1]]
    assert [numbers[i] for i in starts] == list(range(len(starts)))
    assert all(block.weights[i] == 0 for i in starts)


def test_a_larger_evaluation_begins_with_the_smaller(material: Material) -> None:
    """Asking more prompts adds to each set and changes none of its first ones."""
    small, large = (evaluation_sets(material, count) for count in (2, 4))
    assert {skill: rows[:2] for skill, rows in large.items()} == small


def questions(material: Material, per_skill: int) -> list[Case]:
    sets = evaluation_sets(material, per_skill).items()
    return [
        case for skill, rows in sets for case in cases(skill, rows, lambda _: [0], thinking=False)
    ]


def test_the_generators_own_answers_are_judged_right(material: Material) -> None:
    """No question of the evaluation is impossible to answer, and silence answers none."""
    asked = questions(material, 20)
    assert [case for case in asked if not is_right(case, case.want)] == []
    assert [case for case in asked if is_right(case, "")] == []


def test_a_prompt_without_room_for_an_answer_is_left_out(material: Material) -> None:
    """A question is asked only where prompt and answer fit into the trained context."""
    rows = evaluation_sets(material, 1)["echo"]
    fits, too_long = [0] * (BLOCK_TOKENS - 60), [0] * (BLOCK_TOKENS - 59)
    assert len(cases("echo", rows, lambda _: fits, thinking=False, room_tokens=60)) == 1
    assert cases("echo", rows, lambda _: too_long, thinking=False, room_tokens=60) == []


SUM = re.compile(r"(\d+) ([+*-]) (\d+) = (\d+)")
OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
}


def sums(material: Material, *, held: bool, seed: int, count: int = 1500) -> list[Exchange]:
    draw = Draw(seed, material, held=held)
    return [arithmetic(draw) for _ in range(count)]


def test_every_sum_is_right(material: Material) -> None:
    """The model is taught no wrong sum."""
    for exchange in sums(material, held=False, seed=3):
        match = SUM.fullmatch(exchange.answer)
        assert match is not None
        assert OPERATIONS[match[2]](int(match[1]), int(match[3])) == int(match[4])


def test_no_sum_of_the_evaluation_is_in_the_training(material: Material) -> None:
    """Held-out combinations are apart from the trained ones, whatever the seeds."""
    trained = {x.answer for seed in (1000, 1001) for x in sums(material, held=False, seed=seed)}
    asked = {x.answer for x in sums(material, held=True, seed=990_001)}
    assert len(trained) > 1000
    assert len(asked) > 50
    assert trained.isdisjoint(asked)


def test_held_out_nouns_are_in_no_training_list(material: Material) -> None:
    """The words of the evaluation with unseen words are unseen."""
    assert len(material.held_rare) == 500
    assert set(material.held_rare).isdisjoint(material.words + material.rare)


def test_unseen_words_leaves_out_what_training_knows(material: Material) -> None:
    """A known word in the given list is never asked for."""
    known, fresh = material.words[100], material.held_rare[:30]
    rows = unseen_words(material, [known, *fresh], 40)
    assert len(rows) == 40
    text = " ".join(message["content"].lower() for row in rows for message in row.messages)
    assert known not in text.split()
    with pytest.raises(ValueError, match="give other words"):
        unseen_words(material, [known], 1)


@cache
def chat_template() -> Any:
    """The shipped template, set up as `transformers` sets it up."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string((MODEL_DIR / "chat_template.jinja").read_text(encoding="utf-8"))


@settings(deadline=None)
@given(seed=st.integers(0, 2**32), thinking=st.booleans())
def test_a_conversation_is_rendered_as_the_chat_template_does(
    material: Material, seed: int, thinking: bool
) -> None:
    """The model was trained on the very text that a client's request becomes."""
    made = dialog(Draw(seed, material))
    messages = made.messages
    if not thinking:
        messages = [{k: v for k, v in m.items() if k != "reasoning_content"} for m in messages]
    text = "".join(piece.text for piece in segments(made.messages, made.tools, thinking=thinking))
    assert text == chat_template().render(messages=messages, tools=made.tools)
