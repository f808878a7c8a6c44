"""Data sets, options and callbacks of a user's own that are unusual or wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import patchloom
from patchloom.cli.main import main
from patchloom.console import Console
from patchloom.errors import PatchloomError

FAST = {"recipe": "deit@small", "epochs": 1, "batch_size": 8, "workers": 0, "device": "cpu"}
TINY = {"model": "deit_nano", "resolution": 16}


class Data(list[Any]):
    """A list of pairs, with names of classes."""

    classes = ("cat", "dog", "owl")


def pictures(count: int = 24) -> list[tuple[Image.Image, int]]:
    draw = np.random.RandomState(0)
    return [(Image.fromarray(draw.randint(0, 255, (18, 20, 3), np.uint8)), i % 3) for i in range(count)]


def train(data: Any, out: Path, **options: Any) -> Any:
    return patchloom.train(data, out=out / "run", console=Console(quiet=True), **{**FAST, **options})


def test_tensors_of_a_data_set_train_a_model_by_name(tmp_path: Path) -> None:
    tensors = Data((torch.randn(3, 16, 16), label) for _, label in pictures())
    run = train(tensors, tmp_path, **TINY, model_options={"depth": 1})
    assert run.records()[-1]["count"] == 3
    assert "dataset Data" in (run.folder / "report.html").read_text()
    model = patchloom.load(run.folder)
    assert patchloom.evaluate(model, tensors, split="all")["count"] == 24


def test_why_no_image_can_be_read_is_in_the_error(tmp_path: Path) -> None:
    floats = Data((np.asarray(image) / 255.0, label) for image, label in pictures())
    with pytest.raises(PatchloomError, match=r"can be read: .*An array is an image if it is \(H, W, 3\) of uint8"):
        train(floats, tmp_path, **TINY)
    assert not (tmp_path / "run").exists()


def test_num_classes_counts_classes_that_a_data_set_does_not_name(tmp_path: Path) -> None:
    run = train(pictures(), tmp_path, **TINY, model_options={"depth": 1, "num_classes": 5})
    assert patchloom.load(run.folder).class_names == ("0", "1", "2", "3", "4")


def test_a_network_decides_how_many_classes_a_data_set_without_names_has(tmp_path: Path) -> None:
    network = patchloom.create_model("deit_nano", num_classes=4, img_size=16, depth=1)
    run = train(pictures(), tmp_path, model=network, resolution=16)
    assert patchloom.load(run.folder).class_names == ("0", "1", "2", "3")


@pytest.mark.parametrize(
    ("data", "classes", "message"),
    [
        (pictures(), 2, "has a target 2, but the model has 2 classes"),
        (Data(pictures()), 5, "num_classes=5: .* has 3 classes"),
        ("digits", 20, "num_classes=20: digits has 10 classes"),
        ("digits", 5, "num_classes=5: digits has 10 classes"),
    ],
)
def test_another_number_of_classes_is_refused_before_training(
    data: Any, classes: int, message: str, tmp_path: Path
) -> None:
    with pytest.raises(PatchloomError, match=message):
        train(data, tmp_path, **TINY, model_options={"depth": 1, "num_classes": classes})
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("options", [3, "depth", ["depth"]])
def test_model_options_of_a_wrong_type(options: Any, tmp_path: Path) -> None:
    out = tmp_path / "run"
    starts = (
        lambda: patchloom.train("digits", model="deit_nano", recipe="deit", out=out, model_options=options),
        lambda: patchloom.distill("w", "digits", model="deit_nano", recipe="deit", out=out, model_options=options),
        lambda: patchloom.grafit("digits", model="deit_nano", out=out, model_options=options),
        lambda: patchloom.translate(
            "d", pair="en-de", model="resmlp_mt_nano", recipe="resmlp_mt", out=out, model_options=options
        ),
    )
    for start in starts:
        with pytest.raises(PatchloomError, match="model_options is a dictionary"):
            start()


class OneArgument(patchloom.Callback):
    def after_step(self, step: int) -> None:  # type: ignore[override]
        raise AssertionError(step)


class NoArgument(patchloom.Callback):
    def after_evaluation(self) -> None:  # type: ignore[override]
        raise AssertionError


class Defaults(patchloom.Callback):
    def after_step(self, *values: Any, verbose: bool = False) -> None:
        assert len(values) == 2
        assert not verbose


def numbers() -> list[tuple[torch.Tensor, int]]:
    return [(torch.randn(4), i % 2) for i in range(20)]


@pytest.mark.parametrize(
    ("callback", "message"),
    [
        (OneArgument(), r"after_step of the callback OneArgument takes \(step, losses\)"),
        (NoArgument(), r"after_evaluation of the callback NoArgument takes \(record\)"),
    ],
)
def test_a_callback_that_cannot_be_called_is_refused_before_training(
    callback: Any, message: str, tmp_path: Path
) -> None:
    with pytest.raises(PatchloomError, match=message):
        train(numbers(), tmp_path, model=nn.Linear(4, 2), callbacks=[callback])
    assert not (tmp_path / "run").exists()


def test_a_callback_may_take_its_arguments_in_any_form(tmp_path: Path) -> None:
    train(numbers(), tmp_path, model=nn.Linear(4, 2), callbacks=[Defaults()])


@pytest.mark.parametrize("change", [{"crop_scale": 0.0}, {"magnitude": 11.0}, {"three_augment": ()}])
def test_crops_of_a_module_are_checked_as_those_of_our_networks(change: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(PatchloomError, match=f"{next(iter(change))} of deit@small"):
        train(numbers(), tmp_path, model=nn.Linear(4, 2), **change)


def test_runs_does_not_advise_to_resume_a_run_that_only_its_script_continues(tmp_path: Path, capsys: Any) -> None:
    folder = train(numbers(), tmp_path, model=nn.Linear(4, 2)).folder
    settings = (folder / "recipe.yaml").read_text()
    (folder / "recipe.yaml").write_text(settings.replace("\nepochs: 1\n", "\nepochs: 2\n"))  # as if it had been killed
    main(["runs", str(folder)])
    shown = capsys.readouterr().out
    assert "run the Python script" in shown
    assert "patchloom resume" not in shown


@pytest.mark.parametrize("change", [{"loss": "bce"}, {"mixup": 0.5}, {"drop_path": 0.1}])
def test_a_setting_of_our_networks_is_refused_for_a_module(change: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(PatchloomError, match=f"{next(iter(change))} has no effect with a module of your own"):
        train(numbers(), tmp_path, model=nn.Linear(4, 2), **change)


def test_what_is_not_a_place_is_one_message_everywhere(tmp_path: Path) -> None:
    network, out = patchloom.create_model("deit_nano", num_classes=3, img_size=16, depth=1), tmp_path / "run"
    weights = tmp_path / "weights.safetensors"
    patchloom.save(network, weights)
    fixed: dict[str, Any] = {"model": "deit_nano", "recipe": "deit@small", "out": out}
    starts = {
        "data": (
            lambda: patchloom.finetune(weights, Data(pictures()), out=out),
            lambda: patchloom.distill(weights, Data(pictures()), **fixed),
            lambda: patchloom.grafit(Data(pictures()), model="deit_nano", out=out),
            lambda: patchloom.translate(3, pair="en-de", model="resmlp_mt_nano", recipe="resmlp_mt", out=out),
        ),
        "teacher": (
            lambda: patchloom.distill(network, "digits", **fixed),
            lambda: patchloom.distill([3], "digits", **fixed),
        ),
        "model": (
            lambda: patchloom.distill(weights, "digits", **{**fixed, "model": network}),
            lambda: patchloom.grafit("digits", model=network, out=out),
            lambda: patchloom.translate("d", pair="en-de", model=network, recipe="resmlp_mt", out=out),
        ),
        "weights": (lambda: patchloom.finetune(network, "digits", out=out),),
        "clusters_from": (lambda: patchloom.grafit("digits", model="deit_nano", out=out, clusters_from=3),),
    }
    for name, calls in starts.items():
        for call in calls:
            with pytest.raises(PatchloomError, match=f"^{name} is .*, not "):
                call()
    with pytest.raises(PatchloomError, match="A pair is a source and a target language, such as en-de, not 3"):
        patchloom.translate("d", pair=3, model="resmlp_mt_nano", recipe="resmlp_mt", out=out)  # type: ignore[arg-type]
    assert not out.exists()


def test_load_names_the_task_of_modules_that_it_cannot_build(tmp_path: Path) -> None:
    run = train(numbers(), tmp_path, model=nn.Linear(4, 2))
    with pytest.raises(PatchloomError, match=r"holds modules of the task 'own'.*safetensors\.torch\.load_file"):
        patchloom.load(run.folder)


class Probe(nn.Module):
    """Notes what it is called with."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.head = nn.Linear(width, 2)
        self.seen: list[Any] = []

    def forward(self, inputs: Any) -> torch.Tensor:
        self.seen.append(inputs)
        tensors = list(inputs.values()) if isinstance(inputs, dict) else inputs
        tensors = tensors if isinstance(tensors, list | tuple) else [tensors]
        return self.head(torch.cat([x.flatten(1).float() for x in tensors], dim=1))


@pytest.mark.parametrize("shape", [(3, 8, 8), (8, 8, 3), (8, 8), (6,)])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.bool])
def test_a_tensor_of_any_type_reaches_a_module_as_it_is(shape: Any, dtype: torch.dtype, tmp_path: Path) -> None:
    data = [(torch.full(shape, i, dtype=dtype), i % 2) for i in range(20)]
    probe = Probe(int(np.prod(shape)))
    train(data, tmp_path, model=probe)
    assert {x.dtype for x in probe.seen} == {dtype}
    assert {tuple(x.shape[1:]) for x in probe.seen} == {shape}
    values = torch.cat(probe.seen[:2]).flatten(1)[:, 0].tolist()
    assert set(values) <= {data[i][0].flatten()[0].item() for i in range(20)}


@pytest.mark.parametrize("form", [lambda x: {"left": x, "right": x}, lambda x: (x, x), lambda x: [x, x]])
def test_an_input_may_be_several_tensors(form: Any, tmp_path: Path) -> None:
    probe = Probe(8)
    run = train([(form(x), y) for x, y in numbers()], tmp_path, model=probe, accumulate=2)
    assert type(probe.seen[0]) is (dict if isinstance(form(0), dict) else tuple)
    assert run.records()[-1]["count"] == 4


class Streamed(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(numbers())

    def __len__(self) -> int:
        return 20


def test_an_iterable_dataset_is_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(PatchloomError, match="a dataset with __len__ and __getitem__, not Streamed"):
        train(Streamed(), tmp_path, model=nn.Linear(4, 2))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("kind", [np.uint16, np.int8, bool, np.bool_])
def test_the_accuracy_of_classes_of_any_integer_type(kind: Any, tmp_path: Path) -> None:
    def loss(outputs: Any, targets: Any) -> Any:
        return nn.functional.cross_entropy(outputs, targets.long())

    run = train([(x, kind(y)) for x, y in numbers()], tmp_path, model=nn.Linear(4, 2), loss=loss)
    assert 0 <= run.records()[-1]["top1"] <= 1


def test_attributes_of_a_data_set_that_are_not_lists(tmp_path: Path) -> None:
    class Odd(list[Any]):
        targets = 5

    run = train(Odd(pictures()), tmp_path, **TINY, model_options={"depth": 1})
    assert run.records()[-1]["count"] == 3

    class Counted(list[Any]):
        classes = 3

    with pytest.raises(PatchloomError, match="`classes` of the dataset Counted has the names of the classes, not 3"):
        train(Counted(pictures()), tmp_path / "second", **TINY)


class Failing(patchloom.Callback):
    def __init__(self, method: str, error: type[Exception]) -> None:
        setattr(self, method, lambda *_: self.fail(error))

    def fail(self, error: type[Exception]) -> None:
        raise error("boom")


@pytest.mark.parametrize("method", ["after_step", "after_evaluation"])
@pytest.mark.parametrize("error", [ZeroDivisionError, StopIteration])
def test_an_error_of_a_callback_names_it(method: str, error: type[Exception], tmp_path: Path) -> None:
    message = f"^{method} of the callback Failing raised {error.__name__}: boom"
    with pytest.raises(PatchloomError, match=message):
        train(numbers(), tmp_path, model=nn.Linear(4, 2), callbacks=[Failing(method, error)])
    run = train(numbers(), tmp_path, model=nn.Linear(4, 2))
    assert run.records()[-1]["epoch"] == 1


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs * self.scale, targets)


def test_a_loss_with_parameters_is_refused_since_nothing_would_train_them(tmp_path: Path) -> None:
    for model in ({"model": nn.Linear(4, 2)}, TINY):
        with pytest.raises(PatchloomError, match="The loss Scaled has parameters, which would not be trained"):
            train(numbers(), tmp_path, loss=Scaled(), **model)
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0]))  # buffers are not trained anyway
    train(numbers(), tmp_path, loss=loss, model=nn.Linear(4, 2))
