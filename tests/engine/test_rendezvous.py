"""Launchers' variables, read by the table: where a process sits, and what is wrong if nowhere."""

import pytest

from aserve.actors.rendezvous import LAUNCHERS, PORT, Berth, berth, first_host
from aserve.errors import ConfigError

SECRET = {"ASERVE_SECRET": "0123456789abcdef"}
TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "gpu[07-08,10]",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_NODEID": "1",
}
STATEFUL = {
    "ASERVE_LEADER": "aserve-0.aserve.default.svc:7000",
    "ASERVE_WORLD": "2",
    "HOSTNAME": "aserve-1",
}
INDEXED = {"ASERVE_LEADER": "aserve", "ASERVE_WORLD": "3", "JOB_COMPLETION_INDEX": "2"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (TORCHRUN, ("torchrun", 3, 4, 1, 2, "node0", 29501)),
        ({**TORCHRUN, "ASERVE_PORT": "7"}, ("torchrun", 3, 4, 1, 2, "node0", 7)),
        (SLURM, ("Slurm", 5, 8, 1, 4, "gpu07", PORT)),
        ({**SLURM, "MASTER_ADDR": "h", "MASTER_PORT": "9"}, ("Slurm", 5, 8, 1, 4, "h", 9)),
        (
            {**SLURM, "SLURM_STEP_TASKS_PER_NODE": "2,3(x2)", "SLURM_NODEID": "2"},
            ("Slurm", 5, 8, 1, 3, "gpu07", PORT),
        ),
        (STATEFUL, ("Kubernetes", 1, 2, 0, 1, "aserve-0.aserve.default.svc", 7000)),
        (INDEXED, ("Kubernetes", 2, 3, 0, 1, "aserve", PORT)),
        ({**INDEXED, "ASERVE_LEADER": "[fd00::1]:80"}, ("Kubernetes", 2, 3, 0, 1, "fd00::1", 80)),
        ({**INDEXED, "ASERVE_LEADER": "fd00::1"}, ("Kubernetes", 2, 3, 0, 1, "fd00::1", PORT)),
        # torchrun inside a Slurm step is torchrun, either in a pod is what the manifest says
        ({**SLURM, **TORCHRUN}, ("torchrun", 3, 4, 1, 2, "node0", 29501)),
        ({**TORCHRUN, **STATEFUL}, ("Kubernetes", 1, 2, 0, 1, "aserve-0.aserve.default.svc", 7000)),
    ],
)
def test_each_launcher_is_read(environment: dict[str, str], expected: tuple[object, ...]) -> None:
    found = berth({**environment, **SECRET})
    assert found == Berth(*expected, secret=b"0123456789abcdef")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("environment", "finding"),
    [
        ({}, "no launcher is in the environment"),
        ({"RANK": "0"}, "MASTER_PORT is not set"),
        ({**TORCHRUN, "WORLD_SIZE": "two"}, "WORLD_SIZE must be a number, not 'two'"),
        ({**TORCHRUN, "RANK": "4"}, "rank 4 of 4"),
        ({**TORCHRUN, "RANK": "-1"}, "rank -1 of 4"),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, "SLURM_JOB_NODELIST is not set"),
        ({**STATEFUL, "HOSTNAME": "aserve"}, "does not end in a number"),
        ({"ASERVE_LEADER": "x", "HOSTNAME": "a-0"}, "ASERVE_WORLD is not set"),
        ({**INDEXED, "ASERVE_LEADER": "x:y"}, "must be a host or host:port"),
    ],
)
def test_what_is_missing_is_named(environment: dict[str, str], finding: str) -> None:
    with pytest.raises(ConfigError, match=finding):
        berth({**environment, **SECRET})


def test_several_hosts_need_a_secret_and_one_does_not() -> None:
    with pytest.raises(ConfigError, match=r"ASERVE_SECRET is not set.*node0"):
        berth(TORCHRUN)
    with pytest.raises(ConfigError, match=r"ASERVE_SECRET has 5 characters"):
        berth({**TORCHRUN, "ASERVE_SECRET": "short"})
    assert berth({**TORCHRUN, "MASTER_ADDR": "127.0.0.1"}).secret
    with pytest.raises(ConfigError, match="5 characters"):
        berth({**TORCHRUN, "MASTER_ADDR": "localhost", "ASERVE_SECRET": "short"})


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("a", "a"),
        ("a,b", "a"),
        ("gpu[07-09,12],login", "gpu07"),
        ("gpu[3]", "gpu3"),
        ("node[1-2]-ib,x", "node1-ib"),
    ],
)
def test_the_first_of_a_node_list(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


def test_an_empty_node_list_is_refused() -> None:
    with pytest.raises(ConfigError, match="no node"):
        first_host(" ")


def test_no_launcher_without_a_mark() -> None:
    assert [launcher.name for launcher in LAUNCHERS if not launcher.marks] == []
