"""What the command says and answers without any model: help, refusals, the matrix, checks."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from aserve import cli
from aserve.cli import outcome
from aserve.errors import ConfigError, RequestError
from tests import tree

COMMAND = (sys.executable, "-m", "aserve")


def run(*given: str) -> int:
    try:
        return cli.main(given)
    except SystemExit as error:  # argparse's own way out
        return int(error.code or 0)


@pytest.mark.parametrize("name", sorted(cli.COMMANDS))
def test_every_command_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(name, "--help") == 0
    out, err = capsys.readouterr()
    assert f"aserve {name}" in out
    assert err == ""


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    out = capsys.readouterr().out
    assert all(f"\n  {name} " in out for name in cli.COMMANDS)


@pytest.mark.parametrize("given", [(), ("frobnicate",), ("bench", "frobnicate"), ("bench",)])
def test_what_is_no_command_is_refused_on_stderr(
    given: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*given) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "usage" in err


def test_help_imports_no_torch() -> None:
    script = (
        "import sys, aserve.cli\n"
        "for given in (['--help'], ['serve', '--help'], ['check'], ['features']):\n"
        "    try: aserve.cli.main(given)\n"
        "    except SystemExit: pass\n"
        "heavy = {'torch', 'numpy', 'trio', 'starlette', 'transformers'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize("path", sorted((tree.ROOT / "conf").glob("*.toml")), ids=lambda p: p.name)
def test_every_shipped_configuration_is_accepted(
    path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("check", "--config", str(path)) == 0
    assert capsys.readouterr().out == f"{path} is accepted\n"


def test_check_lists_all_findings_at_once(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.toml"
    path.write_text('[layout]\ntp = 2\ndp = 3\n[cache]\npage_sizes = 8\n[server]\nport = "x"\n')
    assert run("check", "--config", str(path), "--cache.page-size=0", "--json") == 2
    out, _ = capsys.readouterr()
    answer = json.loads(out)
    assert answer["accepted"] is False
    text = "\n".join(answer["findings"])
    for named in (
        "layout.tp = 2 cannot",
        "cache.page_sizes",
        "server.port",
        "cache.page_size is 0",
    ):
        assert named in text


def test_check_prints_findings_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("check", "--layout.pp", "0") == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "layout.pp" in err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "finding"),
    [
        (("--layout.tp", "7"), "7 ranks cannot share the"),
        (("--layout.pp", "40"), "layers do not fill layout.pp = 40 stages"),
        (("--layout.pp", "2", "--layout.layers", "90,1"), "are 91 layers, the model has"),
        (("--layout.tp", "2", "--layout.ep", "2"), "this model has no experts"),
        (("--model.context_len", "1000000"), "model.context_len is 1000000"),
        (("--spec.method", "draft"), "give spec.path a smaller model of the tokenizer of"),
        (("--spec.method", "draft", "--spec.path", "nowhere"), "there is no model 'nowhere'"),
        (("--spec.method", "ngram"), ""),
        ((), ""),
    ],
)
def test_check_asks_a_model_that_is_here(
    flags: tuple[str, ...],
    finding: str,
    tiny_model_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run("check", str(tiny_model_path), *flags) == (2 if finding else 0)
    out, err = capsys.readouterr()
    assert finding in err
    assert out == ("" if finding else "this configuration is accepted\n")


@pytest.mark.slow
def test_check_fetches_nothing_and_says_what_it_could_not_see(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for flags in (["--layout.tp", "2"], ["--spec.method", "draft", "--spec.path", "smollm2"]):
        assert run("check", *flags, "--json") == 0
        answer = json.loads(capsys.readouterr().out)
        assert answer["accepted"] is True
        assert "not on this machine" in answer["notes"][0]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["[server", "[server]\nport = 1\nport = 2", "\xff"])
def test_a_file_that_is_no_toml_is_refused(
    text: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "broken.toml"
    path.write_bytes(text.encode("latin-1"))
    assert run("serve", "--config", str(path)) == 2
    assert str(path) in capsys.readouterr().err


def test_a_missing_file_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("check", "--config", "nowhere.toml") == 2
    assert "nowhere.toml: No such file" in capsys.readouterr().err


def test_an_unknown_dotted_flag_names_its_neighbour(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("serve", "--cache.page_sizes", "8") == 2
    assert "did you mean --cache.page_size?" in capsys.readouterr().err


def test_flags_go_over_the_file_and_the_file_over_defaults(
    tmp_path: pathlib.Path,
) -> None:
    from aserve.cli.flags import config_of
    from aserve.cli.serve import parser

    path = tmp_path / "some.toml"
    path.write_text("[cache]\npage_size = 32\nkv_mib_max = 100\n[server]\nport = 1234\n")
    given = ["my-model", "--config", str(path), "--cache.page-size", "8", "--port=99"]
    config = config_of(parser().parse_args(given))
    assert config.model.path == "my-model"
    assert config.cache.page_size == 8
    assert config.cache.kv_mib_max == 100
    assert config.server.port == 99
    assert config.server.host == "127.0.0.1"


def test_features_are_json_when_asked(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("features", "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    by_name = {row["feature"]: row for row in rows}
    assert by_name["prefix cache"]["works"] is True
    assert by_name["tensor parallelism"]["works"] is True
    assert by_name["speculative decoding"]["works"] is True
    assert by_name["prefill/decode disaggregation"]["why"]
    assert run("features") == 0
    assert "| prefix cache | yes |" in capsys.readouterr().out


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0
    assert capsys.readouterr().out.startswith("aserve 0.")


def test_a_reader_that_leaves_is_no_crash() -> None:
    read, write = os.pipe()
    os.close(read)
    process = subprocess.run(
        [*COMMAND, "features"], stdout=write, stderr=subprocess.PIPE, check=False
    )
    os.close(write)
    assert process.returncode == outcome.PIPE_CLOSED
    assert process.stderr == b""


@pytest.mark.parametrize(
    ("closed", "given"),
    [
        (">&-", ["features"]),
        (">&-", ["--help"]),
        ("<&- >&- 2>&-", ["check"]),
        ("2>&-", ["nonsense"]),
    ],
)
def test_a_stream_that_is_closed_leads_nowhere(closed: str, given: list[str]) -> None:
    done = subprocess.run(
        ["/bin/sh", "-c", f'"$@" {closed}', "sh", *COMMAND, *given],
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (2 if given == ["nonsense"] else 0, b"")


def test_the_process_ends_without_a_last_search_for_garbage() -> None:
    script = (
        "import atexit, gc, sys\n"
        "atexit.register(lambda: sys.stderr.write(str(gc.get_freeze_count() > 0)))\n"
        "from aserve.cli import entry\n"
        "sys.argv = ['aserve', '--version']\n"
        "entry()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stderr == "True"


def raising(error: BaseException) -> int:
    def command() -> int:
        raise error

    return outcome.exit_code(command)


def test_errors_are_lines_and_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert raising(ConfigError(["one thing", "another"])) == 2
    assert capsys.readouterr().err == "aserve: one thing\naserve: another\n"
    assert raising(BaseExceptionGroup("", [RequestError("too long")])) == 2
    assert capsys.readouterr().err == "aserve: too long\n"
    assert raising(ConnectionRefusedError(111, "Connection refused")) == 1
    assert raising(KeyboardInterrupt()) == 130
    with pytest.raises(ZeroDivisionError):
        raising(ZeroDivisionError())
    with pytest.raises(ExceptionGroup):
        raising(ExceptionGroup("", [OSError(), ZeroDivisionError()]))


@pytest.mark.parametrize("text", ["1,2,x", "1.5"])
def test_prompt_ids_must_be_numbers(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("generate", "--prompt-ids", text) == 2
    assert "--prompt-ids" in capsys.readouterr().err


def test_prompts_exclude_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("generate", "--prompt", "a", "--chat", "b") == 2
    assert run("generate") == 2
    assert "not allowed with" in capsys.readouterr().err


def test_a_prompt_that_is_not_utf8_is_refused() -> None:
    process = subprocess.run(
        [*COMMAND, "generate", "--prompt", "-"], input=b"\xff\xfe", capture_output=True, check=False
    )
    assert process.returncode == 2
    assert process.stderr == b"aserve: the prompt is not UTF-8\n"


@pytest.mark.parametrize("command", [("generate", "--prompt", "a"), ("chat",)])
@pytest.mark.parametrize(
    ("given", "says"),
    [
        (("--max-tokens", "0"), "max_tokens must be in [1, 2147483647], not 0"),
        (("--temperature", "nan"), "temperature must be finite"),
    ],
)
def test_sampling_that_cannot_be_is_refused_before_a_model_is_looked_for(
    command: tuple[str, ...],
    given: tuple[str, ...],
    says: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(command[0], "./no-such-model", *command[1:], *given) == 2
    assert capsys.readouterr().err == f"aserve: {says}\n"
