"""Write the tables of the documentation from the registries: `python docs/tables.py`.

A page marks where a table goes with `<!-- table: KIND FAMILY -->` and `<!-- end -->`; what stands between the two is
replaced. The numbers on a page are therefore those of the code, and a test keeps them so.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

import patchloom  # noqa: F401 - fills the registry
from patchloom.models.complexity import complexity
from patchloom.models.registry import Entry, build, entries
from patchloom.recipes.options import ClassificationOptions
from patchloom.recipes.recipe import Recipe
from patchloom.recipes.registry import find_recipe, list_recipes
from patchloom.weights.hub import published_tags

DOCS = Path(__file__).parent
PRINTED_AT = 224  # pixels, the resolution of the papers' figures
REGION = re.compile(
    r"(?P<start><!-- table: (?P<kind>\w+)(?: (?P<family>\w+))? -->\n).*?(?P<end><!-- end -->)", re.DOTALL
)
SHAPE = {"patch_size": "patch", "dim": "dim", "depth": "depth", "branches": "branches", "heads": "heads"}


def main() -> None:
    for page in sorted(DOCS.glob("*.md")):
        page.write_text(rewritten(page.read_text(encoding="utf-8")), encoding="utf-8")


def rewritten(text: str) -> str:
    """A page with its marked regions filled."""

    def fill(region: re.Match[str]) -> str:
        table = TABLES[region["kind"]](region["family"])
        return f"{region['start']}\n{table}\n\n{region['end']}"

    return REGION.sub(fill, text)


def all_models(_: str | None) -> str:
    """Every listed model beside what its paper prints."""
    head = ("model", "params, M", "paper", "MACs, G", "paper", "source", "note")
    return markdown(head, [paper_row(entry) for entry in entries()], left=(0, 5, 6))


def paper_row(entry: Entry) -> tuple[str, ...]:
    paper = entry.paper
    return (
        f"`{entry.config.name}`",
        millions(entry),
        printed(paper.params),
        billions(entry),
        printed(paper.macs),
        paper.source,
        paper.note,
    )


def printed(value: float | None) -> str:
    return "" if value is None else str(value)


def variants(family: str | None) -> str:
    """The models of one family: what differs between their shapes, and what they cost."""
    listed = [entry for entry in entries() if entry.config.family == family]
    columns = [name for name in SHAPE if len({shape(entry, name) for entry in listed}) > 1]
    rows = [
        (f"`{entry.config.name}`", *(shape(entry, name) for name in columns), millions(entry), billions(entry))
        for entry in listed
    ]
    return markdown(("model", *(SHAPE[name] for name in columns), "params, M", "MACs, G"), rows, left=(0,))


def all_recipes(_: str | None) -> str:
    """Every recipe with the values for its paper's reference model."""
    head = ("recipe", "optimizer, rate", "batch", "epochs", "weight decay", "loss", "mixup, CutMix")
    rows = [recipe_row(find_recipe(name)) for name in list_recipes(ClassificationOptions) if "@" not in name]
    return markdown((*head, "augmentation, crop", "drop path"), rows, left=(0, 1, 5, 6, 7))


def recipe_row(recipe: Recipe) -> tuple[str, ...]:
    optimizer = {"adamw": "AdamW", "lamb": "LAMB", "sgd": "SGD"}[recipe.optimizer]
    head = f", head {recipe.head_lr:g}" if recipe.head_lr else ""
    smoothing = f", smoothing {recipe.label_smoothing:g}" if recipe.label_smoothing else ""
    policy = {"rand": f"RandAugment {recipe.magnitude:g}", "three": "3-Augment"}.get(
        recipe.augmentation, recipe.augmentation
    )
    return (
        f"`{recipe.name}`",
        f"{optimizer}, {recipe.lr:g}{head}",
        str(recipe.batch_size),
        str(recipe.epochs),
        f"{recipe.weight_decay:g}",
        recipe.loss.upper() + smoothing,
        f"{recipe.mixup:g}, {recipe.cutmix:g}",
        f"{policy}, {recipe.crop.upper()}",
        f"{recipe.drop_path:g}",
    )


def all_tags(_: str | None) -> str:
    """The published tags of timm's catalogue, model by model."""
    rows = []
    for entry in entries():
        names = published_tags(entry.config.name)
        tags = sorted({name.split(".")[1] for name in names})
        sizes = {
            tag: sorted({int(n.split(".")[0].split("_")[-1]) for n in names if n.endswith(f".{tag}")}) for tag in tags
        }
        rows += [(f"`{entry.config.name}.{tag}`", ", ".join(map(str, sizes[tag]))) for tag in tags]
    return markdown(("tag", "image sizes"), rows, left=(0, 1))


def text_models(_: str | None) -> str:
    """The encoder-decoders: their sizes and numbers of parameters."""
    rows = []
    for entry in entries(kind="text"):
        config: Any = entry.config
        with torch.device("meta"):
            network = build(config)
        count = sum(parameter.numel() for parameter in network.parameters())
        tables = config.vocab_size * config.dim  # one table embeds source and target and gives the logits
        sizes = (config.depth, config.dim, config.hidden, config.max_length, f"{config.vocab_size:,}")
        rows.append((f"`{config.name}`", *sizes, f"{count / 1e6:.2f}", f"{(count - tables) / 1e6:.2f}"))
    head = ("model", "depth", "dim", "FFN", "max. length", "tokens", "params, M", "without embeddings, M")
    return markdown(head, rows, left=(0,))


TABLES: dict[str, Callable[[str | None], str]] = {
    "text": text_models,
    "tags": all_tags,
    "models": all_models,
    "variants": variants,
    "recipes": all_recipes,
}


def shape(entry: Entry, name: str) -> str:
    return str(getattr(entry.config, name, ""))


def resolution(entry: Entry) -> int:
    """Where the cost is counted: at the papers' resolution, or at its own for a network made for smaller images."""
    return min(PRINTED_AT, *entry.config.img_size)


def millions(entry: Entry) -> str:
    return f"{complexity(entry.config, resolution(entry)).params / 1e6:.2f}"


def billions(entry: Entry) -> str:
    pixels = resolution(entry)
    macs = f"{complexity(entry.config, pixels).macs / 1e9:.2f}"
    return macs if pixels == PRINTED_AT else f"{macs} at {pixels}"


def markdown(head: tuple[str, ...], rows: Iterable[tuple[Any, ...]], left: tuple[int, ...]) -> str:
    """A table whose columns are aligned to the right, except those in `left`."""
    rule = tuple(":--" if i in left else "--:" for i in range(len(head)))
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in (head, rule, *rows))


if __name__ == "__main__":
    main()
