"""Translation: ResMLP and the Transformer at equal parameters; quality, training steps and decoding.

    python benchmarks/translation.py MULTI30K [--parts steps quality decoding] [--minutes 12 | --steps N] [--seeds 2]
        [--jobs 2] [--rounds 9] [--out DIR] [--json FILE] [--page docs/results/translation.md] [--compare FILE]

MULTI30K is a folder with train, val and test_2016_flickr in en and de. Everything is on one thread.

- steps: training steps per second of both and of torch's nn.Transformer, on the same batches in the same rounds.
- quality: both are trained on the same batches for equally many steps, so many that the slower one takes `--minutes`,
  and translate the test set; `--jobs 2` trains two at a time.
- decoding: tokens per second with and without caches, and beside CTranslate2, if it is installed, with the weights of
  our Transformer.

Each part is kept in DIR and not measured again; a run that was interrupted is resumed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import torch

import patchloom
import script
import translation_speed as speed
from patchloom.console import Console
from patchloom.models.translation import TranslationNetwork
from patchloom.runs.launch import resume
from patchloom.tasks.spec import Context
from patchloom.tasks.translation.decoding import DecodingOptions
from patchloom.tasks.translation.plans import plan_translation
from patchloom.tasks.translation.predict import decoding_options
from patchloom.tasks.translation.task import TextBatch, Translation
from patchloom.tasks.translation.text import read_parallel
from patchloom.temporary import write_json
from patchloom.training.processes import Processes
from translation_page import page
from translation_peers import SIZES, make_network, network_config, parameters

PAIR, TEST = "en-de", "test_2016_flickr"
TRAINED = "small"  # the size that is trained
BASE_VOCABULARY = 8000  # of the size that is not trained
STEP_BATCHES = {"small": 8, "base": 1}  # so many are one measurement
SENTENCES = {"small": 32, "base": 8}  # that are decoded


class Bench:
    """The options, and the data as the trained size reads it."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.out: Path = options.out
        self.task = open_small(options.data)

    def batches(self, size: str) -> list[TextBatch]:
        """The first training batches; other sizes have other vocabularies, of which these tokens are a part."""
        return list(islice(self.task.batches(0, STEP_BATCHES[size]), STEP_BATCHES[size]))

    def vocab_size(self, size: str) -> int:
        return len(self.task.vocabulary) if size == TRAINED else BASE_VOCABULARY

    def sources(self, size: str) -> torch.Tensor:
        """The token ids of sentences of the test set, evenly spread over it, (B, S)."""
        text = read_parallel(self.options.data, TEST, ("en", "de")).source
        lines = text[:: max(1, len(text) // SENTENCES[size])][: SENTENCES[size]]
        encoded = [torch.tensor(row) for row in self.task.vocabulary.encode(lines)]
        return torch.nn.utils.rnn.pad_sequence(encoded, batch_first=True)

    def kept(self, name: str, measure: Callable[[], Iterable[dict[str, Any]]]) -> list[dict[str, Any]]:
        """The rows of a measurement: of an earlier call, or measured and written to DIR."""
        file = self.out / f"{name}.json"
        if not file.exists():
            rows = list(measure())
            for row in rows:
                print(
                    {key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()},
                    flush=True,
                )
            write_json(file, rows)
        found: list[dict[str, Any]] = json.loads(file.read_text())
        return found


def open_small(data: Path) -> Translation:
    """The task of the trained size: its text, vocabulary and batches."""
    name, options = SIZES[TRAINED]["transformer"]
    plan = plan_translation(data, PAIR, name, "transformer_mt@small", options=options)
    task = plan.spec.open(plan.task, plan.recipe, Context(Processes(), Console(quiet=True)))
    assert isinstance(task, Translation)
    return task


# Quality


def quality(bench: Bench) -> Iterator[dict[str, Any]]:
    """Train every network with every seed, and evaluate it on the test set."""
    options = bench.options
    steps = options.steps or steps_in(options.minutes, bench.kept(f"steps-{TRAINED}", lambda: training(bench, TRAINED)))
    cases = [(kind, seed, steps, options.data, bench.out) for seed in range(options.seeds) for kind in SIZES[TRAINED]]
    print(f"{len(cases)} runs of {steps} steps, {options.jobs} at a time", flush=True)
    seen = sum(int(bench.task.weight(batch)) for batch in bench.task.batches(0, steps))
    with ProcessPoolExecutor(options.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        for row in pool.map(trained, cases):
            yield {**row, "target_tokens": seen, "pairs": len(bench.task.corpus.train)}


def steps_in(minutes: float, rows: Iterable[dict[str, Any]]) -> int:
    return max(1, int(60 * minutes * min(row["steps_per_s"] for row in rows)))


def run_folder(out: Path, kind: str, steps: int, seed: int) -> Path:
    return out / f"{kind}-{steps}-{seed}"


def trained(case: tuple[str, int, int, Path, Path]) -> dict[str, Any]:
    """A run to its end, from its last checkpoint if it has one, and its metrics on the test set."""
    kind, seed, steps, data, out = case
    torch.set_num_threads(1)
    folder, quiet = run_folder(out, kind, steps, seed), Console(quiet=True)
    name, model_options = SIZES[TRAINED][kind]
    if (folder / "recipe.yaml").exists():
        run = resume(folder, quiet)
    else:
        run = patchloom.translate(
            data, pair=PAIR, model=name, recipe=f"{kind}_mt@small", out=folder, console=quiet,
            model_options=model_options, steps=steps, seed=seed, eval_every="2 epochs", checkpoint_every="2m",
        )  # fmt: skip
    found = patchloom.evaluate(run.folder, data, split=TEST)
    network: Any = patchloom.load(run.folder)
    return {
        "part": "quality",
        "model": kind,
        "seed": seed,
        "size": TRAINED,
        "options": {"from": name, **model_options},
        "params": parameters(network),
        "steps": steps,
        "epochs": run.records()[-1]["epoch"],
        **{key: found[key] for key in ("bleu", "chrf", "bleu_tokenized", "loss", "count", "signatures")},
    }


# Speed


def training(bench: Bench, size: str) -> Iterable[dict[str, Any]]:
    return speed.training_rows(size, bench.vocab_size(size), bench.batches(size), bench.options.rounds)


def decoding(bench: Bench, size: str) -> Iterator[dict[str, Any]]:
    networks = trained_networks(bench) if size == TRAINED else None
    options, rounds, source = decoding_options(bench.task.vocabulary), bench.options.rounds, bench.sources(size)
    if networks is None:
        networks = {kind: make_network(size, kind, bench.vocab_size(size)).eval() for kind in SIZES[size]}
        options = speed.fixed_length(options)
    shared: tuple[str, dict[str, TranslationNetwork], torch.Tensor, DecodingOptions] = (size, networks, source, options)
    for row in (*speed.cache_rows(*shared, max(1, rounds // 3)), *speed.peer_rows(*shared, rounds)):
        yield {**row, "trained": options.eos not in options.forbidden, "beam": options.beam}


def trained_networks(bench: Bench) -> dict[str, TranslationNetwork] | None:
    """Those of the first seed; None where they are not trained yet."""
    file = bench.out / "quality.json"
    rows = json.loads(file.read_text()) if file.exists() else []
    folders = {row["model"]: run_folder(bench.out, row["model"], row["steps"], 0) for row in rows}
    if set(folders) != set(SIZES[TRAINED]):
        return None
    loaded: Any = {kind: patchloom.load(folders[kind]).eval() for kind in SIZES[TRAINED]}
    return loaded


# All


def check_sizes() -> None:
    """Both networks of a size have equally many parameters, within 1 %."""
    for size, kinds in SIZES.items():
        with torch.device("meta"):
            counts = [parameters(make_network(size, kind, 4000)) for kind in kinds]
        print(
            f"{size}: " + ", ".join(f"{kind} {count:,}" for kind, count in zip(kinds, counts, strict=True)), flush=True
        )
        assert max(counts) / min(counts) < 1.01


def measured(options: argparse.Namespace) -> list[dict[str, Any]]:
    check_sizes()
    options.out.mkdir(parents=True, exist_ok=True)
    bench = Bench(options)
    rows: list[dict[str, Any]] = []
    if "steps" in options.parts:
        for size in options.sizes:
            rows += bench.kept(f"steps-{size}", lambda size=size: training(bench, size))
    if "quality" in options.parts:
        rows += bench.kept("quality", lambda: quality(bench))
    if "decoding" in options.parts:
        for size in options.sizes:
            rows += bench.kept(f"decoding-{size}", lambda size=size: decoding(bench, size))
    if options.page:
        configs = {
            size: {kind: network_config(size, kind, bench.vocab_size(size)) for kind in SIZES[size]} for size in SIZES
        }
        options.page.write_text(page(rows, configs, options.rounds))
    return rows


def main() -> None:
    parser = script.parser(__doc__, rounds=9, threads=1)
    parser.add_argument("data", type=Path, metavar="MULTI30K")
    parser.add_argument(
        "--parts", nargs="+", default=["steps", "quality", "decoding"], choices=["steps", "quality", "decoding"]
    )
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=list(SIZES), help="of steps and decoding")
    parser.add_argument("--minutes", type=float, default=12, help="of the slower run (default: 12)")
    parser.add_argument("--steps", type=int, help="of each run, in place of --minutes")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--jobs", type=int, default=2, help="runs that are trained at the same time (default: 2)")
    parser.add_argument("--out", type=Path, default=Path(".cache/translation"), help="keep runs and measurements here")
    parser.add_argument("--page", type=Path, help="write the tables here, docs/results/translation.md")
    script.run(parser.parse_args(), measured)


if __name__ == "__main__":
    main()
