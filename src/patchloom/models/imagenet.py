"""ImageNet's 1000 classes in the order of published heads: WordNet ids (ILSVRC 2012's folder names) and names."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

CLASSES = 1000


@cache
def _table() -> tuple[tuple[str, str], ...]:
    """(WordNet id, name) of each class; a name is the synset's first lemma, with an addition where two are equal."""
    text = Path(__file__).with_name("imagenet_classes.txt").read_text(encoding="utf-8")
    return tuple((wordnet_id, name) for wordnet_id, name in (line.split(" ", 1) for line in text.splitlines()))


def imagenet_ids() -> tuple[str, ...]:
    """n01440764 and so on: the names of ImageNet's folders."""
    return tuple(wordnet_id for wordnet_id, _ in _table())


def imagenet_names() -> tuple[str, ...]:
    """tench and so on: what people call the classes."""
    return tuple(name for _, name in _table())


@cache
def imagenet_places() -> dict[str, int]:
    """Index of a class by its WordNet id, its name, or its name in lower case or with _ for spaces, where unique."""
    places: dict[str, int] = {}
    spellings: dict[str, set[int]] = {}
    for i, (wordnet_id, name) in enumerate(_table()):
        places[wordnet_id] = places[name] = places[name.replace(" ", "_")] = i
        for plain in (name.lower(), name.lower().replace(" ", "_")):
            spellings.setdefault(plain, set()).add(i)
    return {**{plain: min(several) for plain, several in spellings.items() if len(several) == 1}, **places}


def imagenet_order(names: Sequence[str] | None) -> list[int] | None:
    """For each class name its ImageNet index, where the names are ImageNet's 1000 classes in any order; else None."""
    places = [imagenet_places().get(name) for name in names or ()]
    found = [place for place in places if place is not None]
    return found if len(places) == CLASSES == len(set(found)) else None
