"""A grammar of simple stories that stay consistent over many paragraphs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tools.demo_model.generator import knowledge
from tools.demo_model.generator.conversation import Exchange
from tools.demo_model.generator.draw import Draw
from tools.demo_model.generator.phrasings import forms, only

_SHE: Final = ("she", "her", "her")
_HE: Final = ("he", "him", "his")
_PRONOUNS_OF: Final = {"girl": _SHE, "princess": _SHE, "boy": _HE, "knight": _HE, "wizard": _HE}


def _with_article(words: str) -> str:
    return ("an " if words[0].lower() in "aeiou" else "a ") + words


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What a listener asks a story to be about; None leaves it to the teller."""

    kind: str | None = None
    trait: str | None = None
    thing: str | None = None
    place: str | None = None
    hero: str | None = None

    @property
    def keys(self) -> tuple[str, ...]:
        """What a story must contain to fulfil the wishes, and its last words."""
        wanted = (self.kind, self.thing, self.place, self.hero)
        return (*(word for word in wanted if word), "The end.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """What a story is about: fixed once, used in every paragraph.

    Attributes:
        goal: What moves the story: a thing that was "lost", "found" or is "wanted".
        pronouns: Of the hero: subject, object, possessive.
    """

    hero: str
    kind: str
    trait: str
    place: str
    friend: str
    friend_kind: str
    thing: str
    colour: str
    goal: str
    lesson: str
    pronouns: tuple[str, str, str]

    @property
    def slots(self) -> dict[str, str]:
        """The words that fill the slots of the story's phrasings."""
        he, him, his = self.pronouns
        return {
            "hero": self.hero,
            "kind": self.kind,
            "a_trait": _with_article(self.trait),
            "place": self.place,
            "friend": self.friend,
            "a_friend_kind": _with_article(self.friend_kind),
            "thing": self.thing,
            "colour": self.colour,
            "a_colour": _with_article(self.colour),
            "lesson": self.lesson,
            "he": he,
            "him": him,
            "his": his,
            "He": he.capitalize(),
        }


def make_plot(draw: Draw, wishes: Wishes) -> Plot:
    """Draw all that the wishes leave open (a trait is drawn in any case)."""
    kind = wishes.kind or draw.phrase("story.kind")
    hero = wishes.hero or draw.person()
    friend = draw.pick([name for name in knowledge.NAMES if name != hero])
    pronouns = _PRONOUNS_OF.get(kind) or draw.pick([_SHE, _HE])
    trait = draw.phrase("story.trait")
    return Plot(
        hero=hero,
        kind=kind,
        trait=wishes.trait or trait,
        place=wishes.place or draw.pick(knowledge.PLACES),
        friend=friend,
        friend_kind=draw.pick([other for other in forms("story.kind") if other != kind]),
        thing=wishes.thing or draw.pick(knowledge.OBJECTS),
        colour=draw.pick(knowledge.COLOUR_NAMES),
        goal=draw.phrase("story.goal"),
        lesson=draw.phrase("story.lesson"),
        pronouns=pronouns,
    )


def _opening(draw: Draw, plot: Plot) -> str:
    names = ("story.opening", "story.home")
    return " ".join(draw.phrase(name, **plot.slots) for name in names)


def _problem(draw: Draw, plot: Plot) -> str:
    weather = draw.phrase("story.weather")
    names = (f"story.{plot.goal}_{part}" for part in ("start", "middle", "end"))
    return " ".join(draw.phrase(name, weather=weather, **plot.slots) for name in names)


def _meeting(draw: Draw, plot: Plot) -> str:
    met = draw.phrase("story.meeting", **plot.slots)
    greeted = draw.phrase("story.greeting", **plot.slots)
    told = only(f"story.{plot.goal}_told", **plot.slots)
    return f"{met} {greeted} {told} {draw.phrase('story.joining', **plot.slots)}"


def _trial(draw: Draw, plot: Plot, number: int, scene: int) -> str:
    """The paragraph about one obstacle: the scene, and a way to get past it."""
    door = draw.pick(knowledge.COLOUR_NAMES)
    arrivals = forms("story.arrival")
    arrival = arrivals[min(number, len(arrivals) - 1)]
    shown = forms("story.scene")[scene].format(arrival=arrival, door=door)
    after = draw.phrase("story.after_trial", **plot.slots)
    return f"{shown} {draw.phrase(f'story.way_{scene}', **plot.slots)} {after}"


def _ending(draw: Draw, plot: Plot) -> str:
    spots = list(zip(forms("story.spot"), forms("story.spot_of_child"), strict=True))
    hidden, waiting = draw.pick(spots)
    if plot.goal == "found":
        return only("story.found_returned", spot=waiting, **plot.slots)
    return only(f"story.{plot.goal}_found", spot=hidden, **plot.slots)


def _closing(draw: Draw, plot: Plot) -> str:
    return draw.phrase("story.closing", food=draw.phrase("story.shared_food"), **plot.slots)


def tell(draw: Draw, plot: Plot, trials: int) -> str:
    """A whole story with that many obstacles, in a drawn order (more than eight repeat)."""
    scenes = len(forms("story.scene"))
    order = draw.rng.sample(range(scenes), scenes)
    paragraphs = [_opening(draw, plot), _problem(draw, plot), _meeting(draw, plot)]
    paragraphs += [_trial(draw, plot, n, order[n % scenes]) for n in range(trials)]
    paragraphs += [_ending(draw, plot), _closing(draw, plot)]
    return "\n\n".join(paragraphs)


def _tell_short(draw: Draw, plot: Plot) -> str:
    """Three paragraphs, without a friend."""
    paragraphs = [_opening(draw, plot), _problem(draw, plot)]
    end = _ending(draw, plot).replace("they found", f"{plot.hero} found")
    paragraphs.append(f"{end} {plot.hero} had learned {plot.lesson}. The end.")
    return "\n\n".join(paragraphs)


def _kind(draw: Draw) -> str:
    return draw.phrase("story.kind") if draw.chance(0.7) else draw.word()


def _about_kind(draw: Draw) -> tuple[Wishes, str]:
    kind = _kind(draw)
    trait = draw.phrase("story.trait") if draw.chance(0.4) else None
    described = f"{trait} {kind}" if trait else kind
    return Wishes(kind=kind, trait=trait), f" about {_with_article(described)}"


def _about_thing(draw: Draw) -> tuple[Wishes, str]:
    thing = draw.pick(knowledge.OBJECTS) if draw.chance(0.4) else draw.word()
    return Wishes(thing=thing), f" about {_with_article(thing)}"


def _in_place(draw: Draw) -> tuple[Wishes, str]:
    place = draw.pick(knowledge.PLACES) if draw.chance(0.6) else draw.word()
    shown = _with_article(place) if draw.chance(0.5) else f"the {place}"
    return Wishes(place=place), f" in {shown}"


def _about_hero(draw: Draw) -> tuple[Wishes, str]:
    hero = draw.person()
    return Wishes(hero=hero), f" about {hero}"


def _about_named_kind(draw: Draw) -> tuple[Wishes, str]:
    hero = draw.person()
    kind = _kind(draw)
    return Wishes(hero=hero, kind=kind), f" about {_with_article(kind)} named {hero}"


def _about_kind_and_thing(draw: Draw) -> tuple[Wishes, str]:
    kind, thing = draw.phrase("story.kind"), draw.pick(knowledge.OBJECTS)
    topic = f" about {_with_article(kind)} and {_with_article(thing)}"
    return Wishes(kind=kind, thing=thing), topic


def _about_anything(draw: Draw) -> tuple[Wishes, str]:  # noqa: ARG001  called like the others
    return Wishes(), ""


# What a story is to be about, and how the request says so; each is drawn as often.
_TOPICS: Final = (
    _about_anything,
    _about_kind,
    _about_thing,
    _in_place,
    _about_hero,
    _about_named_kind,
    _about_kind_and_thing,
    _about_anything,
)


def _request(draw: Draw, length: str, topic: str) -> str:
    bare = f"{length}story{topic}".strip().capitalize()
    base = draw.phrase("story.ask", length=length, topic=topic, bare=bare)
    if topic == "" and length == "long ":
        return draw.phrase("story.ask_long", base=base)
    return base


def story(draw: Draw) -> Exchange:
    """A request for a story, short or long, about something or anything."""
    rng = draw.rng
    length = rng.choice(forms("story.length"))
    wishes, topic = _TOPICS[rng.randrange(len(_TOPICS))](draw)
    plot = make_plot(draw, wishes)
    request = _request(draw, length, topic)
    if length == "short ":
        text = _tell_short(draw, plot)
    else:
        text = tell(draw, plot, rng.randint(5, 8) if length else rng.randint(2, 4))
    think = f"I tell a {length}story with a start, a problem and a good end."
    return Exchange(request, text, think, wishes.keys)


def summarise_story(draw: Draw) -> Exchange:
    """A story to sum up in one sentence, or to answer one question about."""
    plot = make_plot(draw, Wishes())
    text = tell(draw, plot, draw.rng.randint(0, 3))
    ask = draw.phrase("summary.ask")
    verb = {
        "lost": "looks for the lost",
        "found": "brings back the",
        "wanted": "looks for the hidden",
    }[plot.goal]
    answer = (
        f"{plot.hero}, {_with_article(plot.trait)} {plot.kind} from the {plot.place}, {verb} "
        f"{plot.colour} {plot.thing} with the help of {plot.friend}."
    )
    if draw.chance(0.3):
        question, answer = draw.pick(
            [
                ("Who is the main character?", f"The main character is {plot.hero}."),
                ("Who helps?", f"{plot.friend} helps."),
                (f"What colour is the {plot.thing}?", f"The {plot.thing} is {plot.colour}."),
                (f"Where does {plot.hero} live?", f"{plot.hero} lives near the {plot.place}."),
            ]
        )
        ask = f"Read the story and answer: {question}"
    request = f"{ask}\n\n{text}" if draw.chance(0.5) else f"{text}\n\n{ask}"
    return Exchange(request, answer, "I look for the hero, the problem and the helper.")
