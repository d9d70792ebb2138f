"""`python -m aserve` is the command `aserve`."""

from aserve.cli import entry

entry()
