"""Parallel text and vocabularies: plain or compressed files, clear errors, exact round trips."""

from __future__ import annotations

import gzip
import io
import pickle
from pathlib import Path

import pytest
import sentencepiece

from patchloom import PatchloomError
from patchloom.tasks.translation.text import (
    ParallelText,
    describe_lines,
    parse_pair,
    read_lines,
    read_parallel,
    stems,
)
from patchloom.tasks.translation.vocabulary import Vocabulary

EN = ["A man rides a bike.", "Two dogs run.", "A woman in a blue dress.", "Children play outside."] * 15
DE = ["Ein Mann fährt Rad.", "Zwei Hunde laufen.", "Eine Frau in blauem Kleid.", "Kinder spielen draußen."] * 15


def write(folder: Path, **files: list[str]) -> Path:
    folder.mkdir(exist_ok=True)
    for name, lines in files.items():
        (folder / name.replace("_", ".", 1)).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return folder


def test_plain_and_compressed_files_give_the_same_lines(tmp_path: Path) -> None:
    folder = write(tmp_path / "data", train_en=EN, train_de=DE)
    plain = read_parallel(folder, "train", ("en", "de"))
    (folder / "train.de.gz").write_bytes(gzip.compress((folder / "train.de").read_bytes()))
    (folder / "train.de").unlink()
    assert read_parallel(folder, "train", ("en", "de")) == plain
    assert (list(plain.source), list(plain.target)) == (EN, DE)
    assert read_parallel(folder, "train", ("de", "en")).source == plain.target


def test_stems_may_have_any_name(tmp_path: Path) -> None:
    folder = write(tmp_path / "data", train_en=EN, train_de=DE, val_en=EN)
    for language, lines in (("en", EN), ("de", DE)):
        (folder / f"test_2016.v1.{language}").write_text("\n".join(lines), encoding="utf-8")  # no line end at the end
    assert stems(folder, ("en", "de")) == ["test_2016.v1", "train"]
    assert len(read_parallel(folder, "test_2016.v1", ("en", "de"))) == 60


def test_lines_end_at_line_ends_only(tmp_path: Path) -> None:
    folder = tmp_path
    (folder / "a.en").write_bytes("\ufeffone\u2028half \r\ntwo\x0b\r\n".encode())
    (folder / "a.de").write_bytes(b"eins\nzwei")
    text = read_parallel(folder, "a", ("en", "de"))
    assert text.source == ("one\u2028half", "two")
    assert text.target == ("eins", "zwei")


@pytest.mark.parametrize(
    ("files", "stem", "pair", "message"),
    [
        ({"train_en": EN, "train_de": DE[:-1]}, "train", ("en", "de"), r"train.en has 60 lines and train.de has 59"),
        ({"train_en": EN, "train_de": DE}, "train", ("en", "fr"), r"no train.fr and .*It has train in de, en"),
        ({"train_en": EN, "train_de": DE}, "trian", ("en", "de"), r"It has train in en. Did you mean 'train'"),
        ({"train_en": [], "train_de": []}, "train", ("en", "de"), r"has no lines"),
        ({"0_png": ["x"]}, "train", ("en", "de"), r"data has no train.en .*no text in this language"),
    ],
)
def test_files_that_do_not_fit_are_refused(tmp_path: Path, files, stem: str, pair, message: str) -> None:
    with pytest.raises(PatchloomError, match=message):
        read_parallel(write(tmp_path / "data", **files), stem, pair)


def test_missing_folders_and_damaged_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PatchloomError, match="nowhere does not exist"):
        read_parallel(tmp_path / "nowhere", "train", ("en", "de"))
    folder = write(tmp_path / "data", train_en=EN)
    with pytest.raises(PatchloomError, match="is not a folder"):
        read_parallel(folder / "train.en", "train", ("en", "de"))
    (folder / "train.de").write_bytes("gut\nschön\n".encode("latin-1"))
    with pytest.raises(PatchloomError, match="line 2 is not UTF-8"):
        read_parallel(folder, "train", ("en", "de"))
    (folder / "train.de").unlink()
    for content in (b"not gzip", gzip.compress(b"a" * 1000)[:20], gzip.compress(b"abc" * 99)[:-9] + b"x" * 9):
        (folder / "train.de.gz").write_bytes(content)
        with pytest.raises(PatchloomError, match=r"Cannot read .*train\.de\.gz"):
            read_parallel(folder, "train", ("en", "de"))


def test_text_that_was_compressed_a_thousand_times_is_refused(tmp_path: Path) -> None:
    packed = b"".join(gzip.compress(bytes(64 << 20), 6) for _ in range(4))  # 250 KB
    (tmp_path / "train.de.gz").write_bytes(packed)
    with pytest.raises(PatchloomError, match="bytes unpack to more than"):
        read_lines(tmp_path / "train.de.gz")
    text = "".join(f"Satz {i}.\n" for i in range(1000))
    (tmp_path / "train.de.gz").write_bytes(gzip.compress(text[:500].encode()) + gzip.compress(text[500:].encode()))
    assert read_lines(tmp_path / "train.de.gz") == text.splitlines()


def test_pairs_are_two_languages() -> None:
    assert parse_pair("en-de") == ("en", "de")
    for wrong in ("en", "en-", "en-en", "en-de-fr", ""):
        with pytest.raises(PatchloomError, match="such as en-de"):
            parse_pair(wrong)


def test_lines_are_named() -> None:
    text = ParallelText(Path(), "train", ("en", "de"), ("a", "", "b", "c"), ("x", "y", "", "z"))
    assert describe_lines(text, [1, 2], "empty") == "2 lines of train.en or train.de are empty (lines 2, 3)"


def test_a_vocabulary_is_a_function_of_its_text_and_travels_as_bytes() -> None:
    vocabulary = Vocabulary.train([*EN, *DE], 100)
    assert Vocabulary.train([*EN, *DE], 100).model == vocabulary.model
    assert len(vocabulary) <= 100
    assert (vocabulary.bos, vocabulary.eos, vocabulary.unknown) == (1, 2, 3)
    ids = vocabulary.encode(EN + DE)
    assert vocabulary.decode(ids) == EN + DE
    assert all(row[-1] == 2 and min(row) > 0 and max(row) < len(vocabulary) for row in ids)
    assert vocabulary.decode([[1, *ids[0], 0, 0]]) == EN[:1]
    for copy in (Vocabulary.from_text(vocabulary.to_text()), pickle.loads(pickle.dumps(vocabulary))):
        assert copy == vocabulary
        assert copy.encode(EN) == vocabulary.encode(EN)
    assert vocabulary.unknown in vocabulary.encode(["日本"])[0]


def test_a_given_vocabulary_without_padding_leaves_id_zero_free(tmp_path: Path) -> None:
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(EN + DE), model_writer=written, vocab_size=50, minloglevel=2
    )
    (tmp_path / "own.model").write_bytes(written.getvalue())
    vocabulary = Vocabulary.read(tmp_path / "own.model")
    ids = vocabulary.encode(EN)
    assert len(vocabulary) == 51
    assert min(min(row) for row in ids) > 0
    assert vocabulary.decode(ids) == EN


def test_vocabularies_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.model").write_bytes(b"nonsense")
    with pytest.raises(PatchloomError, match=r"bad\.model is not a model of sentencepiece"):
        Vocabulary.read(tmp_path / "bad.model")
    with pytest.raises(PatchloomError, match=r"missing\.model"):
        Vocabulary.read(tmp_path / "missing.model")
    with pytest.raises(PatchloomError, match=r"10 tokens cannot be trained .* characters alone need \d\d\. Set a"):
        Vocabulary.train(EN, 10)
    for options, message in (({"pad_id": 3}, "padding at id 3"), ({"bos_id": -1}, "beginning or the end")):
        written = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(EN + DE), model_writer=written, vocab_size=50, minloglevel=2, **options
        )
        with pytest.raises(PatchloomError, match=message):
            Vocabulary(written.getvalue())
