"""The hidden plane of a rank that is first and last stage at once: there is nobody to talk to."""


class OnlyStage:
    """The end of a rank whose stage holds every layer."""

    has_previous = False
    has_next = False
