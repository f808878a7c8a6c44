"""BeiT: Bao et al. 2022, with a tokenizer trained on the same images ("Three things", section 5).

The papers do not print how that tokenizer is trained. Its open values are those of BeiT v2 (Peng et al. 2022), whose
codes it has, where they apply.
"""

from __future__ import annotations

from patchloom.models.config import PatchConfig
from patchloom.recipes.cited import Cited, Size, cite, derive, nearest
from patchloom.recipes.deit import DEIT
from patchloom.recipes.pretraining import PretrainingOptions
from patchloom.recipes.recipe import Recipe
from patchloom.recipes.small import SUFFIX

_PAPER = "Bao et al. 2022"
_CODE = "Bao et al. 2022, published code"
_COMMAND = "Bao et al. 2022, published command of ViT-B for weights pre-trained on ImageNet-22k"
_LARGE = "Bao et al. 2022, published command of ViT-L for weights pre-trained on ImageNet-22k"
_V2 = "open in the papers; Peng et al. 2022, published command of its tokenizer"
_OPEN = "inferred: open in the papers"
_SMALL = "ours, for thousands of small images on a CPU"
_B, _L = (768, 12), (1024, 24)

_BEIT = cite(
    Recipe.of(PretrainingOptions, name="beit", summary="prediction of the codes of masked patches, for every stem"),
    method=("beit", '"Three things", section 5'),
    epochs=(800, f"{_PAPER}: 800; thesis Table 6.9: 300 and 800"),
    batch_size=(2048, _PAPER),
    optimizer=("adamw", _PAPER),
    lr=(1.5e-3, _PAPER),
    lr_scaling=("none", f"{_CODE}: never scaled"),
    betas=((0.9, 0.98), f"{_CODE}; the paper prints 0.9 and 0.999"),
    warmup_epochs=(10.0, _PAPER),
    warmup_lr=(1e-6, _CODE),
    min_lr=(1e-5, _CODE),
    weight_decay=(0.05, _PAPER),
    clip_grad=(3.0, _PAPER),
    drop_path=(0.1, _PAPER),
    drop_path_decay=("linear", _CODE),
    scale=("layerscale", "thesis 6.3.3: the procedure includes LayerScale"),
    layerscale=(0.1, f"{_CODE}: 0.1 for ViT-B"),
    aggregation=("average", f"{_CODE}: fine-tuning averages patches; no loss reaches the class token"),
    resolution=(224, _PAPER),
    crop_scale=(0.08, _CODE),
    flip=(0.5, _PAPER),
    augmentation=("none", f"{_PAPER}: crop, flip and colours alone"),
    color_jitter=(0.4, _PAPER),
    erasing=(0.0, f"{_PAPER}: none"),
    test_crop_ratio=(0.875, f"{_CODE}: resize to 256, crop 224"),
    mask_ratio=(75 / 196, f"{_CODE}: 75 of 196 patches"),
    mask_block=(16 / 196, f"{_CODE}: blocks of at least 16 of 196 patches"),
    mask_aspect=(0.3, f"{_PAPER}, algorithm 1"),
    tokenizer_patch=(8, f"{_CODE}: images of 112 pixels give 14 x 14 codes"),
    codes=(8192, _PAPER),
    code_dim=(32, _V2),
    code_decay=(0.99, f"{_OPEN}; van den Oord et al. 2017, appendix A.1"),
    code_revival=(0.1, f"{_OPEN}; ours"),
    commitment=(1.0, f"{_OPEN}; Peng et al. 2022, equation 3"),
    tokenizer_epochs=(100, _V2),
    tokenizer_lr=(1e-3, f"{_OPEN}; ours"),
    tokenizer_dim=(256, f"{_OPEN}; van den Oord et al. 2017, section 4.1"),
    tokenizer_depth=(2, f"{_OPEN}; van den Oord et al. 2017, section 4.1"),
    tokenizer_standardise=(False, f"{_CODE}: pixels as they are"),
)

BEIT_SMALL = cite(
    _BEIT.replace(name=f"beit{SUFFIX}", summary="beit adapted to small images and a CPU"),
    epochs=(60, _SMALL),
    batch_size=(64, _SMALL),
    warmup_epochs=(5.0, _SMALL),
    drop_path=(0.0, _SMALL),
    drop_path_decay=(None, f"{_SMALL}: as the model says"),
    scale=(None, f"{_SMALL}: as the model says"),
    layerscale=(None, f"{_SMALL}: as the model says"),
    resolution=(None, f"{_SMALL}: the model's own"),
    crop_scale=(0.35, f"{_SMALL}: a twelfth of a small image shows nothing"),
    test_crop_ratio=(1.0, f"{_SMALL}: the whole image"),
    tokenizer_standardise=(True, f"{_SMALL}: else codes tell exposure, which visible patches give away"),
    codes=(128, _SMALL),
    code_decay=(0.9, f"{_SMALL}: short runs need codes that follow faster"),
    tokenizer_epochs=(10, _SMALL),
    tokenizer_lr=(3e-3, _SMALL),
    tokenizer_dim=(64, _SMALL),
)


def beit(model: PatchConfig | None = None) -> Recipe:
    """Pre-training; ViT-B's LayerScale without a model."""
    rows: dict[Size, Cited] = {_B: (0.1, f"{_CODE}: 0.1 for ViT-B"), _L: (1e-5, f"{_CODE}: 1e-5 for ViT-L")}
    (value, where), remark = nearest(rows, model) if model else (rows[_B], "")
    return cite(_BEIT, layerscale=(value, where + remark))


def tokenizer_recipe(recipe: Recipe) -> Recipe:
    """The recipe of the run that trains the tokenizer of a BeiT run."""
    base, _, form = recipe.name.partition("@")
    name = f"{base}_tokenizer{form and '@' + form}"
    return derive(
        recipe, f"as {recipe.name}", name, "a vector-quantised autoencoder, whose codes BeiT predicts",
        method=("tokenizer", "the first of two runs"),
        epochs=(recipe.tokenizer_epochs, "tokenizer_epochs"),
        steps=(None, "tokenizer_epochs"),
        lr=(recipe.tokenizer_lr, "tokenizer_lr"),
        head_lr=(None, "all parameters alike"),
        layer_decay=(1.0, "all parameters alike"),
        betas=((0.9, 0.99), _V2),
        weight_decay=(1e-4, _V2),
        weight_decay_end=(None, _V2),
        clip_grad=(1.0, f"{_OPEN}; ours"),
        warmup_epochs=(recipe.tokenizer_epochs / 10, f"{_V2}: 10 of 100 epochs"),
        warmup_steps=(None, _V2),
        min_lr=(min(recipe.min_lr, recipe.tokenizer_lr), f"as {recipe.name}, and not above tokenizer_lr"),
        ema=(0.0, f"{_OPEN}; none"),
        sync_batchnorm=(True, "the encoder normalises over a batch, whatever the number of processes"),
        eval_every=("1 epoch", "ours"),
        probe_every=(0, "a tokenizer is measured by its reconstructions"),
        gradient_checkpointing=(False, "the network is not in this run"),
    )  # fmt: skip


_FINETUNE = derive(
    DEIT,
    "as DeiT",
    "beit_finetune",
    "BeiT weights on labels: layer-wise learning-rate decay; rates by model",
    epochs=(100, _COMMAND),
    batch_size=(1024, _COMMAND),
    lr=(4e-3, _COMMAND),
    lr_scaling=("none", f"{_CODE}: never scaled"),
    layer_decay=(0.65, _COMMAND),
    warmup_epochs=(20.0, _COMMAND),
    warmup_lr=(1e-6, _CODE),
    min_lr=(1e-6, _CODE),
    schedule=("cosine", _CODE),
    schedule_by=("step", _CODE),
    schedule_published=(False, "without effect: the rate changes at every step"),
    weight_decay=(0.05, _COMMAND),
    clip_grad=(0.0, f"{_CODE}: none"),
    drop_path=(0.1, _COMMAND),
    drop_path_decay=("linear", _CODE),
    mixup=(0.8, _COMMAND),
    cutmix=(1.0, _COMMAND),
    erasing=(0.25, _CODE),
    repeated_augmentation=(1, f"{_CODE}: none"),
    label_smoothing=(0.1, _CODE),
    test_crop_ratio=(0.875, f"{_CODE}: resize to 256, crop 224"),
)
# epochs, rate, layer decay, warm-up, drop rate
_FINETUNE_ROWS: dict[Size, tuple[int, float, float, float, float]] = {
    _B: (100, 4e-3, 0.65, 20.0, 0.1),
    _L: (50, 1e-3, 0.75, 5.0, 0.2),
}


def beit_finetune(model: PatchConfig | None = None) -> Recipe:
    """Fine-tuning of BeiT weights; ViT-B's values without a model."""
    row, remark = nearest(_FINETUNE_ROWS, model) if model else (_FINETUNE_ROWS[_B], "")
    where = (_LARGE if row == _FINETUNE_ROWS[_L] else _COMMAND) + remark
    names = ("epochs", "lr", "layer_decay", "warmup_epochs", "drop_path")
    return cite(_FINETUNE, **{name: (value, where) for name, value in zip(names, row, strict=True)})
