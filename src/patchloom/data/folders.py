"""Folders with one subfolder per class, with or without folders of splits above them, and folders without classes."""

from __future__ import annotations

import os
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator
from pathlib import Path

from patchloom.data.decoding import EXTENSIONS, unreadable_extensions
from patchloom.data.listing import LAYOUTS, SPLIT_NAMES, Rows, class_notes, label_by_name
from patchloom.data.sources import DEFAULT_COLUMN, FileSource, Item, Source
from patchloom.errors import PatchloomError
from patchloom.text import count, some

_LEFTOVERS = frozenset({"__MACOSX", "@eaDir"})  # hidden folders by another name: macOS archives, Synology disks


class _Walk:
    """The image files of class folders, each real folder visited once, whatever symbolic links say.

    Real folders come before links to folders, so that what is found does not depend on the order of names.
    """

    def __init__(self, root: Path) -> None:
        real = Path(os.path.realpath(root))
        # The parents too: a link upwards would lead back to the root.
        self.visited = {real, *real.parents}
        self.files: dict[str, list[str]] = {}
        self.others: Counter[str] = Counter()
        self.unreadable: Counter[str] = Counter()  # by extension
        self.special: list[str] = []  # FIFOs, devices and sockets with the name of an image
        self.links: list[str] = []

    def run(self, root: Path, folders: Iterable[Path]) -> None:
        pending: deque[tuple[str, Path]] = deque()
        postponed: deque[tuple[str, Path]] = deque()
        for folder in folders:
            (postponed if folder.is_symlink() else pending).append((folder.name, folder))
        # A loop instead of recursion: folders may be nested deeper than Python's stack.
        while pending or postponed:
            name, folder = (pending or postponed).popleft()
            real = Path(os.path.realpath(folder))
            if real in self.visited:
                self.links.append(folder.relative_to(root).as_posix())
                continue
            self.visited.add(real)
            found = self.files.setdefault(name, [])
            # Keys are relative to the root, with slashes on every system, so that runs find the images after a move.
            inside = folder.relative_to(root).as_posix()
            for entry in _visible(folder):
                if _is_folder(entry):
                    (postponed if entry.is_symlink() else pending).append((name, Path(entry.path)))
                elif _is_image(entry):
                    found.append(f"{inside}/{entry.name}")
                else:
                    self._leave_aside(entry, inside)

    def _leave_aside(self, entry: os.DirEntry[str], inside: str) -> None:
        extension = Path(entry.name).suffix.lower()
        if extension in unreadable_extensions():
            self.unreadable[extension] += 1
        elif extension in EXTENSIONS:
            self.special.append(f"{inside}/{entry.name}")
        else:
            self.others[extension or entry.name] += 1

    def skipped(self) -> Iterator[str]:
        """Images that cannot be read, by extension, and what is not a file."""
        for extension, number in sorted(self.unreadable.items()):
            command = unreadable_extensions()[extension]
            yield f"{count(number, f'{extension} file')} skipped. To read them: {command}"
        if self.special:
            yield f"{count(len(self.special), 'file')} skipped, not regular files: {some(sorted(self.special))}"

    def notes(self) -> Iterator[str]:
        yield from self.skipped()
        if self.others:
            kinds = ", ".join(sorted(self.others)[:8])
            yield f"{count(sum(self.others.values()), 'file')} with other file extensions skipped: {kinds}."
        for link in sorted(self.links):
            yield f"The link {link} leads to a folder that is read already; it is not followed."


def _visible(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            seen = [entry for entry in entries if not entry.name.startswith(".") and entry.name not in _LEFTOVERS]
    except OSError as error:
        raise PatchloomError(f"The folder {folder} cannot be read: {error.strerror or error}") from error
    # scandir gives the order of the file system, which differs between machines.
    return sorted(seen, key=lambda entry: entry.name)


def _is_image(entry: os.DirEntry[str]) -> bool:
    """A file with the ending of an image; a broken link counts, so that reading it says what is wrong."""
    extension = os.path.splitext(entry.name)[1].lower()
    named = extension in EXTENSIONS and extension not in unreadable_extensions()
    if not named or not entry.is_symlink():
        return named and entry.is_file()
    return os.path.isfile(entry.path) or not os.path.exists(entry.path)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Also of a link to a folder; a link to itself is none, where `DirEntry.is_dir` would raise an error."""
    return os.path.isdir(entry.path) if entry.is_symlink() else entry.is_dir()


def _folders(folder: Path) -> list[Path]:
    return [Path(entry.path) for entry in _visible(folder) if _is_folder(entry)]


def open_folder(where: str, root: Path, targets: str = "class") -> Source:
    """The images below a folder, with the name of the folder they lie in as their class.

    With targets "none", images outside class folders are taken too, and then no image has a class.

    Args:
        where: the folder as the user wrote it, for messages.
        root: the same as a path.
        targets: "class" or "none".

    Raises:
        PatchloomError: no images in class folders, classes that train lacks, or two folders for one split.
    """
    split_folders = _split_folders(where, root)
    notes = []
    if split_folders:
        unused = [folder.name for folder in _folders(root) if folder not in split_folders.values()]
        if unused:
            notes.append(f"Folders beside the splits skipped: {', '.join(unused)}.")
    folders = split_folders or {"all": root}
    walks = {split: _walk(root, folder) for split, folder in folders.items()}
    found = _rows(walks)
    if targets == "none":
        found = _with_strays(root, folders, walks, found)
    if not any(found.values()):
        skipped = [note for walk in walks.values() for note in walk.skipped()]
        raise PatchloomError(_nothing_found(where, root), *LAYOUTS, *skipped)
    labelled = all(names for rows in found.values() for _, names in rows)
    class_names = _class_names(walks, notes) if labelled else []
    columns = {DEFAULT_COLUMN: class_names} if labelled else {}
    splits = label_by_name(where, columns, found)
    for split, folder in folders.items():
        notes += [*walks[split].notes(), *(_stray_notes(folder) if labelled else ())]
    return FileSource(root, where, class_names, _filled(splits, notes), [*notes, *class_notes(class_names, splits)])


def _rows(walks: dict[str, _Walk]) -> Rows:
    return {
        split: [(key, (name,)) for name, keys in walk.files.items() for key in keys] for split, walk in walks.items()
    }


def _with_strays(root: Path, folders: dict[str, Path], walks: dict[str, _Walk], found: Rows) -> Rows:
    """All images without their classes, if some lie outside class folders, or in classes that training lacks."""
    strays = {
        split: [(folder / name).relative_to(root).as_posix() for name in _images_in(folder)]
        for split, folder in folders.items()
    }
    # Classes that training lacks have no index: then no image has a class, rather than some of them.
    trained = set(_class_names(walks, []))
    if not any(strays.values()) and all(names[0] in trained for rows in found.values() for _, names in rows):
        return found
    return {split: [(key, ()) for key in (*strays[split], *(key for key, _ in found[split]))] for split in folders}


def _class_names(walks: dict[str, _Walk], notes: list[str]) -> list[str]:
    """The folders with images, of the split that is trained on where there is one."""
    filled = {split: {name for name, files in walk.files.items() if files} for split, walk in walks.items()}
    every = {name for walk in walks.values() for name in walk.files}
    if empty := sorted(every.difference(*filled.values())):
        notes.append(f"{count(len(empty), 'folder')} without images, not taken as a class: {some(empty)}")
    return sorted(filled.get("train") or filled.get("all") or set().union(*filled.values()))


def _walk(root: Path, folder: Path) -> _Walk:
    walk = _Walk(folder)
    walk.run(root, _folders(folder))
    return walk


def _split_folders(where: str, root: Path) -> dict[str, Path]:
    """The folders train, val and test, if that is the layout; beside other classes, one may be called train."""
    folders = _folders(root)
    named: dict[str, list[Path]] = defaultdict(list)
    for folder in folders:
        if folder.name.lower() in SPLIT_NAMES:
            named[SPLIT_NAMES[folder.name.lower()]].append(folder)
    mixed = sum(map(len, named.values())) < len(folders)
    # With other folders beside it, "train" is a split only if it holds class folders and no images; else it is a class.
    if mixed and not any(_folders(folder) and not _images_in(folder) for folder in named.get("train", [])):
        return {}
    for split, several in named.items():
        if len(several) > 1:
            names = " and ".join(folder.name for folder in several)
            raise PatchloomError(f"{where} has {names}, which both mean {split}; keep one of them.")
    return {split: named[split][0] for split in ("train", "val", "test") if split in named}


def _images_in(folder: Path) -> list[str]:
    """The names of the images directly in a folder."""
    return [entry.name for entry in _visible(folder) if not _is_folder(entry) and _is_image(entry)]


def _stray_notes(folder: Path) -> Iterator[str]:
    stray = _images_in(folder)
    if stray:
        yield f"{count(len(stray), 'image')} outside class folders skipped: {some(stray, 3)}"


def _nothing_found(where: str, root: Path) -> str:
    entries = _visible(root)
    in_splits = [f"{folder.name}/{name}" for folder in _folders(root) for name in _images_in(folder)]
    images = _images_in(root) or in_splits
    names = [entry.name + ("/" if _is_folder(entry) else "") for entry in entries]
    if images:
        found = f"{where} has {count(len(images), 'image')}, such as {images[0]}, but no class folders with images"
    elif names:
        found = f"{where} has no images in class folders; it has {', '.join(names[:6])}{', ...' if names[6:] else ''}"
    else:
        found = f"{where} is an empty folder"
    hint = ""
    if any(name.endswith(".tar") for name in names):
        hint = f" For tar shards, say wds:{where}."
    elif {"dataset_dict.json", "dataset_info.json"} & set(names):
        hint = f" For a Hugging Face data set, say hf:{where}."
    return f"{found}.{hint}"


def _filled(splits: dict[str, list[Item]], notes: list[str]) -> dict[str, list[Item]]:
    """The splits that have images, with a note for each that has none."""
    for name, items in splits.items():
        if not items:
            notes.append(f"The split {name} has no images.")
    return {name: items for name, items in splits.items() if items}
