"""Which rank of how many this process is, and where rank 0 is, from what a launcher has set.

A pure function of an environment, by a table of launchers. Starts nothing and asks nobody.
"""

import re
from collections.abc import Callable, Mapping

import msgspec

from aserve.errors import ConfigError

PORT = 29400  # of the request plane, where the launcher names none
SECRET = "ASERVE_SECRET"
SECRET_LEN_MIN = 16
LOOPBACK = ("localhost", "127.0.0.1", "::1")

Environment = Mapping[str, str]


class Berth(msgspec.Struct, frozen=True):
    """One process's place in a cluster, and among the `n_local` processes of its host."""

    launcher: str
    rank: int
    world: int
    local_rank: int
    n_local: int
    host: str  # of rank 0
    port: int
    secret: bytes


class Launcher(msgspec.Struct, frozen=True):
    """`marks` are the variables that tell it was this launcher (any of them)."""

    name: str
    marks: tuple[str, ...]
    read: Callable[[Environment], tuple[int, int, int, int, str, int]]


def berth(environment: Environment) -> Berth:
    """Where this process sits. Raises ConfigError: no launcher, or one that set half of it."""
    for launcher in LAUNCHERS:
        if not any(mark in environment for mark in launcher.marks):
            continue
        rank, world, local_rank, n_local, host, port = launcher.read(environment)
        if not 0 <= rank < world:
            raise ConfigError(
                f"{launcher.name} says this is rank {rank} of {world}; ranks count from 0"
            )
        secret = _secret(environment, host)
        return Berth(launcher.name, rank, world, local_rank, n_local, host, port, secret)
    known = "; ".join(
        f"{launcher.name} sets {' or '.join(launcher.marks)}" for launcher in LAUNCHERS
    )
    raise ConfigError(f"ranks.live is cluster, but no launcher is in the environment: {known}")


def _torchrun(environment: Environment) -> tuple[int, int, int, int, str, int]:
    """https://docs.pytorch.org/docs/stable/elastic/run.html, "Environment Variables".

    MASTER_PORT is torchrun's own store, on the host of rank 0; ours is the one above it.
    """
    say = _Reader("torchrun", environment)
    port = say.number("ASERVE_PORT", say.number("MASTER_PORT") + 1)
    return (
        say.number("RANK"),
        say.number("WORLD_SIZE"),
        say.number("LOCAL_RANK", 0),
        say.number("LOCAL_WORLD_SIZE", 1),
        say.text("MASTER_ADDR"),
        port,
    )


def _slurm(environment: Environment) -> tuple[int, int, int, int, str, int]:
    """https://slurm.schedmd.com/srun.html, "OUTPUT ENVIRONMENT VARIABLES"."""
    say = _Reader("Slurm", environment)
    host = say.text("MASTER_ADDR", "") or first_host(
        say.text("SLURM_STEP_NODELIST", "") or say.text("SLURM_JOB_NODELIST")
    )
    return (
        say.number("SLURM_PROCID"),
        say.number("SLURM_NTASKS"),
        say.number("SLURM_LOCALID", 0),
        tasks_of_node(say.text("SLURM_STEP_TASKS_PER_NODE", "1"), say.number("SLURM_NODEID", 0)),
        host,
        say.number("ASERVE_PORT", say.number("MASTER_PORT", PORT)),
    )


def _kubernetes(environment: Environment) -> tuple[int, int, int, int, str, int]:
    """An indexed Job sets JOB_COMPLETION_INDEX; a StatefulSet's pods are called NAME-0, NAME-1...

    ASERVE_WORLD and ASERVE_LEADER (host or host:port of rank 0) stand in the manifest.
    """
    say = _Reader("Kubernetes", environment)
    if "JOB_COMPLETION_INDEX" in environment:
        rank = say.number("JOB_COMPLETION_INDEX")
    else:
        name = say.text("HOSTNAME")
        found = re.search(r"-(\d+)$", name.partition(".")[0])
        if found is None:
            raise ConfigError(
                f"ASERVE_LEADER is set, but HOSTNAME {name!r} does not end in a number as a "
                "StatefulSet's pods do, and JOB_COMPLETION_INDEX is not set"
            )
        rank = int(found[1])
    host, port = _host_and_port(say.text("ASERVE_LEADER"))
    world = say.number("ASERVE_WORLD")
    return rank, world, 0, 1, host, say.number("ASERVE_PORT", PORT) if port is None else port


# In this order: Kubernetes' variables are ours, so whoever sets them means them; Slurm sets its own
# for torchrun too, when torchrun runs in a job step.
LAUNCHERS: tuple[Launcher, ...] = (
    Launcher("Kubernetes", ("ASERVE_LEADER",), _kubernetes),
    Launcher("torchrun", ("RANK",), _torchrun),
    Launcher("Slurm", ("SLURM_PROCID",), _slurm),
)


class _Reader:
    """Reads one launcher's variables, and says whose and which one is missing or no number."""

    def __init__(self, launcher: str, environment: Environment) -> None:
        self._launcher = launcher
        self._environment = environment

    def text(self, name: str, default: str | None = None) -> str:
        found = self._environment.get(name, default)
        if found is None:
            raise ConfigError(
                f"{name} is not set, though the environment looks like {self._launcher}'s"
            )
        return found

    def number(self, name: str, default: int | None = None) -> int:
        text = self._environment.get(name)
        if text is None and default is not None:
            return default
        text = self.text(name)
        try:
            return int(text)
        except ValueError:
            raise ConfigError(f"{name} must be a number, not {text!r}") from None


def first_host(nodes: str) -> str:
    """The first of a Slurm node list: `gpu[07-09,12],login` begins with gpu07."""
    found = re.match(r"([^,\[\]]+)(?:\[(\d+))?", nodes.strip())
    if found is None:
        raise ConfigError(f"no node in Slurm's list {nodes!r}")
    # A suffix behind the brackets, as in node[1-2]-ib, belongs to every name.
    suffix = re.match(r"[^,\[\]]*\[[^\]]*\]([^,\[\]]*)", nodes.strip())
    return found[1] + (found[2] or "") + (suffix[1] if suffix else "")


def tasks_of_node(text: str, node: int) -> int:
    """Of Slurm's `2,3(x2)`: two tasks on node 0, three on nodes 1 and 2."""
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(count)] * int(times or 1)
    return counts[node] if node < len(counts) else 1


def _host_and_port(text: str) -> tuple[str, int | None]:
    """`host`, `host:port`, `[v6]`, `[v6]:port` or a bare IPv6 address."""
    found = re.fullmatch(r"(?:\[([^\]]+)\]|([^:]+))(?::(\d+))?", text)
    if found is None:
        if text.count(":") > 1:
            return text, None
        raise ConfigError(f"ASERVE_LEADER must be a host or host:port, not {text!r}")
    return found[1] or found[2], int(found[3]) if found[3] else None


def _secret(environment: Environment, host: str) -> bytes:
    """All ranks prove to each other that they know it; on one host none is needed."""
    secret = environment.get(SECRET, "")
    if not secret and host in LOOPBACK:
        return b"ranks of one host"
    if len(secret) < SECRET_LEN_MIN:
        what = f"has {len(secret)} characters" if secret else "is not set"
        raise ConfigError(
            f"{SECRET} {what}: ranks on several hosts (rank 0 is at {host}) need a shared "
            f"secret of at least {SECRET_LEN_MIN} characters, the same for all"
        )
    return secret.encode()
