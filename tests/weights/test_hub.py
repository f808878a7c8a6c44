"""Published weights, offline: a cache of the hub is built as the hub's client would have left it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import patchloom
from conftest import stir
from patchloom import PatchloomError
from patchloom.compat import import_timm
from patchloom.models.registry import list_models
from patchloom.weights import hub
from patchloom.weights.files import Checkpoint
from patchloom.weights.hub import is_remote, published_tags

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def put_in_cache(home: Path, repository: str, files: dict[str, bytes | Path]) -> None:
    folder = home / "hub" / f"models--{repository.replace('/', '--')}"
    snapshot = folder / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(COMMIT)
    for name, content in files.items():
        (snapshot / name).write_bytes(content if isinstance(content, bytes) else content.read_bytes())


def run(home: Path, code: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: the hub's client reads its settings when it is imported."""
    environment = {**os.environ, "HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=300)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that holds DeiT-tiny as timm publishes it, and two repositories of users."""
    home = tmp_path_factory.mktemp("hub")
    theirs = stir(import_timm().create_model("deit_tiny_patch16_224")).eval()
    save_file(theirs.state_dict(), home / "theirs.safetensors")
    config = {"architecture": "deit_tiny_patch16_224", "num_classes": 1000, "pretrained_cfg": theirs.pretrained_cfg}
    files = {"model.safetensors": home / "theirs.safetensors", "config.json": json.dumps(config, default=list).encode()}
    put_in_cache(home, "timm/deit_tiny_patch16_224.fb_in1k", files)
    resmlp = import_timm().create_model("resmlp_12_224")
    torch.save(resmlp.state_dict(), home / "resmlp.bin")
    cfg = {**resmlp.pretrained_cfg, "crop_pct": 0.77, "mean": [0.5, 0.5, 0.5]}
    files = {
        "pytorch_model.bin": home / "resmlp.bin",
        "config.json": json.dumps({"pretrained_cfg": cfg}, default=list).encode(),
    }
    put_in_cache(home, "someone/resmlp", files)
    put_in_cache(home, "someone/bare", {"pytorch_model.bin": home / "resmlp.bin"})
    ours = patchloom.create_model("cait_nano", num_classes=3)
    ours.class_names = ("ant", "bee", "cat")
    patchloom.save(ours, home / "ours.safetensors")
    put_in_cache(home, "someone/ants", {"model.safetensors": home / "ours.safetensors"})
    foreign = import_timm().create_model("test_vit").eval()
    save_file(foreign.state_dict(), home / "foreign.safetensors")
    put_in_cache(home, "timm/test_vit.r160_in1k", {"model.safetensors": home / "foreign.safetensors"})
    with torch.no_grad():
        torch.save(theirs(torch.ones(1, 3, 224, 224)), home / "logits.pt")
        torch.save(foreign(torch.ones(1, 3, 160, 160)), home / "foreign.pt")
    return home


def test_a_tag_of_ours_finds_timms_file_with_its_preprocessing(home: Path) -> None:
    done = run(
        home,
        f"""
import torch, patchloom
model = patchloom.load("deit_tiny.fb_in1k")
want = torch.load({str(home / "logits.pt")!r}, weights_only=True)
assert float((model(torch.ones(1, 3, 224, 224)) - want).abs().max() / want.abs().max()) < 1e-5
assert model.config.name == "deit_tiny" and model.preprocessing.crop_ratio == 0.875, model.preprocessing
assert "timm's is 0.9" in str(model.load_report)
assert model.class_names[0] == "tench" and len(set(model.class_names)) == 1000
same = patchloom.load("hf-hub:timm/deit_tiny_patch16_224.fb_in1k")
assert (same.class_names, same.preprocessing) == (model.class_names, model.preprocessing)
assert model.preprocessing.interpolation == "bicubic" and model.preprocessing.mean == (0.485, 0.456, 0.406)
assert "deit_tiny.fb_in1k" in str(model.load_report)
bigger = patchloom.load("deit_tiny_patch16_224.fb_in1k", img_size=288, num_classes=5)
assert bigger.preprocessing.img_size == (288, 288) and bigger.load_report.resized
assert bigger.class_names is None  # a head of other classes
""",
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_repositories_of_users_in_timms_and_in_our_form(home: Path) -> None:
    done = run(
        home,
        """
import patchloom
model = patchloom.load("hf-hub:someone/resmlp")
assert model.config.name == "resmlp_s12" and model.class_names is None
assert model.preprocessing.crop_ratio == 0.77 and model.preprocessing.mean == (0.5, 0.5, 0.5)
ants = patchloom.load("hf-hub:someone/ants")
bare = patchloom.load("hf-hub:someone/bare")
assert "config.json" in str(bare.load_report) and bare.preprocessing.crop_ratio == 0.9
assert ants.class_names == ("ant", "bee", "cat") and ants.config.name == "cait_nano"
""",
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("cait_s24.fb_dist_in1k", ["not in the hub's cache", "HF_HUB_OFFLINE"]),
        ("hf-hub:nobody/nothing", ["nobody/nothing", "connection"]),
        ("hf-hub:not a name", ["not a name"]),
        ("cait_s24.fb_in99k", ["fb_in99k", "fb_dist_in1k"]),
        ("cait_ss24.fb_dist_in1k", ["cait_s24"]),
        ("patchconvnet_s60.fb_in1k", ["timm's catalogue has none"]),
    ],
)
def test_what_cannot_be_had_is_said(home: Path, source: str, words: list[str]) -> None:
    done = run(
        home,
        f"import patchloom\ntry:\n    patchloom.load({source!r})\nexcept patchloom.PatchloomError as e:\n    print(e)",
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for word in words:
        assert word in done.stdout


def test_the_catalogue_is_timms() -> None:
    assert published_tags("cait_s24") == ["cait_s24_224.fb_dist_in1k", "cait_s24_384.fb_dist_in1k"]
    assert published_tags("deit3_huge") == ["deit3_huge_patch14_224.fb_in1k", "deit3_huge_patch14_224.fb_in22k_ft_in1k"]
    assert "resmlp_big_24_224.fb_in22k_ft_in1k" in published_tags("resmlp_b24_p8")
    assert published_tags("patchconvnet_s60") == published_tags("deit_nano") == []
    known = import_timm().list_pretrained(["deit*", "cait*", "resmlp*"])
    assert sorted(full for name in list_models() for full in published_tags(name)) == sorted(known)


def test_tags_of_the_papers_networks_have_the_papers_crop_and_imagenets_names(monkeypatch: pytest.MonkeyPatch) -> None:
    timm = import_timm()
    crops = {"deit": 0.875, "deit3": 1.0, "cait": 1.0, "resmlp": 0.9}
    differing = 0
    known = [full for name in list_models() for full in published_tags(name)]
    for full in known:
        cfg = timm.models.get_pretrained_cfg(full)
        monkeypatch.setattr(
            hub,
            "_from_repository",
            lambda *_, cfg=cfg: Checkpoint("x", {}, {"preprocessing": hub._preprocessing(cfg.to_dict(), "x")}),
        )
        for source in (full, f"hf-hub:timm/{full}"):
            got, crop = hub.fetch(source, None), crops[full.split("_")[0]]
            assert got.metadata["preprocessing"]["crop_ratio"] == crop, full
            assert ("timm's is" in " ".join(got.notes)) == (cfg.crop_pct != crop), full
            assert ("class_names" in got.metadata) == full.endswith("in1k"), full
        differing += cfg.crop_pct != crop
    assert (len(known), differing) == (45, 24)
    assert hub._paper_family("vit_tiny_patch16_224") is None  # not of the papers: timm's crop stays


def test_a_tag_stands_for_one_file_at_every_size(monkeypatch: pytest.MonkeyPatch) -> None:
    fetched = []

    def repository(name: str, label: str) -> Checkpoint:
        fetched.append(name)
        return Checkpoint(label, {}, {})

    monkeypatch.setattr(hub, "_from_repository", repository)
    for tag in ("deit_base.fb_in1k", "deit3_base.fb_in1k", "cait_xxs24.fb_dist_in1k", "deit_base_distilled.fb_in1k"):
        notes = {size: hub.fetch(tag, size).notes for size in (None, (224, 224), (160, 160), (384, 384))}
        assert len(set(fetched)) == 1
        assert "_384." not in fetched.pop()
        fetched.clear()
        assert [size for size, note in notes.items() if "fine-tuned at this size" in " ".join(note)] == [(384, 384)]
    hub.fetch("deit_base_patch16_384.fb_in1k", None)
    assert "_384." in fetched.pop()


def test_paths_are_not_taken_for_tags(tmp_path: Path) -> None:
    assert not is_remote(tmp_path / "a.b")
    assert not is_remote("weights.safetensors")
    assert not is_remote("folder/model.tag")
    assert is_remote("deit_tiny.fb_in1k")
    with pytest.raises(PatchloomError, match="does not exist"):
        patchloom.load("missing.safetensors")
    with pytest.raises(PatchloomError, match="create_model"):
        patchloom.load("deit_tiny")


def test_a_network_of_timm_loads_from_the_cache(home: Path) -> None:
    code = f"""
import torch, patchloom
with torch.no_grad():
    logits = patchloom.load("timm:test_vit").eval()(torch.ones(1, 3, 160, 160))
assert torch.equal(logits, torch.load({str(home / "foreign.pt")!r}))
"""
    done = run(home, code)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("answers", [False, True])
def test_without_a_network_one_message_comes_soon(home: Path, answers: bool) -> None:
    """A hub that takes connections and never answers, and one that nobody reaches."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if answers:
            listener.listen()
        code = """
import time, patchloom
patchloom.weights.hub.import_timm()
for source in ("cait_s24.fb_dist_in1k", "timm:resnet18", "hf-hub:someone/ants", "timm:test_vit"):
    start = time.time()
    try:
        print(patchloom.load(source).config.name, time.time() - start)
    except patchloom.PatchloomError as error:
        print(error, time.time() - start)
"""
        environment = {**os.environ, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0"}
        environment["HF_ENDPOINT"] = f"http://127.0.0.1:{listener.getsockname()[1]}"
        words = [sys.executable, "-c", f"import patchloom.weights.hub\n{code}"]
        done = subprocess.run(words, capture_output=True, text=True, env=environment, timeout=120)
    *messages, cached, foreign = done.stdout.splitlines()
    for message in messages:
        assert "not in the hub's cache and could not be fetched" in message
    assert cached.startswith("cait_nano "), cached  # what is in the cache still loads
    assert foreign.startswith("timm:test_vit "), foreign
    assert all(float(line.split()[-1]) < 10 for line in (*messages, cached, foreign))
    assert not done.stderr, done.stderr  # no warnings of retries
