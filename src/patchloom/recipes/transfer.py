"""Fine-tuning and transfer: to another resolution with the same classes, and to the classes of other data sets.

The values are spread over the papers and the replies of the authors to issues. Values that no source states are
inferred and marked so.
"""

from __future__ import annotations

from patchloom.data.splits import Splits
from patchloom.models.config import PatchConfig
from patchloom.recipes.cait import cait
from patchloom.recipes.cited import Cited, derive
from patchloom.recipes.deit import DEIT
from patchloom.recipes.recipe import Recipe
from patchloom.recipes.resmlp import resmlp

_FINE = "README of the published code"
_M48 = "author's reply in issue 108 of the published code, for M48 at 448"
_SGD = "author's replies in issues 45, 105 and 141 of the published code"
_RESMLP = "author's reply in issue 117 of the published code"
_CAIT = "thesis 3.7.1.3"
_GRAFIT = "thesis 2.4.6 and 2.5.4"

DEIT_FINETUNE = derive(
    DEIT,
    "as DeiT",
    "deit_finetune",
    "DeiT at another resolution, the same classes",
    epochs=(30, "README of the published code: 30; thesis 3.4.5: 25; default here 30"),
    batch_size=(512, _FINE),
    resolution=(384, _FINE),
    lr=(5e-6, f"{_FINE}: 5e-6 at batch 512"),
    min_lr=(5e-6, f"{_FINE}: as the rate, so that it is constant after the warm-up"),
    weight_decay=(1e-8, "README of the published code"),
    drop_path=(0.0, "published code: these runs were in eval mode, so none"),
    test_crop_ratio=(0.875, "published code: resized to 438, cropped to 384"),
)


def cait_finetune(model: PatchConfig | None = None) -> Recipe:
    """CaiT at 384 or 448; only the values of M48 are known, the others are inferred from them."""
    base = cait(model)
    rate = max(0.0, round((base.drop_path or 0.0) - 0.1, 4))
    return derive(
        base,
        "as cait",
        "cait_finetune",
        "CaiT at another resolution, the same classes",
        epochs=(60, _M48),
        batch_size=(256, _M48),
        resolution=(448 if model and model.name == "cait_m48" else 384, "the published models at 384 (M48: 448)"),
        lr=(5e-6, _M48),
        lr_scaling=("none", _M48),
        min_lr=(5e-6, "inferred: as DeiT's fine-tuning, constant after the warm-up"),
        drop_path=(rate, f"{_M48}: 0.3, that is 0.1 less than in training; so here for every model, at least 0"),
    )


def resmlp_finetune(model: PatchConfig | None = None) -> Recipe:
    """ResMLP at another resolution. No paper describes it: values of DeiT, with the drop rate and crop of ResMLP."""
    own = resmlp(model)
    return derive(
        DEIT_FINETUNE,
        "inferred, as deit_finetune",
        "resmlp_finetune",
        "ResMLP at another resolution, the same classes",
        drop_path=(own.drop_path, own.sources["drop_path"]),
        drop_path_decay=(own.drop_path_decay, own.sources["drop_path_decay"]),
        test_crop_ratio=(own.test_crop_ratio, own.sources["test_crop_ratio"]),
    )


NEW_CLASSES = derive(
    DEIT_FINETUNE,
    "as deit_finetune",
    "new_classes",
    "your photos with new classes: a new head with a high learning rate, the rest with a low one",
    epochs=(20, "ours: benchmarks/finetune.py"),
    batch_size=(64, "ours: a folder of photos"),
    resolution=(None, "the size of the weights"),
    lr=(1e-4, "ours: benchmarks/finetune.py"),
    head_lr=(5e-3, "ours: benchmarks/finetune.py; the papers' rates are too small to train a new head"),
    lr_scaling=("none", "ours"),
    min_lr=(1e-6, "ours"),
    schedule_by=("step", "ours: a short run"),
    warmup_epochs=(1.0, "ours"),
    weight_decay=(0.05, "ours: as in training"),
    drop_path_decay=(None, "ours: as the weights were trained"),
    crop_scale=(0.35, "ours: keeps objects in view"),
    augmentation=("none", "ours: a short run"),
    erasing=(0.0, "ours: a short run"),
    mixup=(0.0, "ours: a short run"),
    cutmix=(0.0, "ours: a short run"),
    repeated_augmentation=(1, "ours"),
    test_crop_ratio=(1.0, "ours: the whole photo"),
)


def transfer_cifar(model: PatchConfig | None = None) -> Recipe:
    """Transfer to CIFAR-10 and CIFAR-100, with the values of the model's family."""
    return _transfer(model, "transfer_cifar", "CIFAR-10 and CIFAR-100", 1000, 100)


def transfer_flowers(model: PatchConfig | None = None) -> Recipe:
    """Transfer to Flowers-102, with the values of the model's family."""
    return _transfer(model, "transfer_flowers", "Flowers-102", 1000, 10)


def transfer_cars(model: PatchConfig | None = None) -> Recipe:
    """Transfer to Stanford Cars, with the values of the model's family."""
    return _transfer(model, "transfer_cars", "Stanford Cars", 1000, 10)


def transfer_inat18(model: PatchConfig | None = None) -> Recipe:
    """Transfer to iNaturalist 2018, with the values of the model's family."""
    return _transfer(model, "transfer_inat18", "iNaturalist 2018", 360, 10)


def transfer_inat19(model: PatchConfig | None = None) -> Recipe:
    """Transfer to iNaturalist 2019, with the values of the model's family."""
    return _transfer(model, "transfer_inat19", "iNaturalist 2019", 360, 10)


GRAFIT_TRANSFER = derive(
    DEIT,
    "inferred, as DeiT",
    "grafit_transfer",
    "Flowers, Cars, Food-101, iNat-18 and iNat-19 from trained weights, as Grafit transfers",
    epochs=(240, f"{_GRAFIT}: for all data sets"),
    batch_size=(512, _GRAFIT),
    resolution=(224, _GRAFIT),
    optimizer=("sgd", f"thesis 2.4.3: SGD in the whole chapter; {_GRAFIT} do not name it"),
    momentum=(0.9, "inferred: ResNet practice, thesis 2.4.3 gives no value"),
    nesterov=(True, "thesis 2.4.3"),
    lr=(0.01, _GRAFIT),
    lr_scaling=("none", "inferred: the rate is given at its batch"),
    schedule=("cosine", _GRAFIT),
    warmup_epochs=(0.0, f"inferred: {_GRAFIT} name no warm-up"),
    min_lr=(0.0, f"inferred: {_GRAFIT} name no floor"),
    weight_decay=(1e-4, "inferred: ResNet practice, the chapter gives no value"),
    label_smoothing=(0.0, "thesis 2.4.3: none named"),
    augmentation=("rand", "thesis 2.4.3: RandAugment"),
    magnitude=(9.0, "inferred, as DeiT: the chapter gives no strength"),
    erasing=(0.25, "thesis 2.4.3: erasing; inferred, as DeiT: the chapter gives no strength"),
    mixup=(0.0, "thesis 2.4.3: none named"),
    cutmix=(0.0, f"{_GRAFIT}: none; CutMix belongs to Table 2.10 (grafit_transfer_cutmix)"),
    repeated_augmentation=(1, "thesis 2.4.3: none named"),
    drop_path=(0.0, "inferred: none named"),
    test_crop_ratio=(0.875, f"inferred: {_GRAFIT} name a centre crop of 224"),
)

TRANSFER_FOOD = derive(GRAFIT_TRANSFER, "as grafit_transfer", "transfer_food", "Food-101, from trained weights")

GRAFIT_TRANSFER_CUTMIX = derive(
    GRAFIT_TRANSFER,
    "as grafit_transfer",
    "grafit_transfer_cutmix",
    "the longer transfer of Grafit's Table 2.10, with CutMix; FixRes: img_size=224 --finish 384",
    epochs=(300, "thesis Table 2.10: 300 for Food-101 and iNat, 1000 for Flowers and Cars; default here 300"),
    resolution=(
        384,
        "thesis Table 2.10: 384 with FixRes, which is `img_size=224 --finish 384`: train low, finish high",
    ),
    cutmix=(1.0, "thesis Table 2.10: CutMix; inferred, as DeiT: 1.0"),
)


def _transfer(model: PatchConfig | None, name: str, data: str, epochs: int, slower: int) -> Recipe:
    """The protocol of a data set for a family. CaiT's learning rate is that of training divided by `slower`; families
    without values of their own follow DeiT (thesis 5.3.2, 6.3.5.1)."""
    family = model.family if model else "deit"
    summary = f"{data}, from trained weights; by family"
    if family == "cait":
        rate = 1e-3 / slower
        flat = "; flat after the warm-up, as it equals the least rate" if rate == DEIT.min_lr else ""
        values: dict[str, Cited] = {
            "epochs": (epochs, _CAIT),
            "lr": (rate, f"{_CAIT}: that of training divided by {slower}{flat}"),
            "test_crop_ratio": (0.875, _CAIT),
        }
        return derive(cait(model), "as cait", name, summary, **values)
    if family == "resmlp" and name == "transfer_cifar":
        return derive(resmlp(model), "as resmlp", name, summary, **_resmlp_values(epochs))
    values = _inat_values() if "inat" in name else _sgd_values(epochs, name)
    if family != "deit":
        values = {field: (value, f"inferred, as DeiT: {source}") for field, (value, source) in values.items()}
    return derive(DEIT, "as DeiT", name, summary, **values, **_of_family(family, name))


def _of_family(family: str, name: str) -> dict[str, Cited]:
    """Values that a family other than DeiT keeps in DeiT's protocol."""
    if family == "deit":
        return {}
    values: dict[str, Cited] = {"drop_path_decay": ("uniform", "published code: the same rate in every block")}
    if family == "resmlp":
        values["test_crop_ratio"] = (0.9, "inferred, as in training: README of the published code")
    if family in ("deit3", "vit"):
        crop = "thesis 6.3.5.1: 1.0 for all; 0.875 would be better on iNaturalist"
        values["test_crop_ratio"] = (1.0, crop if family == "deit3" else f"inferred, as DeiT III: {crop}")
    if family == "deit3" and name == "transfer_flowers":
        values["tune"] = ("attention", "thesis 6.3.5.1: attention only, 0.2 better than all")
    return values


def _sgd_values(epochs: int, name: str) -> dict[str, Cited]:
    """DeiT's protocol for small data sets."""
    where = _SGD if name in ("transfer_cifar", "transfer_cars") else f"inferred, as Cars: {_SGD}"
    return {
        "epochs": (epochs, where),
        "batch_size": (768, where),
        "optimizer": ("sgd", f"{where}; AdamW with 7.5e-6 (CIFAR-10) or 5e-6 (CIFAR-100) and decay 0.05 is the other"),
        "momentum": (0.9, "published code"),
        "nesterov": (True, "published code: its library's sgd has Nesterov momentum"),
        "lr": (0.01, where),
        "lr_scaling": ("none", where),
        "weight_decay": (1e-4, where),
        "erasing": (0.0, where),
        "drop_path": (0.0, where),
    }


def _inat_values() -> dict[str, Cited]:
    """DeiT's protocol for iNaturalist."""
    return {
        "epochs": (360, _SGD),
        "batch_size": (768, _SGD),
        "lr": (7.5e-5, f"{_SGD}: 5e-5 before the scaling with the batch"),
        "erasing": (0.1, _SGD),
        "drop_path": (0.1, _SGD),
    }


def _resmlp_values(epochs: int) -> dict[str, Cited]:
    """ResMLP's protocol for CIFAR."""
    return {
        "epochs": (epochs, _RESMLP),
        "batch_size": (768, _RESMLP),
        "optimizer": ("adamw", _RESMLP),
        "lr": (5e-6, _RESMLP),
        "min_lr": (1e-5, f"{_RESMLP}: left at 1e-5, above the rate, which therefore rises from 5e-6 to 1e-5"),
        "lr_scaling": ("none", _RESMLP),
        "clip_grad": (0.0, _RESMLP),
        "weight_decay": (0.05, _RESMLP),
        "warmup_lr": (1e-6, _RESMLP),
    }


# the papers transfer to Flowers-102 from train + val, 2,040 images, and test on 6,149 (thesis Table 2.3)
_TRANSFER = {"Flowers102": ("train+val", "test")}


def official_splits(where: str, recipe: str, requested: Splits) -> Splits:
    """The requested splits, completed by those of the papers if a transfer recipe uses others than the usual ones."""
    prefix, _, rest = where.partition(":")
    usual = _TRANSFER.get(rest.partition(":")[0]) if prefix == "torchvision" else None
    if usual is None or not recipe.startswith(("transfer_", "grafit_transfer")):
        return requested
    test = requested.test or (usual[1] if requested.hold_out is None else None)
    others = [name for name in usual[0].split("+") if name not in (test or "").split("+")]
    train = requested.train or "+".join(others) or None
    if train and test and requested.test is None and test in train.split("+"):
        test = None  # what remains is chosen as usual
    return Splits(train, test, requested.hold_out)
