"""Which output belongs to which class of the data."""

from __future__ import annotations

import random

import pytest

from patchloom import PatchloomError
from patchloom.compat import import_timm
from patchloom.models.imagenet import imagenet_ids, imagenet_names, imagenet_order
from patchloom.tasks.classification.classes import match_names, same_classes


def places(data, model, num_classes, **options) -> list[int]:
    got, _ = match_names(data, model, num_classes, **options)
    return [got[label] for label in sorted(got)]


def test_imagenets_table_is_timms() -> None:
    info = import_timm().data.ImageNetInfo("imagenet-1k")
    assert imagenet_ids() == tuple(info.index_to_label_name(i) for i in range(1000))
    assert len(set(imagenet_names())) == 1000
    for wordnet_id, name in zip(imagenet_ids(), imagenet_names(), strict=True):
        assert info.label_name_to_description(wordnet_id).startswith(name.split(" (")[0])


@pytest.mark.parametrize("count", [2, 10, 12, 102, 1000])
def test_numbers_are_indices_in_any_part_of_them(count: int) -> None:
    names = sorted(map(str, range(count)))  # as folders are listed: 0, 1, 10, 11, 2
    got, message = match_names(names, None, count)
    assert [got[i] for i in range(count)] == [int(name) for name in names]
    assert "indices" in str(message)
    some = sorted(random.Random(count).sample(names, count // 2))
    assert places(some, None, count) == [int(name) for name in some]
    assert places([f"{int(name):04d}" for name in some], None, count) == [int(name) for name in some]
    with pytest.raises(PatchloomError, match=f"does not know: {count}"):  # 1 to N is not shifted
        match_names([str(i + 1) for i in range(count)], None, count)


def test_a_class_map_leads_to_indices() -> None:
    assert places("abc", None, 3, class_map={"a": "2", "b": "0", "c": "1"}) == [2, 0, 1]
    assert places("ab", None, 3, class_map={"a": "2", "b": "0"}) == [2, 0]
    assert places(["0", "1", "2"], None, 3, class_map={"0": "1", "1": "0"}) == [1, 0, 2]
    assert places("abc", ("x", "a", "b"), 3, class_map={"c": "x"}) == [1, 2, 0]
    for wrong, word in (({"a": "77", "b": "77", "c": "77"}, "77"), ({"a": "0", "b": "1", "c": "zebra"}, "zebra")):
        with pytest.raises(PatchloomError, match=word):
            match_names("abc", None, 3, class_map=wrong)
    with pytest.raises(PatchloomError, match="does not have: d"):
        match_names("abc", None, 3, class_map={"a": "0", "d": "1"})
    got, message = match_names("ab", None, 2, class_map={"a": 1, "b": 0})  # indices as JSON has them
    assert got == {0: 1, 1: 0}
    assert "values of --class-map" in str(message)


def test_messages_give_the_path_of_the_data_as_it_is() -> None:
    with pytest.raises(PatchloomError, match="2 classes without names, Photos has 3"):
        match_names("abc", None, 2, where="Photos")
    with pytest.raises(PatchloomError, match="classes that Photos does not have: d"):
        match_names("abc", None, 3, class_map={"d": "0"}, where="Photos")
    with pytest.raises(PatchloomError, match="Photos has classes that the model does not know: c"):
        match_names("abc", ("a", "b"), 2, where="Photos")


def test_two_folders_of_one_number_are_refused() -> None:
    with pytest.raises(PatchloomError, match="'1' and '01' are the same number"):
        match_names(["1", "01", "2"], None, 3)


def test_words_are_taken_in_order_or_refused() -> None:
    got, message = match_names(["ant", "bee"], None, 2)
    assert got == {0: 0, 1: 1}
    assert "sorted order" in str(message)
    with pytest.raises(PatchloomError, match="3 classes without names"):
        match_names(["ant", "bee"], None, 3)


def test_imagenets_classes_by_id_name_and_number() -> None:
    ids, names = imagenet_ids(), imagenet_names()
    chosen = [7, 134, 264, 474, 517, 639]
    for spelled in (ids, names, [name.replace(" ", "_") for name in names], list(map(str, range(1000)))):
        assert places([spelled[i] for i in chosen], names, 1000) == chosen
        assert places([spelled[i] for i in chosen], ids[::-1], 1000) == [999 - i for i in chosen]
        assert places([spelled[i] for i in chosen], None, 1000) == chosen
    assert imagenet_order(ids[::-1]) == list(range(999, -1, -1))
    assert imagenet_order(ids[:999]) is imagenet_order(None) is None


def test_fine_tuning_keeps_a_head_whose_classes_the_data_has() -> None:
    assert same_classes(None, sorted(map(str, range(12))), 12) == tuple(map(str, range(12)))
    assert same_classes(None, sorted(map(str, range(1, 13))), 12) is None  # as `evaluate`, which refuses them
    assert same_classes(("b", "a"), ("a", "b"), 2) == ("b", "a")
    assert same_classes(None, ("bee", "ant"), 2) == ("bee", "ant")
    assert same_classes(("a", "c"), ("a", "b"), 2) is same_classes(None, ("a", "b"), 3) is None
    assert same_classes(imagenet_names(), imagenet_ids()[::-1], 1000) == imagenet_ids()
