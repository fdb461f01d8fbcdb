"""Counting, sums and comparisons, each with a held-out part that training never sees."""

from __future__ import annotations

from tools.demo_model.generator import knowledge
from tools.demo_model.generator.conversation import Exchange
from tools.demo_model.generator.draw import Draw
from tools.demo_model.generator.phrasings import forms, only


def _spelled(draw: Draw, n: int) -> str:
    """The number in digits, small ones now and then in words."""
    is_small = 0 <= n < len(knowledge.NUMBER_WORDS)
    return knowledge.NUMBER_WORDS[n] if is_small and draw.chance(0.15) else str(n)


def counting(draw: Draw) -> Exchange:
    """Counting up, down and in steps; multiples."""
    kind = draw.rng.choice(["up", "up", "down", "step", "to", "times"])
    count = {"up": _up, "down": _down, "step": _steps, "to": _to, "times": _multiples}[kind]
    question, numbers = count(draw)
    think = f"I list the numbers from {numbers[0]} to {numbers[-1]} in order."
    return Exchange(draw.polite(question), ", ".join(map(str, numbers)), think)


def _to(draw: Draw) -> tuple[str, range]:
    n = draw.rng.randint(3, 40)
    question = draw.phrase(
        "counting.to", n=n, spelled=_spelled(draw, n), spelled_again=_spelled(draw, n)
    )
    return question, range(1, n + 1)


def _up(draw: Draw) -> tuple[str, range]:
    rng = draw.rng
    first, more = draw.combination(lambda: (rng.randint(0, 150), rng.randint(3, 40)))
    last = first + more
    question = draw.phrase("counting.up", first=first, last=last, spelled=_spelled(draw, first))
    return question, range(first, last + 1)


def _down(draw: Draw) -> tuple[str, range]:
    rng = draw.rng
    last, more = draw.combination(lambda: (rng.randint(0, 100), rng.randint(3, 30)))
    first = last + more
    question = draw.phrase(
        "counting.down",
        first=first,
        last=last,
        spelled_first=_spelled(draw, first),
        spelled_last=_spelled(draw, last),
    )
    return question, range(first, last - 1, -1)


def _steps(draw: Draw) -> tuple[str, range]:
    rng = draw.rng
    step, first, count = draw.combination(
        lambda: (
            rng.choice([2, 2, 3, 4, 5, 5, 10, 10, 20, 100]),
            rng.randint(0, 20),
            rng.randint(4, 20),
        )
    )
    if draw.chance(0.5):
        first = 0 if draw.chance(0.5) else step
    numbers = range(first, first + step * count + 1, step)
    question = draw.phrase(
        "counting.step",
        step=step,
        first=first,
        last=numbers[-1],
        spelled=_spelled(draw, step),
        spelled_again=_spelled(draw, step),
    )
    return question, numbers


def _multiples(draw: Draw) -> tuple[str, range]:
    rng = draw.rng
    step, n = draw.combination(lambda: (rng.randint(2, 20), rng.randint(3, 12)))
    question = draw.phrase("counting.multiples", n=n, step=step, spelled=_spelled(draw, n))
    return question, range(step, step * n + 1, step)


def arithmetic(draw: Draw) -> Exchange:
    """Sums and differences up to 100, products up to 12 times 12, also as word problems."""
    op, a, b, result = _operands(draw)
    times = draw.pick(forms("arithmetic.times_sign"))
    answer, think = f"{a} {op} {b} = {result}", f"{a} {op} {b} is {result}."
    if draw.rng.random() < 0.75:
        names = forms(f"arithmetic.name_{op}")
        question = draw.phrase(
            "arithmetic.sum",
            a=a,
            b=b,
            sign=times if op == "*" else op,
            name=draw.pick(names),
            spelled_a=_spelled(draw, a),
            name_again=draw.pick(names),
            spelled_b=_spelled(draw, b),
        )
        return Exchange(question, answer, think)
    who, what = draw.pick(knowledge.NAMES), draw.pick(knowledge.FRUITS + knowledge.OBJECTS)
    return Exchange(only(f"arithmetic.story_{op}", who=who, what=what, a=a, b=b), answer, think)


def _operands(draw: Draw) -> tuple[str, int, int, int]:
    """Operator, both operands and the result."""
    rng = draw.rng
    op = rng.choice("++--*")
    if op == "*":
        _, a, b = draw.combination(lambda: ("*", rng.randint(0, 12), rng.randint(0, 12)))
        return op, a, b, a * b
    top = rng.choice([12, 30, 100, 100])
    if op == "+":
        _, a, b = draw.combination(lambda: ("+", rng.randint(0, top), rng.randint(0, top)))
        return op, a, b, a + b

    def larger_first() -> tuple[str, int, int]:
        x, y = rng.randint(0, top), rng.randint(0, top)
        return "-", max(x, y), min(x, y)

    _, a, b = draw.combination(larger_first)
    return op, a, b, a - b


def comparing(draw: Draw) -> Exchange:
    """Which of two is larger, sorting, extremes, even or odd."""
    kind = draw.rng.randrange(6)
    if kind <= 1:
        return _which_of_two(draw)
    if kind == 2:
        return _is_larger(draw)
    numbers = draw.rng.sample(range(draw.rng.choice([20, 100])), draw.rng.randint(3, 7))
    shown = ", ".join(map(str, numbers))
    if kind == 3:
        up = draw.chance(0.6)
        direction = "smallest to largest" if up else "largest to smallest"
        ordered = ", ".join(map(str, sorted(numbers, reverse=not up)))
        question = f"Sort these numbers from {direction}: {shown}"
        return Exchange(question, ordered, "I put the numbers in order.")
    if kind == 4:
        big = draw.chance(0.5)
        word = draw.pick(forms("comparing.largest")) if big else "smallest"
        question = draw.phrase("comparing.extreme", word=word, shown=shown)
        extreme = max(numbers) if big else min(numbers)
        return Exchange(question, str(extreme), "I look at each number.")
    a = draw.rng.randrange(1000)
    parity = "odd" if a % 2 else "even"
    question = draw.phrase("comparing.parity", a=a)
    return Exchange(question, f"{a} is {parity}.", "I look at the last digit.")


def _which_of_two(draw: Draw) -> Exchange:
    top = draw.rng.choice([20, 100, 1000])
    a, b = draw.combination(lambda: tuple(draw.rng.sample(range(top), 2)))
    wanted = "larger" if draw.chance(0.5) else "smaller"
    word = draw.pick(forms(f"comparing.{wanted}"))
    result = max(a, b) if wanted == "larger" else min(a, b)
    think = f"I compare {a} and {b}: {max(a, b)} is larger than {min(a, b)}."
    question = draw.phrase("comparing.two", word=word, a=a, b=b)
    return Exchange(question, f"{result} is {wanted}.", think)


def _is_larger(draw: Draw) -> Exchange:
    rng = draw.rng
    top = rng.choice([20, 100, 1000])
    a, b = draw.combination(lambda: (rng.randrange(top), rng.randrange(top)))
    wanted = "larger" if draw.chance(0.5) else "smaller"
    word = draw.pick(forms(f"comparing.{wanted}"))
    is_so = a > b if wanted == "larger" else a < b
    relation = "equal to"
    if a != b:
        relation = "larger than" if a > b else "smaller than"
    answer = f"{'Yes' if is_so else 'No'}, {a} is {relation} {b}."
    return Exchange(f"Is {a} {word} than {b}?", answer, f"I compare {a} and {b}.")
