"""docs/results/pretraining.md, from the rows of benchmarks/pretraining.py."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

Row = Mapping[str, Any]
NETWORKS = {"vit": "ViT", "resmlp": "ResMLP", "linear": "linear", "conv": "convolutional", "hmlp": "hMLP"}
ASKED, ASKED_KEPT = 1.3, 0.8  # times as fast, and share of the memory

PAGE = """# Learning from unlabelled photos

This page reports what [pre-training without labels](../pretraining.md) gains on small real images: DINO, BeiT and MAE beside networks from scratch, and the speed beside lightly.

`python benchmarks/pretraining.py DATA --seeds {seeds}`, {date}, torch {torch}, one thread{cost}.
{partial}
The images are {train:,} training and {test:,} test crops of ten COCO photos at 32 pixels. The class is the photo: a crop of unseen parts of the photo must be assigned to it.
Training and test crops share no pixel, and each crop has an exposure of its own. Pre-training sees the training crops without labels. kNN accuracy uses the 20 nearest
training crops of the frozen features, with all their labels. *Pixels* is the kNN accuracy of the images themselves. Fine-tuned networks and those from scratch are trained with the same draws
of labels, the same number of epochs and the same batch size; each has the recipe that is recommended for it. All accuracies are in %: mean and standard
deviation over the seeds (and draws of labels). A difference is of the same seed and draw.
{parts}"""  # noqa: E501

PARTIAL = """
**This page is incomplete: {done} of {planned} pre-training runs are measured. The same command adds the others.**
"""

DINO = """
## DINO

{networks}, {epochs} epochs of `dino@small`. Pixels: {pixels}.

{features}

{labels}

{verdict}
"""

BEIT = """
## BeiT with three stems

A ViT with three stems, {epochs} epochs of `beit@small`. The stems of a seed share one tokenizer, trained on the same crops ({tokenizer}).

{features}

{labels}

{verdict}
"""  # noqa: E501

MAE = """
## MAE with few labels

A ViT, {epochs} epochs of `mae@small`.

{features}

{labels}

{verdict}
"""

SPEED = """
## Speed beside lightly

Whole steps (forward, backward, AdamW, update of the teacher) with {peer} on {threads}, {rounds} interleaved rounds. Both sides have the same weights, crops and masks and compute the
same loss; lightly's side is put together as in its examples, with timm's network. *Kept* is what autograd keeps for the backward pass, without parameters. At least
{asked} times the speed and at most {asked_kept:.0%} of the memory are asked for.

| step | images | lightly, images/s | patchloom, images/s | speed-up | quartiles of the rounds | lightly keeps | patchloom keeps | share | reached |
| :-- | --: | --: | --: | --: | :-- | --: | --: | --: | :-- |
{rows}
"""  # noqa: E501


def page(rows: Sequence[Row], planned: int) -> str:
    trained = [row for row in rows if row["part"] in ("dino", "beit", "mae")]
    pixels = next((row for row in rows if row["part"] == "pixels"), {"train": 0, "test": 0})
    seconds = sum(row.get("cpu_seconds", 0) for row in rows if row["part"] != "pictures")
    makers: dict[str, Callable[[Sequence[Row], Row], str]] = {"dino": _dino, "beit": _beit, "mae": _mae}
    parts = [make(_of(rows, part), pixels) for part, make in makers.items() if _of(trained, part)]
    return PAGE.format(
        seeds=len({row["seed"] for row in trained}),
        date=time.strftime("%Y-%m-%d"),
        torch=torch.__version__,
        cost=f", {seconds / 60:.0f} CPU minutes for the accuracies" if seconds else "",
        partial=PARTIAL.format(done=len(trained), planned=planned) if len(trained) < planned else "",
        train=pixels["train"],
        test=pixels["test"],
        parts="".join([*parts, _speed([row for row in rows if row["part"] == "speed"])]),
    )


def _of(rows: Iterable[Row], part: str) -> list[Row]:
    """The rows of a part, those with labels included."""
    return [row for row in rows if row["part"] in (part, f"{part} labels")]


def _dino(rows: Sequence[Row], pixels: Row) -> str:
    runs, labelled = _split(rows)
    verdict = (
        "Thesis Table 4.2 has ViT-S/16 above ResMLP-S24 on ImageNet (kNN 74.5 and 69.4). Here, by the means: "
        + _order(runs, "knn")
        + ". Fine-tuning after DINO gained 0.5 points for ResMLP-S24 there, and nothing for ResMLP-S12. Here: "
        + _gains(labelled)
        + "."
    )
    return DINO.format(
        networks=_and([NETWORKS[name] for name in _names(runs)]), epochs=_epochs(runs), pixels=_percent(pixels["knn"]),
        features=_features(runs, "network"), labels=_labels(labelled, "network"), verdict=verdict,
    )  # fmt: skip


def _beit(rows: Sequence[Row], _: Row) -> str:
    runs, labelled = _split(rows)
    codes = [row for row in runs if "perplexity" in row]
    tokenizer = (
        f"perplexity {_number(codes, 'perplexity')}, reconstruction error {_number(codes, 'reconstruction_error', 3)}"
    )
    verdict = (
        'In "Three things" (Fig. 6), hMLP gains 0.3 to 0.4 points over the linear stem after BeiT and fine-tuning on ImageNet, and convolutional stems gain nothing. Here, '  # noqa: E501
        f"fine-tuned: {_order(labelled, 'pretrained')}; kNN: {_order(runs, 'knn')}. Fine-tuned against from scratch: "
        f"{_gains(labelled)}."
    )
    return BEIT.format(
        epochs=_epochs(runs), tokenizer=tokenizer, features=_features(runs, "stem"), labels=_labels(labelled, "stem"),
        verdict=verdict,
    )  # fmt: skip


def _mae(rows: Sequence[Row], _: Row) -> str:
    runs, labelled = _split(rows)
    verdict = f"Fine-tuned against from scratch: {_gains(labelled, by_labels=True)}."
    return MAE.format(
        epochs=_epochs(runs), features=_features(runs, "network"), labels=_labels(labelled, "network"), verdict=verdict
    )


def _split(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """Pre-training runs, and what labels made of them."""
    return [row for row in rows if "labels" not in row], [row for row in rows if "labels" in row]


def _names(rows: Iterable[Row]) -> list[str]:
    return list(dict.fromkeys(row["model"] for row in rows))


def _features(runs: Sequence[Row], what: str) -> str:
    lines = [
        f"| {what} | kNN, untrained | kNN, pre-trained | difference | linear probe, untrained | pre-trained | seeds |",
        "| :-- | --: | --: | --: | --: | --: | --: |",
    ]
    for name in _names(runs):
        found = [row for row in runs if row["model"] == name]
        cells = [_mean(row["knn_before"] for row in found), _mean(row["knn"] for row in found)]
        cells.append(_mean((row["knn"] - row["knn_before"] for row in found), signed=True))
        cells += [_mean(row[key] for row in found if key in row) for key in ("linear_before", "linear")]
        lines.append(f"| {NETWORKS[name]} | {' | '.join(cells)} | {len(found)} |")
    return "\n".join(lines)


def _labels(labelled: Sequence[Row], what: str) -> str:
    lines = [
        f"| {what} | labels per class | epochs | fine-tuned | from scratch | difference | runs |",
        "| :-- | --: | --: | --: | --: | --: | --: |",
    ]
    for name in _names(labelled):
        for labels in sorted({row["labels"] for row in labelled}):
            found = [row for row in labelled if (row["model"], row["labels"]) == (name, labels)]
            if found:
                cells = [_mean(row[key] for row in found) for key in ("pretrained", "scratch")]
                cells.append(_mean((row["pretrained"] - row["scratch"] for row in found), signed=True))
                lines.append(f"| {NETWORKS[name]} | {labels} | {_epochs(found)} | {' | '.join(cells)} | {len(found)} |")
    return "\n".join(lines)


def _order(rows: Sequence[Row], key: str) -> str:
    """Networks by their means, the best first."""
    means = {name: statistics.mean(row[key] for row in rows if row["model"] == name) for name in _names(rows)}
    best = sorted(means, key=lambda name: -means[name])
    return ", then ".join(f"{NETWORKS[name]} {_percent(means[name])}" for name in best)


def _gains(rows: Sequence[Row], by_labels: bool = False) -> str:
    """The mean differences from scratch in words."""
    found: dict[str, list[float]] = {}
    for row in rows:
        name = f"{row['labels']} labels per class" if by_labels else NETWORKS[row["model"]]
        found.setdefault(name, []).append(row["pretrained"] - row["scratch"])
    return ", ".join(f"{name} {_mean(values, signed=True)}" for name, values in found.items()) or "not measured"


def _epochs(rows: Sequence[Row]) -> str:
    return _and([str(epochs) for epochs in sorted({row["epochs"] for row in rows})])


def _and(words: Sequence[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else "".join(words)


def _mean(values: Iterable[float], signed: bool = False) -> str:
    """In %, with the standard deviation."""
    percent = [100 * value for value in values]
    if not percent:
        return "–"
    spread = f" ± {statistics.stdev(percent):.1f}" if len(percent) > 1 else ""
    return f"{statistics.mean(percent):{'+' if signed else ''}.1f}{spread}"


def _percent(value: float) -> str:
    return f"{100 * value:.1f}"


def _number(rows: Sequence[Row], key: str, digits: int = 0) -> str:
    values = [row[key] for row in rows if key in row]
    return f"{statistics.mean(values):.{digits}f}" if values else "–"


def _speed(rows: Sequence[Row]) -> str:
    if not rows:
        return ""
    lines = []
    for row in rows:
        reached = {"speed": row["ratio"] >= ASKED, "memory": row["kept"] <= ASKED_KEPT}
        said = "both" if all(reached.values()) else _and([key for key, value in reached.items() if value]) or "neither"
        lines.append(
            f"| {row['model']} | {row['batch']} | {row['peer_images_per_s']:.1f} | {row['images_per_s']:.1f} | "
            f"{row['ratio']:.2f} | {row['low']:.2f} to {row['high']:.2f} | {row['peer_kept_megabytes']:.0f} MB | "
            f"{row['kept_megabytes']:.0f} MB | {row['kept']:.0%} | {said} |"
        )
    first = rows[0]
    threads = "one thread" if first["threads"] == 1 else f"{first['threads']} threads"
    return SPEED.format(
        peer=first["peer"].strip(), threads=threads, rounds=first["rounds"], asked=ASKED, asked_kept=ASKED_KEPT,
        rows="\n".join(lines),
    )  # fmt: skip
