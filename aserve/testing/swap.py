"""Replaces attributes of classes and modules, and puts them back."""

from collections.abc import Callable
from typing import Any


class Swap:
    """`wrap` hands the right function to whoever replaces it."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []

    def put(self, owner: Any, name: str, value: Any) -> None:
        self._before.append((owner, name, owner.__dict__[name]))
        setattr(owner, name, value)

    def wrap(self, owner: Any, name: str, wrong: Callable[..., Any]) -> None:
        """`wrong(right, *args)` in place of `right(*args)`."""
        right = owner.__dict__[name]

        def replaced(*args: Any, **named: Any) -> Any:
            return wrong(right, *args, **named)

        self.put(owner, name, replaced)

    def back(self) -> None:
        while self._before:
            setattr(*self._before.pop())
