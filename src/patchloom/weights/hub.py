"""Published weights: timm's catalogue of tags, and repositories of the Hugging Face hub.

    cait_s24.fb_dist_in1k      a patchloom model with one of timm's tags
    cait_s24_384.fb_dist_in1k  a timm model with its tag
    hf-hub:owner/name          a repository with timm's config.json or with a file that patchloom wrote

Files are downloaded by huggingface_hub, which caches them and has an offline mode (HF_HUB_OFFLINE=1).
"""

from __future__ import annotations

import re
import threading
from contextlib import suppress
from os import PathLike
from pathlib import Path
from typing import Any

from patchloom.compat import import_timm
from patchloom.errors import PatchloomError, did_you_mean
from patchloom.install import needed
from patchloom.models.imagenet import imagenet_names
from patchloom.models.preprocessing import default_preprocessing
from patchloom.models.registry import entries, list_models
from patchloom.reading import read_json
from patchloom.weights.files import Checkpoint, read

_PREFIX = "hf-hub:"
FILES = ("model.safetensors", "pytorch_model.bin")
_TIMEOUT = 5  # seconds to wait for the first response of the hub


def is_remote(source: str | PathLike[str]) -> bool:
    """Whether `source` is a hub repository or a tag, MODEL.TAG, and not a path.

    A tag has no folder and no suffix of a weight file, and no file of that name exists.
    """
    if not isinstance(source, str):
        return False
    if source.startswith(_PREFIX):
        return True
    tagged = re.fullmatch(r"\w{1,100}(\.\w{1,100})", source)
    return tagged is not None and tagged[1] not in (".safetensors", ".pth", ".pt", ".bin") and not Path(source).exists()


def published_tags(name: str) -> list[str]:
    """The names in timm's catalogue for a patchloom model, such as "cait_s24_384.fb_dist_in1k".

    Variants by image size are separate entries in the catalogue.
    """
    base = timm_name(name)
    known = import_timm().list_pretrained(f"{base}_*") if base else []
    return [full for full in known if re.fullmatch(rf"{base}_\d+\.\w+", full)]


def timm_name(name: str) -> str | None:
    """timm's name of a patchloom model, without the image size; None if timm has no such network."""
    if match := re.fullmatch(r"(deit3?)_(tiny|small|medium|base|large|huge)(_distilled)?", name):
        family, size, distilled = match.groups()
        return f"{family}_{size}{distilled or ''}_patch{14 if size == 'huge' else 16}"
    if name.startswith("cait_"):
        return name
    return {
        "resmlp_s12": "resmlp_12",
        "resmlp_s24": "resmlp_24",
        "resmlp_s36": "resmlp_36",
        "resmlp_b24_p8": "resmlp_big_24",
    }.get(name)


def is_ours(architecture: str) -> bool:
    """Whether patchloom implements a timm network: those of the papers, and the plain ViTs that DeiT trains."""
    base = re.sub(r"_\d+$", "", architecture)
    plain = re.fullmatch(r"vit_(tiny|small|base|large|huge)_patch\d+", base)
    return bool(plain) or base in {timm_name(name) for name in list_models()}


def fetch(source: str, img_size: tuple[int, int] | None) -> Checkpoint:
    """Download the weights of a tag or a hub repository, or find them in the cache.

    A name always means the same file, whatever `img_size` the weights are resized to afterwards: a run that is planned
    at 224 and starts at 384 must not get other weights. A note names the weights published for `img_size`, if any.
    Raises PatchloomError for unknown names and if the hub cannot be reached.
    """
    if source.startswith(_PREFIX):
        repository = source.removeprefix(_PREFIX)
        checkpoint = _from_repository(repository, source)
        if published := re.fullmatch(r"timm/(\w+)\.(\w+)", repository):  # the same weights as the tag
            _as_published(checkpoint, *published.groups())
        return checkpoint
    cfg, others = _pretrained_cfg(source)
    checkpoint = _from_repository(cfg.hf_hub_id or f"timm/{cfg.architecture}.{cfg.tag}", source)
    if "preprocessing" not in checkpoint.metadata:
        checkpoint.metadata["preprocessing"] = _preprocessing(cfg.to_dict(), source)
        checkpoint.notes.clear()
    _as_published(checkpoint, cfg.architecture, cfg.tag)
    checkpoint.notes += _size_notes(others, img_size)
    return checkpoint


def size_notes(source: str, img_size: tuple[int, int]) -> list[str]:
    """A note that names the weights published for an image size, if `source` is a tag that has others for it."""
    if not is_remote(source) or source.startswith(_PREFIX):
        return []
    return _size_notes(_pretrained_cfg(source)[1], img_size)


def _size_notes(others: dict[Any, str], img_size: Any) -> list[str]:
    name = others.get(img_size)
    return [] if name is None else [f"weights that were fine-tuned at this size are published as {name}"]


def _as_published(checkpoint: Checkpoint, architecture: str, tag: str) -> None:
    """Set what timm's catalogue lacks or has different from the papers: ImageNet's class names, and the test crop ratio
    (DeiT 0.875, DeiT III and CaiT 1.0, ResMLP 0.9, as in the authors' evaluation)."""
    metadata = checkpoint.metadata
    if "config" in metadata:  # a file written by patchloom is complete
        return
    if not metadata.get("class_names") and tag.endswith("in1k"):  # "in1k" ends the tags of heads for ImageNet-1k
        metadata["class_names"] = imagenet_names()
    family = _paper_family(architecture)
    if family is None or "preprocessing" not in metadata:
        return
    theirs, ours = metadata["preprocessing"]["crop_ratio"], default_preprocessing(family, (224, 224), 3).crop_ratio
    if theirs != ours:
        metadata["preprocessing"]["crop_ratio"] = ours
        checkpoint.notes.append(f"the test crop ratio is the paper's, {ours}; timm's is {theirs}")


def _paper_family(architecture: str) -> str | None:
    """The family of a network of the papers by timm's name; None for others, such as plain ViTs."""
    base = re.sub(r"_\d+$", "", architecture)
    return next((e.config.family for e in entries() if timm_name(e.config.name) == base), None)


def _pretrained_cfg(source: str) -> tuple[Any, dict[Any, str]]:
    """timm's entry for MODEL.TAG at 224 pixels, or at the smallest size; and the names of the others by size."""
    name, tag = source.split(".")
    if name not in list_models() and not is_ours(name):
        raise PatchloomError(f"There is no file and no model named {name!r}.{did_you_mean(name, list_models())}")
    timm = import_timm()
    known = published_tags(name) if name in list_models() else timm.list_pretrained(f"{name}.*")
    candidates = [full for full in known if full.endswith(f".{tag}")]
    if not candidates:
        tags = sorted({full.split(".")[1] for full in known})
        choices = f"Choose from: {', '.join(tags)}" if tags else "timm's catalogue has none for this model"
        raise PatchloomError(f"Unknown tag {tag!r} of {name}. {choices}.{did_you_mean(tag, tags)}")
    cfgs = [timm.models.get_pretrained_cfg(full) for full in candidates]

    # False sorts before True: 224 pixels first, then the smallest.
    chosen = min(cfgs, key=lambda cfg: (cfg.input_size[1] != 224, cfg.input_size[1]))
    others = {tuple(cfg.input_size[1:]): f"{cfg.architecture}.{cfg.tag}" for cfg in cfgs if cfg is not chosen}
    return chosen, others


def _from_repository(repository: str, label: str) -> Checkpoint:
    checkpoint = read(download(repository, FILES, label))
    checkpoint.label = label
    if "preprocessing" in checkpoint.metadata:  # a file written by patchloom is complete
        return checkpoint
    try:
        path = download(repository, ("config.json",), label)
    except PatchloomError as error:
        checkpoint.notes.append(f"preprocessing is the default of the family, since there is no config.json: {error}")
        return checkpoint
    values = _read_config(path, label)
    if not is_ours(values.get("architecture", "deit_tiny_patch16_224")):
        raise PatchloomError(
            f"{label} holds timm's {values['architecture']}, a network that patchloom does not implement."
        )
    if "pretrained_cfg" in values:
        checkpoint.metadata["preprocessing"] = _preprocessing(values["pretrained_cfg"], label)
    checkpoint.metadata["class_names"] = values.get("label_names")
    return checkpoint


def _read_config(path: Path, label: str) -> dict[str, Any]:
    try:
        values = read_json(path)
    except ValueError as error:
        raise PatchloomError(f"{label}: its config.json is damaged: {error}.") from error
    if not isinstance(values, dict) or not isinstance(values.get("architecture", ""), str):
        raise PatchloomError(f"{label}: its config.json does not describe a network.")
    return values


def download(repository: str, filenames: tuple[str, ...], label: str) -> Path:
    """The first of these files that the cache or the hub has; `label` names them in messages."""
    with needed("Published weights need huggingface_hub", "hub"):
        from huggingface_hub import errors, hf_hub_download, try_to_load_from_cache
    try:
        # The cache is asked first: without a network, weights that were fetched once still load.
        cached = [name for name in filenames if isinstance(try_to_load_from_cache(repository, name), str)]
        unreachable = _unreachable(repository, (cached or filenames)[0])
        if unreachable is not None and not cached:
            raise ConnectionError from unreachable
        for name in cached or filenames:
            with suppress(errors.RemoteEntryNotFoundError):
                return Path(hf_hub_download(repository, name, local_files_only=unreachable is not None))
    except (errors.EntryNotFoundError, errors.HfHubHTTPError, errors.HFValidationError, OSError) as error:
        cause = error.__cause__ if isinstance(error, ConnectionError) else error
        raise PatchloomError(
            f"{label}: {repository} is not in the hub's cache and could not be fetched ({type(cause).__name__}). "
            f"Check the name and the connection (HF_HUB_OFFLINE disables it), or pass the path of a local file."
        ) from error
    raise PatchloomError(f"{label}: the repository {repository} has no {' and no '.join(filenames)}.")


def _unreachable(repository: str, filename: str) -> BaseException | None:
    """The error if the hub cannot be reached within _TIMEOUT seconds; None if it can.

    The hub's client would retry for half a minute, and a name server that does not respond has no time limit at all:
    hence the thread.
    """
    from huggingface_hub import errors, get_hf_file_metadata, hf_hub_url

    reasons: list[BaseException | None] = []

    def request() -> None:
        try:
            get_hf_file_metadata(hf_hub_url(repository, filename), timeout=_TIMEOUT)
            reasons.append(None)
        except (errors.HfHubHTTPError, errors.HFValidationError):  # the hub responded, or the name is invalid
            reasons.append(None)
        except Exception as error:  # of whichever HTTP library the client uses
            reasons.append(error)

    # A daemon thread that still waits for a name server does not keep the program from ending.
    thread = threading.Thread(target=request, daemon=True)
    thread.start()
    thread.join(_TIMEOUT)
    return reasons[0] if reasons else TimeoutError()


def _preprocessing(cfg: dict[str, Any], label: str) -> dict[str, Any]:
    """Preprocessing from timm's pretrained_cfg. "random" interpolation is for training; such models are evaluated with
    bicubic."""
    try:
        return {
            "img_size": tuple(cfg["input_size"][1:]),
            "mean": tuple(cfg["mean"]),
            "std": tuple(cfg["std"]),
            "crop_ratio": cfg["crop_pct"],
            "interpolation": "bicubic" if cfg["interpolation"] == "random" else cfg["interpolation"],
        }
    except (KeyError, TypeError) as error:
        raise PatchloomError(f"{label}: its pretrained_cfg is incomplete or invalid: {error}.") from error
