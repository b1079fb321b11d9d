"""`--config FILE.toml`: every option of every verb, what goes before what, and what is refused."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import typer

from headway.cli import VERBS, main
from headway.cli.command import command_of

DOCS = Path(__file__).parents[2] / "docs"


def read(verb: str, *args: str) -> dict[str, Any]:
    """The options of a verb, as it would run."""
    return dict(command(verb).make_context(verb, list(args)).params)


def command(verb: str) -> Any:
    return command_of(importlib.import_module(f"headway.cli.{verb}").app, (verb, VERBS))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "headway.toml"


def test_the_command_line_goes_before_the_file_and_the_file_before_defaults(file: Path) -> None:
    file.write_text(
        'serve.model = ["demo", "other"]\nserve.port = 8001\nserve.max-rows = 4\nserve.pack_cache = false\n'
        'serve.strict = true\nserve.kv-cache-gib = 2\nserve.cors-origin = "https://a.example"\n[chat]\nseed = 3\n'
    )
    found = read("serve", "--config", str(file), "--port", "9")
    assert found["port"] == 9 and found["max_rows"] == 4 and found["kv_cache_gib"] == 2.0
    assert list(found["model"]) == ["demo", "other"] and list(found["cors_origin"]) == ["https://a.example"]
    assert found["strict"] is True and found["pack_cache"] is False
    assert found["host"] == read("serve")["host"]


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb not in ("plan", "cache")])
def test_every_option_of_every_verb_can_be_written(verb: str, file: Path) -> None:
    """Written as its own default, it is the same command."""
    parameters = command(verb).params
    needed = [
        word for one in parameters if one.required
        for word in ([one.opts[0]] if one.param_type_name == "option" else []) + [__file__]
    ]  # fmt: skip
    plain = read(verb, *needed)
    lines = [f"[{verb}]"]
    for one in parameters:
        default = plain.get(one.name)
        if one.expose_value and isinstance(default, bool | int | float | str):
            flag = max(one.opts, key=len).removeprefix("--")
            lines.append(f"{flag} = {str(default).lower() if isinstance(default, bool) else repr(default)}")
    file.write_text("\n".join(lines))
    assert read(verb, *needed, "--config", str(file)) == plain


def test_commands_of_a_verb_have_tables_of_their_own(file: Path) -> None:
    file.write_text('[simulate]\nrate = 3\n[simulate.lesson]\nname = "none such"\n')
    assert read("simulate", "--config", str(file), "lesson")["rate"] == 3.0
    with pytest.raises(SystemExit):
        main(["simulate", "--config", str(file), "lesson"])


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("serve.prot = 1", "serve.prot: there is none in [serve]; did you mean port?"),
        ("serve.max_row = 1", "did you mean max_rows?"),
        ("[serv]\nport = 1", "serv: it holds a table per verb; did you mean serve?"),
        ("port = 1", "port: it holds options in the table of a verb"),
        ("serve = 1", "serve is 1; accepted: a table, [serve]"),
        ("serve.port = true", "serve.port: True is not a text or a number"),
        ("serve.port = 8.5", "serve.port: '8.5' is not a valid int"),
        ("serve.port = [1]", "serve.port: [1] is not a text or a number"),
        ('serve.strict = "yes"', "serve.strict: 'yes' is not true or false"),
        ("serve.max-rows = 1\nserve.max_rows = 2", "serve.max_rows stands twice"),
        ("serve.help = true", "serve.help: there is none"),
        ("serve.port = 1\nserve.port = 2", "is no TOML"),
        pytest.param("serve.port = " + "[" * 5000 + "]" * 5000, "is no TOML", id="nested"),
        pytest.param("serve.port = " + "9" * 6000, "is no TOML", id="a long number"),
        ('serve.chat-template = "a\\u0000b"', "holds a NUL character"),
        ("serve.api_key = 'k'", "did you mean api_key_file?"),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(
    text: str, problem: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text(text)
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--config", str(file)])
    shown = capsys.readouterr().err
    assert ended.value.code == 2 and problem in shown and shown.count("\n") == 1
    assert shown.startswith(f"headway serve: --config: {file}")


def test_a_file_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    (tmp_path / "large").write_bytes(b"#" * (2 << 20))
    for name, problem in (("none", "cannot be read"), ("binary", "no TOML"), ("large", "larger than")):
        with pytest.raises(SystemExit):
            main(["serve", "--config", str(tmp_path / name)])
        assert problem in capsys.readouterr().err


@pytest.mark.parametrize("page", ["serve.md", "deploy.md"])
def test_the_files_of_the_docs_are_read(page: str, file: Path) -> None:
    blocks = re.findall(r"```toml\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        file.write_text(block)
        found = read("serve", "--config", str(file))
        assert found["model"] and found["api_key_file"]


def test_a_required_argument_may_stand_in_the_file(file: Path) -> None:
    app = typer.Typer()

    @app.command()
    def demo(what: str, times: int = 1) -> None:
        assert (what, times) == ("x", 2)

    file.write_text('demo = {what = "x", times = 2}')
    command_of(app, ("demo", VERBS))(args=["--config", str(file)], prog_name="demo", standalone_mode=False)


def test_each_question_of_plan_has_a_table(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text('[plan.step]\nmodel = "llama-3.1-8b"\nhardware = "h100-sxm"\nbatch = 64\n')
    with pytest.raises(SystemExit) as ended:
        main(["plan", "step", "--config", str(file), "--context", "4096"])
    assert ended.value.code == 0 and "64" in capsys.readouterr().out
    file.write_text("[plan.stepp]\nbatch = 64\n")
    with pytest.raises(SystemExit):
        main(["plan", "step", "--config", str(file)])
    assert "did you mean step?" in capsys.readouterr().err
