"""Which output of a model belongs to which class of the data: by name, by ImageNet's names, by index, or by order."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from patchloom.errors import PatchloomError
from patchloom.models.imagenet import CLASSES, imagenet_order, imagenet_places


def check_class_map(class_map: Any, names: Sequence[str], where: str) -> None:
    """A class map translates class names of the data into class names or indices of the model."""
    if not isinstance(class_map, Mapping) or not all(isinstance(name, str) for name in class_map.values()):
        raise PatchloomError("A class map says for names in the data which names of the model they are.")
    if class_map and not set(class_map) & set(names):
        raise PatchloomError(
            f"The class map has none of the classes of {where}: it has {_some(list(class_map))}, the data has "
            f"{_some(names)}."
        )


def match_names(
    data: Sequence[str],
    model: Sequence[str] | None,
    num_classes: int,
    used: Collection[int] | None = None,
    class_map: Mapping[str, str] | None = None,
    who: str = "The model",
    where: str = "The data",
) -> tuple[dict[int, int], str | None]:
    """For each class of the data that is `used` (default: all), its place among the model's outputs; and a sentence
    that says how the names were interpreted where the model's are unknown.

    data, model   class names; of a model without any, None
    class_map     class names of the data -> class names or indices of the model
    """
    class_map = class_map or {}
    check_class_map(class_map, data, where)
    labels = sorted(range(len(data)) if used is None else used)
    wanted = {label: class_map.get(data[label], data[label]) for label in labels}
    places, message = _known_places(model, num_classes, list(wanted.values()))
    if places is not None:
        unknown = [name for name in wanted.values() if name not in places]
        if unknown:
            shown = f"It knows {_some(model)}." if model else f"Its indices are 0 to {num_classes - 1}."
            raise PatchloomError(
                f"{where} has classes that {who[0].lower()}{who[1:]} does not know: {_some(unknown)}. {shown} "
                f"--class-map FILE.json translates names."
            )
        return {label: places[name] for label, name in wanted.items()}, message
    if class_map:
        wrong = [name for name in wanted.values() if not _is_number(name)]
        raise PatchloomError(
            f"{who} has {num_classes} classes without names, so a class map leads to indices from 0 to "
            f"{num_classes - 1}, not to {_some(wrong)}."
        )
    if len(data) != num_classes:
        raise PatchloomError(
            f"{who} has {num_classes} classes without names, {where} has {len(data)}, whose names are no indices. "
            f"--class-map FILE.json says which index each class has."
        )
    message = (
        f"{who} has no class names: the {num_classes} classes of the data are taken in sorted order, "
        f"{data[0]!r} as index 0. --class-map FILE.json gives another order."
    )
    return {label: label for label in labels}, message


def _known_places(
    model: Sequence[str] | None, num_classes: int, wanted: Sequence[str]
) -> tuple[dict[str, int] | None, str | None]:
    """Index by name, with how the names were interpreted; None where only an order is left."""
    numbers = {name: int(name) for name in wanted if _is_number(name)}
    own = {name: i for i, name in reversed(list(enumerate(model or ())))}
    order = imagenet_order(model)
    if model is not None and (order is None or all(name in own for name in wanted)):
        return own, None
    if wanted and all(
        name in numbers for name in wanted
    ):  # of ImageNet's classes too: ImageNet V2's folders are 0 to 999
        row = None if order is None else {index: i for i, index in enumerate(order)}
        valid = {name: row[i] if row else i for name, i in numbers.items() if i < num_classes}
        whose = "ImageNet's " if order else ""
        return valid, f"The class names of the data are numbers: they are taken as {whose}class indices, from 0."
    if order is not None:
        row = {index: i for i, index in enumerate(order)}
        return {**{name: row[index] for name, index in imagenet_places().items()}, **own}, None
    if num_classes == CLASSES and wanted and all(name in imagenet_places() for name in wanted):
        message = "The model has 1000 classes without names: they are taken as ImageNet's, in ImageNet's order."
        return imagenet_places(), message
    return None, None


def same_classes(model: Sequence[str] | None, data: Sequence[str], num_classes: int) -> tuple[str, ...] | None:
    """The data's class names in the order of the model's outputs, where both have the same classes; else None."""
    if len(data) != num_classes:
        return None
    if model is None and (num_classes != CLASSES or not all(name in imagenet_places() for name in data)):
        return tuple(sorted(data, key=int) if all(map(_is_number, data)) else data)
    places = _known_places(model, num_classes, data)[0] or {}
    placed = {places[name]: name for name in data if name in places}
    return tuple(placed[i] for i in range(num_classes)) if len(placed) == num_classes else None


def _is_number(name: str) -> bool:
    return name.isascii() and name.isdigit()


def _some(names: Sequence[str] | None, most: int = 10) -> str:
    names = names or ()
    return ", ".join(names[:most]) + (" ..." if len(names) > most else "")
