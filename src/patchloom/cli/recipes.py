"""`patchloom recipes`: the training recipes and the source of each of their values."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from patchloom.cli.output import JSON_HELP, add_command, print_json, table

if TYPE_CHECKING:
    from patchloom.recipes.recipe import Recipe

_RECOMMENDED = (
    ("new_classes", "fine-tune published weights on your own photos; the default of `patchloom finetune`"),
    ("deit@small", "train from scratch on up to a few thousand images, also on a CPU"),
    ("deit3_1k", "train from scratch on a million images, with GPUs"),
)


def add_parser(commands: Any, shared: argparse.ArgumentParser) -> None:
    parser = add_command(
        commands,
        "recipes",
        shared,
        "list the training recipes, or show one with the source of every value",
        ["patchloom recipes", "patchloom recipes deit3_1k --model deit3_small"],
    )
    parser.add_argument("name", nargs="?", help="recipe to show, such as 'deit' or 'deit@small' (default: list all)")
    group = parser.add_argument_group("output")
    group.add_argument("--model", metavar="NAME", help="show the values for this model, such as 'cait_s36'")
    group.add_argument("--json", action="store_true", help=JSON_HELP)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Print one recipe, or the list of all."""
    from patchloom.models.registry import find_config  # torch is imported only here
    from patchloom.recipes.registry import find_recipe, list_recipes

    model = find_config(options.model) if options.model else None
    if options.name:
        recipe = find_recipe(options.name, model)
        print_json(recipe.to_json()) if options.json else print(_one(recipe))
        return
    recipes = [find_recipe(name, model) for name in list_recipes()]
    print_json([recipe.to_json() for recipe in recipes]) if options.json else print(_list(recipes))


def _list(recipes: Sequence[Recipe]) -> str:
    head = ("recipe", "optimizer", "lr", "batch", "epochs", "loss", "purpose")
    rows = [_row(recipe) for recipe in recipes]
    return "\n".join([*table([("recommended", ""), *_RECOMMENDED]), "", *table([head, *rows])])


def _row(recipe: Recipe) -> tuple[str, ...]:
    length = str(recipe.epochs) if recipe.steps is None else recipe.duration
    loss = getattr(recipe.options, "loss", "-")
    return recipe.name, recipe.optimizer, f"{recipe.lr:g}", recipe.batch_text, length, loss, recipe.summary


def _one(recipe: Recipe) -> str:
    values = recipe.to_json()
    sources = values.pop("sources")
    title = f"{values.pop('name')}: {values.pop('summary')}"
    rows = [(name, _text(value), sources.get(name, "")) for name, value in values.items()]
    return "\n".join([title, "", *table([("field", "value", "source"), *rows])])


def _text(value: Any) -> str:
    if value is None:
        return "not set"
    if isinstance(value, tuple | list):
        return " ".join(map(_text, value)) or "-"
    return f"{value:g}" if isinstance(value, float) else str(value)
