"""The models of a service: loading, naming, and reloading without interrupting requests."""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from torch import Tensor, nn

from patchloom import __version__
from patchloom.devices import Device
from patchloom.errors import PatchloomError, did_you_mean
from patchloom.inference.models import check_head, open_model
from patchloom.models.fused import fuse
from patchloom.models.network import Network
from patchloom.serve.indexes import HostedIndex
from patchloom.weights.files import digest, read


@dataclass(eq=False)
class HostedModel:
    """A network under the name that requests use. `predictor` is the fused copy; `digest` is the SHA-256 of the
    weights, independent of their file."""

    name: str
    network: Network
    shared: bool = False  # its unchanged tensors belong to a base that other models use too
    int8: bool = False

    def __post_init__(self) -> None:
        # a fused copy has its own weights, which would undo the sharing
        self.predictor = self.network if self.shared else fuse(self.network, int8=self.int8)
        self.digest = digest("", self.network.state_dict())

    @property
    def identity(self) -> dict[str, str]:
        """The fields of a response that identify code and weights."""
        return {"version": __version__, "model": self.name, "digest": self.digest}

    @property
    def classifies(self) -> bool:
        """Whether it has a classifier; networks that were trained for search may have none."""
        return bool(getattr(self.network.config, "classifier", True))

    @cached_property
    def twin(self) -> Network:
        """The same weights in separate modules: explanations register hooks, while predictions run at the same time.

        Its crop ratio is 1, since its images are already cropped.
        """
        made = twin(self.network)
        made.preprocessing = replace(self.network.preprocessing, crop_ratio=1.0)
        return made


def twin(network: Network) -> Network:
    """A copy of the modules that uses the tensors of `network` without copying them."""
    shared: dict[int, Tensor] = {}
    for parameter in network.parameters():
        # New parameter objects on the same memory, since gradients and hooks belong to objects.
        shared[id(parameter)] = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
    for buffer in network.buffers():
        shared[id(buffer)] = buffer
    return copy.deepcopy(network, shared)  # deepcopy uses what it finds in its memo


class Hosting:
    """All models of a service, and its index if it has one. A reload loads new ones beside the old ones and then
    exchanges them at once; requests in progress keep their model."""

    def __init__(
        self,
        sources: Sequence[str],
        base: str | None = None,
        int8: bool = False,
        device: Device = "auto",
        index: str | None = None,
        coarse: str | None = None,
    ) -> None:
        if int8 and base is not None:
            raise PatchloomError(
                "Choose --int8 or --base: int8 needs separate weights per model, and --base shares them."
            )
        self.sources = list(sources)
        if coarse is not None and index is None:
            raise PatchloomError("--coarse names a label column of an index: give one with --index.")
        self.base, self.int8, self.device = base, int8, device
        self._index_path, self._coarse = index, coarse
        # Two reloads at once would hold three sets of models in memory.
        self._reloading = threading.Lock()
        self.models, self.index = self._load()

    def _load(self) -> tuple[dict[str, HostedModel], HostedIndex | None]:
        base = None if self.base is None else open_model(self.base, device=self.device)
        models: dict[str, HostedModel] = {}
        for name, source in named(self.sources).items():
            network = base if base is not None and source == self.base else _open(source, base, self.device)
            check_head(network, source)
            if network.config.in_chans != 3:
                raise PatchloomError(f"{source} expects {network.config.in_chans} channels, but photos have 3.")
            models[name] = HostedModel(name, network, shared=base is not None, int8=self.int8)
        path = self._index_path
        return models, None if path is None else HostedIndex(path, models, self._coarse)

    def reload(self) -> dict[str, HostedModel]:
        """Load all models again; if one fails, all old ones stay."""
        with self._reloading:
            models, index = self._load()
            # Each assignment is atomic in Python: a request sees all old models or all new ones. The index has its own
            # model, so that the two cannot be confused in between.
            self.models, self.index = models, index
            return self.models

    @property
    def default(self) -> HostedModel:
        """The model of requests that name none: the first."""
        return next(iter(self.models.values()))

    def find(self, name: str | None) -> HostedModel:
        """The model of this name, or the default; raises PatchloomError if there is none."""
        # Read once: a reload may exchange the dictionary between two lines.
        models = self.models
        if name is None:
            return self.default
        if name not in models:
            known = ", ".join(models)
            raise PatchloomError(f"There is no model with this name. Choose from: {known}.{did_you_mean(name, models)}")
        return models[name]


def _open(source: str, base: Network | None, device: Device) -> Network:
    """Load a model; a delta shares the tensors of the base, other sources are loaded in full."""
    is_delta = base is not None and Path(source).is_file() and "delta" in read(Path(source)).metadata
    return open_model(source, base=base if is_delta else None, device=device)


def named(sources: Sequence[str]) -> dict[str, str]:
    """A unique name for each source: from NAME=SOURCE, or else from the run folder, the file or the tag."""
    names: dict[str, str] = {}
    for source in sources:
        prefix, equals, rest = source.partition("=")
        # A path may contain "=": it is a name only if no such file exists.
        if equals and prefix and not Path(source).exists() and "/" not in prefix:
            name, source = prefix, rest
            if name in names:
                raise PatchloomError(f"Two models cannot have the same name {name!r}.")
        else:
            name = _unused(_name_of(source), names)
        names[name] = source
    return names


def _name_of(source: str) -> str:
    path = Path(source)
    if not path.exists():
        return source  # a published tag, or a mistake that loading will report
    path = path.resolve()
    generic = ("export", "model", "delta", "checkpoints", "best", "last")
    parts = [path.name if path.is_dir() else path.stem, *(parent.name for parent in path.parents)]
    return next((part for part in parts if part and part not in generic), source)


def _unused(name: str, taken: dict[str, str]) -> str:
    number, wanted = 2, name
    while wanted in taken:
        wanted, number = f"{name}-{number}", number + 1
    return wanted
