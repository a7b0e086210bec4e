"""The generated task: sums and differences of two numbers, in families (operation and phrasing).

Phrasings differ in topic (bare numbers, fruit, money, weather, age), so that an encoder finds clusters in them.
"""

import math
import random
from dataclasses import dataclass

from core.config import ArithmeticConfig
from core.errors import UserError
from data.row import Row

_SUFFIX = " Reply with the number only."


@dataclass(frozen=True)
class Family:
    """One operation in one phrasing."""

    name: str
    operation: str  # "+" or "-"
    wording: str
    negative: bool = True  # whether an answer below zero makes sense in this story; if not, a >= b

    def num_questions(self, max_operand: int) -> int:
        """Different pairs (a, b) with operands 0..max_operand: a square, or a triangle where a >= b."""
        side = max_operand + 1
        return side * side if self.negative else side * (side + 1) // 2

    def operands(self, index: int, max_operand: int) -> tuple[int, int]:
        """The index-th pair (a, b), 0 <= index < num_questions."""
        if self.negative:
            return divmod(index, max_operand + 1)
        # Row a of the triangle begins at a(a+1)/2
        a = (math.isqrt(8 * index + 1) - 1) // 2
        return a, index - a * (a + 1) // 2


_PLAIN = (
    Family("sum-plain", "+", "What is {a} + {b}?" + _SUFFIX),
    Family("difference-plain", "-", "What is {a} - {b}?" + _SUFFIX),
)
_SEVERAL = (
    *_PLAIN,
    Family("sum-compute", "+", "Compute {a} plus {b}." + _SUFFIX),
    Family("difference-compute", "-", "Compute {a} minus {b}." + _SUFFIX, negative=False),
    Family("sum-apples", "+", "A basket holds {a} apples and I add {b} apples. How many apples are in it?" + _SUFFIX),
    Family(
        "difference-coins", "-", "I had {a} coins and spent {b}. How many coins are left?" + _SUFFIX, negative=False
    ),
    Family("sum-temperature", "+", "It was {a} degrees and got {b} degrees warmer. What is the temperature?" + _SUFFIX),
    Family(
        "difference-temperature",
        "-",
        "It was {a} degrees and got {b} degrees colder. What is the temperature?" + _SUFFIX,
    ),
    Family("sum-age", "+", "Tom is {a} years old. How old will he be in {b} years?" + _SUFFIX),
    Family("difference-age", "-", "Tom is {a} years old. How old was he {b} years ago?" + _SUFFIX, negative=False),
)


@dataclass(frozen=True)
class ArithmeticRows:
    """Training and held-out rows over the same families; no question stands on both sides."""

    train: tuple[Row, ...]
    heldout: tuple[Row, ...]
    notes: tuple[str, ...]


def make_arithmetic(config: ArithmeticConfig, seed: int) -> ArithmeticRows:
    """Rows drawn without repetition, evenly over the families, a pure function of (config, seed).

    Where more training rows are asked for than questions exist, questions repeat under other ids and a note says so.
    Raises UserError where the held-out rows would leave a family without a training question.
    """
    families = [family for family in _families(config) if family.operation in config.operations]
    sizes = [family.num_questions(config.max_operand) for family in families]
    if config.num_heldout > sum(sizes) - len(families):
        raise UserError(
            f"data.arithmetic.num_heldout must be at most {sum(sizes) - len(families)}, got {config.num_heldout}: "
            f"{sum(sizes)} different questions exist and each of {len(families)} families keeps one for training; "
            "lower it or raise data.arithmetic.max_operand"
        )
    held = _spread(config.num_heldout, [size - 1 for size in sizes])
    free = [size - count for size, count in zip(sizes, held, strict=True)]
    num_unique = min(config.num_prompts, sum(free))
    drawn = _spread(num_unique, free)
    generator = random.Random(f"arithmetic, seed {seed}")
    train: list[Row] = []
    heldout: list[Row] = []
    for family, size, num_held, num_drawn in zip(families, sizes, held, drawn, strict=True):
        picks = generator.sample(range(size), num_held + num_drawn)
        rows = [_row(family, *family.operands(index, config.max_operand)) for index in picks]
        heldout += rows[:num_held]
        train += rows[num_held:]
    generator.shuffle(heldout)
    generator.shuffle(train)
    notes: tuple[str, ...] = ()
    if config.num_prompts > num_unique:
        notes = (
            f"Training rows repeat: {config.num_prompts} asked for, {num_unique} different questions exist "
            f"beside the {config.num_heldout} held out.",
        )
    return ArithmeticRows(_repeated(train, config.num_prompts), tuple(heldout), notes)


def _families(config: ArithmeticConfig) -> tuple[Family, ...]:
    return _PLAIN if config.phrasings == "plain" else _SEVERAL


def _row(family: Family, a: int, b: int) -> Row:
    answer = a + b if family.operation == "+" else a - b
    question = family.wording.format(a=a, b=b)
    return Row(f"{family.name}-{a}-{b}", (("user", question),), str(answer), family.name, "arithmetic")


def _spread(total: int, capacities: list[int]) -> list[int]:
    """Counts that sum to `total`, as even as the capacities let them be; needs total <= sum(capacities)."""
    counts = [0] * len(capacities)
    while total > 0:
        places = [place for place, capacity in enumerate(capacities) if counts[place] < capacity]
        each = max(1, total // len(places))
        for place in places:
            taken = min(each, capacities[place] - counts[place], total)
            counts[place] += taken
            total -= taken
    return counts


def _repeated(rows: list[Row], num_rows: int) -> tuple[Row, ...]:
    repeated = list(rows)
    for position in range(len(rows), num_rows):
        turn, place = divmod(position, len(rows))
        row = rows[place]
        repeated.append(Row(f"{row.row_id}-again{turn}", row.messages, row.answer, row.family, row.where))
    return tuple(repeated)
