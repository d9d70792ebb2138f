"""What is asked when drafts are measured: plain questions, the model's own, and texts that an
answer repeats."""

import itertools
from collections.abc import Sequence

import numpy as np

from aserve.actors.engine import Engine
from aserve.training.chatting import Author, Manner, Template
from aserve.training.files import ANSWER
from aserve.training.prompts import HELD_OUT

Prompt = tuple[int, ...]

NOTES = (
    "The city council met on Monday to discuss the new bridge over the river. The mayor said that "
    "the bridge would cost twelve million dollars and take two years to build. Several residents "
    "asked whether the old bridge could be repaired instead. An engineer told the council that the "
    "old bridge was no longer safe for trucks. The council will vote on the plan next month.",
    "Our shop opens at nine in the morning and closes at six in the evening from Monday to Friday. "
    "On Saturday we close at two. Orders that arrive before noon are sent on the same day. If you "
    "would like to return something, please bring the receipt and come within thirty days. Repairs "
    "take about a week, and we will call you when your bicycle is ready.",
    "The experiment began with forty bean plants in two groups. The first group was watered every "
    "day, the second group every three days. After four weeks the plants of the first group were "
    "on average nine centimetres taller. Two plants of the second group had died. The students "
    "concluded that beans grow faster when they are watered daily, and planned to repeat the "
    "experiment with less light.",
)
CODE = (
    """def total_price(items, tax_rate):
    total = 0
    for item in items:
        price = item["price"] * item["quantity"]
        total = total + price
    total = total + total * tax_rate
    return total


def print_receipt(items, tax_rate):
    print("Receipt")
    for item in items:
        print(item["name"], item["quantity"], item["price"])
    print("Total:", total_price(items, tax_rate))
""",
    """class Counter:
    def __init__(self, start):
        self.value = start
        self.history = []

    def increase(self, amount):
        self.history.append(self.value)
        self.value = self.value + amount

    def decrease(self, amount):
        self.history.append(self.value)
        self.value = self.value - amount

    def undo(self):
        self.value = self.history.pop()
""",
)
OF_NOTES = (
    "Summarize this text in two sentences:",
    "Correct the spelling in this text and repeat it:",
    "Rewrite this text in the first person:",
)
OF_CODE = (
    "Add a docstring to each function of this Python code. Answer with the whole code.",
    "Rename one variable in this Python code and show the whole code:",
)


def repeating() -> list[str]:
    """Summaries and edits of texts and code."""
    notes = [f"{asked}\n\n{text}" for text in NOTES for asked in OF_NOTES]
    code = [f"{asked}\n\n```python\n{text}```" for text in CODE for asked in OF_CODE]
    return notes + code


async def own_questions(engine: Engine, count: int) -> list[Prompt]:
    """Prompts whose question the model wrote itself, as a draft head is measured by."""
    author = Author(engine, Manner(answer_len=1))
    found: list[Prompt] = []
    for number in itertools.count(len(HELD_OUT)):
        if len(found) == count:
            return found
        held = await author.held_out(number)
        if held is not None:
            (answers,) = np.nonzero(held.writers == ANSWER)
            found.append(tuple(held.tokens[: answers[0]].tolist()))
    raise AssertionError


async def prompts_of(engine: Engine, text: str, count: int) -> list[Prompt]:
    """`count` prompts of `questions`, `own` or `repeating`; these come again where they are few."""
    if text == "own":
        return await own_questions(engine, count)
    template = Template(engine.tokenizer)
    asked: Sequence[str] = HELD_OUT if text == "questions" else repeating()
    some = itertools.islice(itertools.cycle(asked), count)
    return [tuple(template.answering([{"role": "user", "content": one}])) for one in some]
