"""The models that are served: loaded, named, and exchanged as a whole without a request noticing."""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from torch import Tensor, nn

from patchloom import __version__
from patchloom.errors import PatchloomError, did_you_mean
from patchloom.inference.models import open_model
from patchloom.models.fused import fuse
from patchloom.models.network import Network
from patchloom.weights.files import digest, read


@dataclass(eq=False)
class HostedModel:
    """A network under the name by which requests ask for it; `answering` is the fused copy that predicts, `digest`
    the SHA-256 of its weights, whatever file they came from."""

    name: str
    network: Network
    shared: bool = False  # its tensors are those of a base that other models have as well
    int8: bool = False

    def __post_init__(self) -> None:
        # a fused copy has weights of its own, which would undo the sharing
        self.answering = self.network if self.shared else fuse(self.network, int8=self.int8)
        self.digest = digest("", self.network.state_dict())

    @property
    def identity(self) -> dict[str, str]:
        """What tells this answer from that of other code or other weights."""
        return {"version": __version__, "model": self.name, "digest": self.digest}

    @cached_property
    def twin(self) -> Network:
        """The same weights in modules of their own: explanations hook into modules, predictions go on beside them.

        It takes images that are cut already, and cuts nothing from them.
        """
        made = twin(self.network)
        made.preprocessing = replace(self.network.preprocessing, crop_ratio=1.0)
        return made


def twin(network: Network) -> Network:
    """A copy of the modules whose tensors are those of `network`, not copied."""
    shared: dict[int, Tensor] = {}
    for parameter in network.parameters():
        shared[id(parameter)] = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
    for buffer in network.buffers():
        shared[id(buffer)] = buffer
    return copy.deepcopy(network, shared)  # what deepcopy finds in its memo it takes as it is


class Hosting:
    """All models that are served. A reload loads them anew beside the old ones, then takes their place at once;
    requests that have a model keep it until they are answered."""

    def __init__(self, sources: Sequence[str], base: str | None = None, int8: bool = False) -> None:
        if int8 and base is not None:
            raise PatchloomError("--int8 needs weights of its own for each model, --base shares them: choose one.")
        self.sources = list(sources)
        self.base, self.int8 = base, int8
        self._reloading = threading.Lock()
        self.models = self._load()

    def _load(self) -> dict[str, HostedModel]:
        base = None if self.base is None else open_model(self.base)
        models: dict[str, HostedModel] = {}
        for name, source in named(self.sources).items():
            network = base if base is not None and source == self.base else _open(source, base)
            if network.config.in_chans != 3:
                raise PatchloomError(f"{source} takes {network.config.in_chans} channels; a photo has 3.")
            models[name] = HostedModel(name, network, shared=base is not None, int8=self.int8)
        return models

    def reload(self) -> dict[str, HostedModel]:
        """Load every model anew; if one fails, all old ones stay."""
        with self._reloading:
            self.models = self._load()
            return self.models

    @property
    def first(self) -> HostedModel:
        return next(iter(self.models.values()))

    def find(self, name: str | None) -> HostedModel:
        models = self.models
        if name is None:
            return self.first
        if name not in models:
            known = ", ".join(models)
            raise PatchloomError(f"There is no model of that name here; there is {known}.{did_you_mean(name, models)}")
        return models[name]


def _open(source: str, base: Network | None) -> Network:
    """A delta shares the tensors of the base; anything else stands for itself."""
    is_delta = base is not None and Path(source).is_file() and "delta" in read(Path(source)).metadata
    return open_model(source, base=base if is_delta else None)


def named(sources: Sequence[str]) -> dict[str, str]:
    """A name for each source: as given in NAME=SOURCE, else after the run's folder, the file or the tag."""
    names: dict[str, str] = {}
    for source in sources:
        given, equals, rest = source.partition("=")
        if equals and given and not Path(source).exists() and "/" not in given:
            name, source = given, rest
            if name in names:
                raise PatchloomError(f"Two models cannot both be called {name}.")
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
