"""Every error aserve raises on purpose, by who has to act: operator, client, peer or us."""

from collections.abc import Iterable


class AserveError(Exception):
    """Root of the tree, for callers who want to catch everything of ours."""


class ConfigError(AserveError):
    """The operator asked for something that cannot be; lists every finding at once."""

    def __init__(self, findings: str | Iterable[str]) -> None:
        self.findings = (findings,) if isinstance(findings, str) else tuple(findings)
        super().__init__("\n".join(self.findings))


class ModelError(ConfigError):
    """A model folder or file cannot be used: missing, surplus or misshapen parts, all listed."""


class RequestError(AserveError):
    """The client asked for something that cannot be; `status` is the HTTP status that says so."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        self.status = status
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s
        super().__init__(message)


class PeerError(AserveError):
    """Another process broke its word."""

    def __init__(self, peer: str, message: str) -> None:
        self.peer = peer
        self.reason = message
        super().__init__(f"{peer}: {message}")


class Desync(AserveError):
    """A rank's state differs from the planner's: our bug, named by rank and step."""

    def __init__(self, rank: int, step: int, message: str) -> None:
        self.rank = rank
        self.step = step
        super().__init__(f"rank {rank} at step {step}: {message}")


class PlaneError(AserveError):
    """Ranks did not meet: the grid cannot go on as it is, and the leader starts it anew."""


class PlaneMismatch(PlaneError):
    """Two ranks made different calls where they should have made the same; `calls` names both."""

    def __init__(self, *calls: str) -> None:
        self.calls = calls
        super().__init__("ranks made different calls: " + " but ".join(calls))


class PlaneTimeout(PlaneError):
    """Ranks that others waited for did not come; `missing` are their numbers."""

    def __init__(self, missing: Iterable[int], message: str) -> None:
        self.missing = tuple(missing)
        super().__init__(message)


class RankDied(PlaneError):
    """A rank's process or task ended by itself."""

    def __init__(self, rank: int, message: str) -> None:
        self.rank = rank
        super().__init__(f"rank {rank} died: {message}")
