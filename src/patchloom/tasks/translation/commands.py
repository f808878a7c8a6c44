"""`patchloom translate`, and `evaluate` and `predict` for models that translate. Heavy imports are inside functions."""

from __future__ import annotations

import argparse
from typing import Any

from patchloom.errors import PatchloomError
from patchloom.tasks.commands import Command, Output, Tool, require_data


def _add_translate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "data", metavar="DATA", help="folder with train.en, train.de, val.en and val.de, as text or .gz files"
    )
    parser.add_argument_group("data").add_argument(
        "--pair", required=True, metavar="SOURCE-TARGET", help="source and target language, such as en-de"
    )
    group = parser.add_argument_group("model and recipe")
    group.add_argument(
        "--model", required=True, metavar="NAME", help="model name: resmlp_mt_6, transformer_mt_6, resmlp_mt_nano, ..."
    )
    group.add_argument(
        "--recipe",
        metavar="NAME",
        help="recipe name (default: that of the model's family, with @small for fewer than a million sentence pairs)",
    )
    group.add_argument(
        "--vocabulary", metavar="FILE", help="sentencepiece model (default: trained on the training split)"
    )


def _plan(options: argparse.Namespace) -> Any:
    from patchloom.recipes.changes import parse_words
    from patchloom.recipes.translation import TranslationOptions
    from patchloom.tasks.translation.plans import plan_translation

    changes, model_options = parse_words(options.settings, TranslationOptions)
    return plan_translation(
        options.data, options.pair, options.model, options.recipe, options.vocabulary, changes, model_options
    )


def _add_search(parser: argparse.ArgumentParser) -> Any:
    group = parser.add_argument_group("translation models")
    group.add_argument(
        "--beam", type=int, metavar="N", help="number of hypotheses in the beam search (default: that of the recipe)"
    )
    group.add_argument(
        "--length-penalty",
        metavar="X",
        type=float,
        help="exponent X of the score log p / length^X of a hypothesis (default: that of the recipe)",
    )
    return group


def _add_predict(parser: argparse.ArgumentParser) -> None:
    group = _add_search(parser)
    group.add_argument("--file", metavar="FILE", help="text to translate, one sentence per line")


def _evaluate(options: argparse.Namespace) -> Output:
    from patchloom.tasks.translation.evaluate import evaluate

    require_data(options)
    found = evaluate(
        options.model,
        options.data,
        split=options.split,
        beam=options.beam,
        length_penalty=options.length_penalty,
        device=options.device,
    )
    lines = [
        f"{found['pair']} on {found['count']} sentences of {found['split']}, beam {found['beam']}:",
        f"  BLEU {found['bleu']:.2f}   {found['signatures']['bleu']}",
        f"  chrF {found['chrf']:.2f}   {found['signatures']['chrf']}",
        f"  BLEU of tokens {found['bleu_tokenized']:.2f}   loss {found['loss']:.4f} per token",
    ]
    return Output(found, lines)


def _predict(options: argparse.Namespace) -> Output:
    from patchloom.tasks.translation.predict import predict, predict_lines
    from patchloom.tasks.translation.text import read_lines

    if options.file is not None and options.inputs:
        raise PatchloomError("Give sentences or --file FILE, not both.")
    search = {"beam": options.beam, "length_penalty": options.length_penalty, "device": options.device}
    if options.file is None:
        rows = predict(options.model, options.inputs, **search)
    elif lines := read_lines(options.file):
        rows = predict_lines(options.model, lines, **search)
    else:
        raise PatchloomError(f"{options.file} has no lines.")
    return Output(rows, [row["translation"] for row in rows])


COMMANDS = (
    Command(
        "translate",
        "train a network that translates text",
        "patchloom translate DATA --pair en-de --model M [--recipe R] [--out RUN] [key=value ...]",
        "Train an encoder-decoder on parallel text, evaluate it and write a report. key=value changes a field of "
        "the recipe (epochs=10, batch_tokens=4000) or an option of the model (model.max_length=128).",
        ("patchloom translate multi30k/ --pair en-de --model resmlp_mt_nano --out runs/en-de",),
        _add_translate,
        _plan,
    ),
)
EVALUATE = Tool(_add_search, _evaluate)
PREDICT = Tool(_add_predict, _predict)
