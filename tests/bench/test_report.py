"""The report keeps the parts it does not renew, and makes the peers' part from a record."""

import argparse
import pathlib

import pytest

from aserve.testing.tiny import write_tiny_model
from bench import loads, peers, record, report

TEXT = "# What\n\n## One\n\nfirst\n\n## Two\n\nsecond\n## not a heading of ours\n"


def test_a_part_reaches_to_the_next_heading() -> None:
    assert report.part_of(TEXT, "One") == "## One\n\nfirst\n"
    assert report.part_of(TEXT, "Three") == ""


def whole_record() -> record.Record:
    """Every row measured, so that nothing is left to start."""
    found = record.new({"model": "smollm2", "threads": 2, "scale": 1.0})
    names = [f"{peer} {option}" for peer, option in OPTIONS] + ["aserve"]
    for number, name in enumerate(names, 1):
        entry = record.open_engine(found, name, name.split()[0])
        for row in loads.rows_of([1, 8, 32]):
            entry["samples"][row.name] = [100.0 * number]
        entry |= {"version": f"{name} 1", "command": [name], "idle_cores": 0.0, "is_paused": False}
    return found


OPTIONS = [("llamacpp", "t1"), ("llamacpp", "t2"), ("vllm", "bf16"), ("transformers", "bf16")]
OPTIONS += [("openvino", kind) for kind in ("fp16", "int8", "int4")]


def test_a_whole_record_becomes_the_peers_part_without_starting_anything(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_tiny_model(tmp_path / "tiny")
    monkeypatch.setattr(peers.fetch, "resolve", lambda name: model)
    monkeypatch.setattr(peers.os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr(report, "RESULTS", tmp_path / "RESULTS.md")
    report.RESULTS.write_text("## HTTP streaming\n\nkept\n")
    file = tmp_path / "peers.json"
    record.save(file, whole_record())
    report.main(argparse.Namespace(only=["peers"], rounds=1, weights="", merge=file))
    text = report.RESULTS.read_text()
    assert "| prefill of 2048, tok/s | 800 | 200 (t2) | 300 (bf16) | 400 (bf16) |" in text
    assert "| decode, 32 streams, tok/s | 800 (aserve) | 700 (openvino int4) | 1.14x |" in text
    assert "--merge peers.json`" in text
    assert str(tmp_path) not in text
    assert text.endswith("## HTTP streaming\n\nkept\n")
    assert "- llamacpp t1: llamacpp t1 1: `llamacpp t1`" in text
