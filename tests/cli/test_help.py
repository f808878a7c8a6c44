"""The help of every command, and options that do not concern a model."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import patchloom
from patchloom.cli.main import _parser, main


def commands(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """The parsers of all commands that can be run, those of `search` and `data` included."""
    nested = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not nested:
        yield parser
    for action in nested:
        for command in action.choices.values():
            yield from commands(command)


COMMANDS = list(commands(_parser()))
NAMES = [parser.prog for parser in COMMANDS]


@pytest.mark.parametrize("parser", COMMANDS, ids=NAMES)
def test_every_option_is_in_a_group_of_its_subject(parser: argparse.ArgumentParser) -> None:
    flags = [flag for action in parser._optionals._group_actions for flag in action.option_strings]
    assert set(flags) <= {"-h", "--help", "--debug"}


@pytest.mark.parametrize("parser", COMMANDS, ids=NAMES)
def test_help_ends_with_one_or_two_examples_that_can_be_pasted(parser: argparse.ArgumentParser) -> None:
    title, *examples = (parser.epilog or "").splitlines()
    assert title == "examples:"
    assert 1 <= len(examples) <= 2
    for example in examples:
        options, rest = _parser().parse_known_args(shlex.split(example)[1:])
        assert example.strip().startswith(parser.prog)
        assert callable(options.run)
        assert all("=" in word for word in rest)  # settings, which the command itself reads


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier, which has neither a beam nor a collection."""
    path = tmp_path_factory.mktemp("weights") / "model.safetensors"
    torch.manual_seed(0)
    patchloom.save(patchloom.create_model("deit_nano", num_classes=10, img_size=16, depth=1), path)
    return path


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        (["evaluate", "WEIGHTS", "digits", "--beam", "2"], "--beam"),
        (["predict", "WEIGHTS", "photo.png", "--collection", "digits"], "--collection"),
        (["predict", "WEIGHTS", "photo.png", "--file", "text.en"], "--file"),
    ],
)
def test_an_option_for_models_of_another_task_is_refused(
    words: list[str], flag: str, weights: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main([str(weights) if word == "WEIGHTS" else word for word in words])
    assert end.value.code == 2
    assert capsys.readouterr().err == f"patchloom: {flag} has no effect on this model: leave it out.\n"


def test_an_option_of_two_tasks_says_what_it_means_for_each() -> None:
    parser = next(parser for parser in COMMANDS if parser.prog == "patchloom evaluate")
    text = " ".join(parser.format_help().split())
    assert (
        "for --probe knn (default: 10); pre-trained models: 20 by default; Grafit models: by default chosen by" in text
    )


def test_commands_and_flags_change_only_on_purpose() -> None:
    # Scripts depend on them. If this fails on purpose, edit tests/reference/commands.txt and say so in CHANGELOG.md.
    recorded = (Path(__file__).parents[1] / "reference" / "commands.txt").read_text().splitlines()
    flags = {parser.prog: sorted({flag for a in parser._actions for flag in a.option_strings}) for parser in COMMANDS}
    assert [" ".join([command, *flags[command]]) for command in sorted(flags)] == recorded


@pytest.mark.parametrize("name", ["models", "train", "evaluate", "predict", "search", "serve", "data"])
def test_a_command_is_parsed_alone_as_among_all(name: str) -> None:
    alone = {parser.prog: parser.format_help() for parser in commands(_parser(name))}
    among = {parser.prog: parser.format_help() for parser in COMMANDS}
    assert alone == {prog: among[prog] for prog in alone}
    assert any(prog.split()[1] == name for prog in alone)
    assert len(alone) < len(among)


@pytest.mark.parametrize("name", ["distill", "--help", "predcit", None])
def test_other_words_are_looked_up_among_all_commands(name: str | None) -> None:
    assert [parser.prog for parser in commands(_parser(name))] == NAMES
