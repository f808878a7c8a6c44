"""Which output of a model belongs to which class of the data: by name, by ImageNet's names, by index, or by order.

Class orders differ between programs, and silently wrong labels look like a bad model. So names decide wherever both
sides have them; an order alone is used only if the numbers of classes are equal, and is always reported.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from patchloom.errors import PatchloomError
from patchloom.models.imagenet import CLASSES, imagenet_order, imagenet_places


def check_class_map(class_map: Any, names: Sequence[str], where: str) -> None:
    """A class map translates class names of the data into class names or indices of the model."""
    if not isinstance(class_map, Mapping) or not all(isinstance(name, str | int) for name in class_map.values()):
        raise PatchloomError(
            "A class map is a JSON object from class names of the data to class names or indices of the model, "
            'such as {"cat": 3}.'
        )
    if unknown := [name for name in class_map if name not in names]:
        raise PatchloomError(f"The class map names classes that {_inside(where)} does not have: {_some(unknown)}.")


def match_names(
    data: Sequence[str],
    model: Sequence[str] | None,
    num_classes: int,
    used: Collection[int] | None = None,
    class_map: Mapping[str, str | int] | None = None,
    who: str = "The model",
    where: str = "The data",
    advice: str = "--class-map FILE.json translates names.",
) -> tuple[dict[int, int], str | None]:
    """For each class of the data that is `used` (default: all), its place among the model's outputs; and a sentence
    that says how the names were interpreted where the model's are unknown.

    data, model   class names; of a model without any, None
    num_classes   outputs of the model, whether they have names or not
    class_map     class names of the data -> class names or indices of the model
    who, where    how messages call the model and the data
    advice        what messages suggest

    Raises:
        PatchloomError: a class that is used has no place, or the class map is wrong.
    """
    check_class_map(class_map or {}, data, where)
    targets = {name: str(target) for name, target in (class_map or {}).items()}
    labels = sorted(range(len(data)) if used is None else used)
    wanted = {label: targets.get(data[label], data[label]) for label in labels}
    places, message = _known_places(model, num_classes, list(wanted.values()))
    if message and targets:
        message = "The values of --class-map are numbers: they are taken as class indices, from 0."
    if places is not None:
        unknown = [name for name in wanted.values() if name not in places]
        if unknown:
            shown = f"It knows {_some(model)}." if model else f"Its indices are 0 to {num_classes - 1}."
            raise PatchloomError(
                f"{where} has classes that {_inside(who)} does not know: {_some(unknown)}. {shown} {advice}"
            )
        return {label: places[name] for label, name in wanted.items()}, message
    if targets:
        wrong = [name for name in wanted.values() if not _is_number(name)]
        raise PatchloomError(
            f"{who} has {num_classes} classes without names, so the values of --class-map must be indices from 0 to "
            f"{num_classes - 1}, not {_some(wrong)}."
        )
    if len(data) != num_classes:
        raise PatchloomError(
            f"{who} has {num_classes} classes without names, {_inside(where)} has {len(data)}, whose "
            f"names are not indices. {advice}"
        )
    message = (
        f"{who} has no class names: the {num_classes} classes of the data are taken in sorted order, "
        f"{data[0]!r} as index 0. {advice}"
    )
    return {label: label for label in labels}, message


def _known_places(
    model: Sequence[str] | None, num_classes: int, wanted: Sequence[str]
) -> tuple[dict[str, int] | None, str | None]:
    """Index by name, with how the names were interpreted; None where only an order is left.

    In this order: the model's own names, numbers as indices, ImageNet's names.
    """
    numbers = {name: int(name) for name in wanted if _is_number(name)}
    _refuse_equal_numbers(numbers)
    # Reversed, so that of two outputs with the same name the first one wins.
    own = {name: i for i, name in reversed(list(enumerate(model or ())))}
    order = imagenet_order(model)
    if model is not None and (order is None or all(name in own for name in wanted)):
        return own, None
    # also for ImageNet's classes: the folders of ImageNet-V2 are 0 to 999
    if wanted and all(name in numbers for name in wanted):
        row = None if order is None else {index: i for i, index in enumerate(order)}
        # `order` maps the model's outputs to ImageNet's indices, `row` is its inverse.
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
    places = _known_places(model, num_classes, data)[0]
    if places is None:
        return tuple(data)
    placed = {places[name]: name for name in data if name in places}
    return tuple(placed[i] for i in range(num_classes)) if len(placed) == num_classes else None


def _refuse_equal_numbers(numbers: Mapping[str, int]) -> None:
    """Two folders of one index, such as 1 and 01, would be merged."""
    first: dict[int, str] = {}
    for name, number in numbers.items():
        if first.setdefault(number, name) != name:
            raise PatchloomError(f"The class names {first[number]!r} and {name!r} are the same number: rename one.")


def _inside(subject: str) -> str:
    """A subject such as "The data" in the middle of a sentence; a path stays as it is."""
    return f"t{subject[1:]}" if subject.startswith("The ") else subject


def _is_number(name: str) -> bool:
    return name.isascii() and name.isdigit()


def _some(names: Sequence[str] | None, most: int = 10) -> str:
    names = names or ()
    return ", ".join(names[:most]) + (" ..." if len(names) > most else "")
