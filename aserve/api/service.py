"""What all requests share: the engine once it is there, and the requests in progress."""

import time
from collections import Counter
from typing import Literal

import aserve
from aserve.actors.engine import Engine
from aserve.api.body import Bodies
from aserve.api.call import Call
from aserve.api.chunks import Envelope, fingerprint_of
from aserve.api.connection import Outgoing
from aserve.api.prompts import Prompts
from aserve.core.config import Config
from aserve.core.layout import Grid
from aserve.errors import RequestError

Phase = Literal["loading", "serving", "draining"]


class Service:
    """One server's state; the only thing that handlers of different requests have in common."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.phase: Phase = "loading"
        self.bodies = Bodies(config.limits.body_bytes_max, config.server.read_s)
        self.calls: set[Call] = set()
        self.outgoing = Outgoing()
        self.responses: Counter[tuple[str, str, int]] = Counter()
        self._engine: Engine | None = None
        self._prompts: Prompts | None = None
        self._engine_ids: dict[str, str] = {}

    def open(self, engine: Engine) -> None:
        self._prompts = Prompts(engine)
        self._engine = engine
        engine.on_delivered(self.outgoing.flush)
        self.phase = "serving"

    def close(self) -> None:
        self.phase = "draining"

    @property
    def loaded(self) -> bool:
        return self._engine is not None

    @property
    def failure(self) -> str | None:
        """What died in the engine, if something did."""
        return None if self._engine is None else self._engine.failure

    def unready(self) -> tuple[str, str]:
        """While not `ready`: what this server is at, and why."""
        if self.failure is not None:
            return "failed", self.failure
        if self.phase == "draining":
            return "draining", "the server is shutting down"
        if self._engine is None:
            world = Grid(self.config.layout).world
            if world == 1:
                return "loading", "the model is still loading"
            return "loading", f"not all {world} ranks have loaded, joined and been measured yet"
        return self._engine.state, self._engine.last_break or "the ranks are being ended"

    @property
    def ready(self) -> bool:
        return self.phase == "serving" and self._engine is not None and self._engine.ready

    @property
    def engine(self) -> Engine:
        """Raises RequestError(503) while there is none."""
        if self._engine is None:
            raise RequestError(
                "The model is still loading.", status=503, code="loading", retry_after_s=2
            )
        return self._engine

    @property
    def prompts(self) -> Prompts:
        assert self._prompts is not None
        return self._prompts

    def envelope(self, response_id: str, kind: str) -> Envelope:
        model = self.engine.model_name
        fingerprint = fingerprint_of(aserve.__version__, model)
        return Envelope(response_id, kind, int(time.time()), model, fingerprint)

    def check_open(self) -> Engine:
        """The engine, if it takes new requests now."""
        if self.phase == "draining":
            raise shutting_down()
        return self.engine

    def check_model(self, name: str | None) -> Engine:
        """404 for a model this server does not have; no name at all means the one it has."""
        engine = self.check_open()
        if name is not None and name != engine.model_name:
            raise RequestError(
                f"The model {name[:200]!r} does not exist; this server has {engine.model_name!r}.",
                status=404,
                param="model",
                code="model_not_found",
            )
        return engine

    def claim_id(self, wanted: str) -> str:
        """`wanted`, with a suffix if a request in progress has it already; see `release_id`."""
        claimed, count = wanted, 1
        while claimed in self._engine_ids:
            count += 1
            claimed = f"{wanted}-{count}"
        self._engine_ids[claimed] = wanted
        return claimed

    def release_id(self, claimed: str) -> None:
        del self._engine_ids[claimed]

    def ids_of(self, request_id: str) -> list[str]:
        """Engine ids in progress under a request id, a response id or one of themselves."""
        return [
            claimed
            for claimed, wanted in self._engine_ids.items()
            if request_id in (claimed, wanted) or wanted.partition("-")[2] == request_id
        ]

    def end_calls(self) -> None:
        for call in tuple(self.calls):
            call.end(shutting_down())


def shutting_down() -> RequestError:
    return RequestError("The server is shutting down.", status=503, code="shutting_down")
