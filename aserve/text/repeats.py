"""How often a regular expression repeats a part, before anything is compiled from it.

Not a parser: it reads any text, and what is no regular expression gets some number.
"""

import re

COUNT_MAX = 10**9  # what a longer number counts as

# In this order: escapes, classes, a count, and any other character. What is not closed goes on to
# the end of the text: were it no match, each such beginning would be looked through in vain.
TOKEN = re.compile(
    r"\\[pPxu]\{[^}]*\}?|\\.|\[\^?\]?(?:\\.|[^\]\\])*\]?|\{(\d+)(?:,(\d*))?\}|.", re.DOTALL
)


def repeats(regex: str) -> int:
    """The largest product of counts nested in one another: `(a{1,20}b){30}c{9}` has 600.

    `*`, `+` and `?` count once: they are no counters that a matcher must unroll.
    """
    outer: list[int] = []  # the largest product so far, of each open group
    most, last = 1, 1  # of this group, and of the part that a count would apply to
    for token in TOKEN.finditer(regex):
        text = token[0]
        if token[1] is not None:
            last = min(COUNT_MAX, last * max(1, _count(token[2] or token[1])))
            most = max(most, last)
        elif text == "(":
            outer.append(most)
            most, last = 1, 1
        elif text == ")" and outer:
            last = most
            most = max(outer.pop(), last)
        elif text not in ("*", "+", "?"):
            last = 1
    return max(most, *outer) if outer else most


def _count(digits: str) -> int:
    return int(digits) if len(digits) < 10 else COUNT_MAX
