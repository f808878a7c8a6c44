"""A training procedure as one frozen, typed value: what a paper's table says, and where it says so.

`Recipe` has what every kind of learning has: duration, optimizer, schedule, precision. The fields of a task are in
`options`, a dataclass of its own. To users both are one flat list of `key=value` settings.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, get_type_hints

from patchloom.data.parts import MOST_WORKERS
from patchloom.errors import PatchloomError, did_you_mean
from patchloom.models.roles import ROLES
from patchloom.recipes.intervals import parse_interval
from patchloom.recipes.options import Options, check_fields
from patchloom.text import count

Sources = Mapping[str, str]
_NOT_SETTINGS = ("name", "summary", "sources", "options")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Every field is a `key=value` of a training command, and so is every field of `options`, which is also read as an
    attribute of the recipe: `recipe.mixup` is `recipe.options.mixup`. `sources` says where each value comes from."""

    name: str
    summary: str = ""  # one line for people

    # duration
    epochs: int = field(default=300, metadata={"most": 1_000_000})
    steps: int | None = field(default=None, metadata={"most": 10**12})  # in place of epochs: the number of updates
    batch_size: int = 1024  # global: over all processes and accumulated steps
    accumulate: int = 1  # steps whose gradients are added up to one update; the batch is divided by it
    seed: int = field(default=0, metadata={"least": 0})

    # optimizer
    optimizer: Literal["adamw", "adam", "lamb", "sgd", "adagrad"] = "adamw"
    lr: float = 1e-3  # effective, at `batch_size`
    head_lr: float | None = None  # the peak rate of the heads; None: lr
    lr_scaling: Literal["linear", "none"] = "none"  # what becomes of lr when only batch_size is changed
    layer_decay: float = 1.0  # a block's rate is this times that of the block after it; 1: all alike
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    momentum: float = 0.9  # of SGD
    nesterov: bool = False
    weight_decay: float = 0.05
    weight_decay_end: float | None = None  # weight decay goes to this along a cosine; None: it stays
    no_decay: tuple[str, ...] = ("norm", "scale", "position", "token")  # roles without decay, beside every vector
    clip_grad: float = 0.0  # largest global norm of the gradient; 0: none. LAMB clips by itself at this norm

    # learning rate over time
    schedule: Literal["cosine", "step", "constant", "inverse_sqrt"] = "cosine"
    schedule_by: Literal["step", "epoch"] = "step"
    schedule_published: bool = False  # the published script's off-by-one: epoch e at the rate of epoch e - 1
    warmup_epochs: float = 5.0
    warmup_steps: int | None = field(default=None, metadata={"least": 0})  # in place of warmup_epochs: in updates
    warmup_lr: float = 1e-6
    min_lr: float = 1e-5
    decay_epochs: tuple[int, ...] = ()  # of schedule "step": divide by 10 after these

    # averaging and evaluation
    ema: float = 0.0  # decay of the averaged weights; 0: none
    ema_warmup: bool = True  # a decay of (1 + t) / (10 + t) while that is smaller
    eval_every: str = "1 epoch"  # "5 epochs", or "500" steps

    # the machine
    precision: Literal["float32", "bf16", "fp16"] = "float32"
    workers: int = field(default=2, metadata={"least": 0, "most": MOST_WORKERS})
    checkpoint_every: str = "1 epoch"  # "30s", "500" steps or "1 epoch"
    gradient_checkpointing: bool = False
    compile: bool = False
    shard: Literal["none", "full"] = "none"
    sync_batchnorm: bool = False  # BatchNorm over the batches of all processes

    options: Options = field(default_factory=Options)  # of the task
    sources: Sources = field(default_factory=dict)  # field -> where its value comes from

    FRACTIONS: ClassVar[tuple[str, ...]] = ("momentum", "layer_decay")
    NOT_NEGATIVE: ClassVar[tuple[str, ...]] = (
        "lr", "head_lr", "min_lr", "warmup_lr", "warmup_epochs", "weight_decay", "weight_decay_end", "clip_grad", "eps",
    )  # fmt: skip

    @classmethod
    def of(cls, options: type[Options], **values: Any) -> Recipe:
        """A recipe with options of this kind, from one flat set of values."""
        own, others = _sorted(options, values)
        return cls(**own, options=options(**others))

    def __post_init__(self) -> None:
        check_fields(self, self.name, skip=("sources", "options"))
        check_fields(self.options, self.name)
        self._check()
        self.options.check(self.name)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "options":  # copying asks for these before there are options
            raise AttributeError(name)
        return getattr(self.options, name)

    def _check(self) -> None:
        parse_interval("checkpoint_every", self.checkpoint_every)
        parse_interval("eval_every", self.eval_every)
        if not 0 <= self.ema < 1:
            raise PatchloomError(f"ema of {self.name} is a decay of at least 0 and below 1, not {self.ema}.")
        if len(self.betas) != 2 or not all(_is_decay(beta) for beta in self.betas):
            raise PatchloomError(
                f"betas of {self.name} must be two numbers of at least 0 and below 1, not {self.betas}."
            )
        if unknown := set(self.no_decay) - set(ROLES):
            raise PatchloomError(
                f"no_decay of {self.name} must be roles of parameters ({', '.join(ROLES)}), not {unknown}."
            )
        if self.head_lr is not None and self.lr == 0:
            raise PatchloomError(
                f"lr=0 with a head_lr in {self.name}: to train only the head, use `finetune --tune head`."
            )
        if not self.layer_decay > 0:
            raise PatchloomError(f"layer_decay of {self.name} is above 0 and at most 1, not {self.layer_decay}.")
        if self.nesterov and not self.momentum:
            raise PatchloomError(f"nesterov of {self.name} needs a momentum.")
        if self.seed >= 2**32:
            raise PatchloomError(f"seed of {self.name} is below 2^32, not {self.seed}.")

    @property
    def batch_text(self) -> str:
        """The size of a batch in words: "1024", or "25000 tokens" for a task that counts something else."""
        return self.options.batch_text or str(self.batch_size)

    @property
    def duration(self) -> str:
        """The length of a run in words: "300 epochs", or "5000 steps"."""
        return count(self.epochs, "epoch") if self.steps is None else count(self.steps, "step")

    def replace(self, **changes: Any) -> Recipe:
        """A copy with other values of its own fields or of its options'; an unknown one is refused with the nearest
        known."""
        own, others = _sorted(type(self.options), changes)
        if others:
            own["options"] = dataclasses.replace(self.options, **others)
        return dataclasses.replace(self, **own)

    def to_json(self) -> dict[str, Any]:
        """All fields in one flat object, as recipe.yaml has them."""
        own = {item.name: getattr(self, item.name) for item in dataclasses.fields(self) if item.name != "options"}
        return {**own, **dataclasses.asdict(self.options), "sources": dict(self.sources)}


def setting_types(options: type[Options]) -> dict[str, Any]:
    """The type of every `key=value` setting of a recipe with these options: its own fields, then the options'."""
    owners = (Recipe, options)
    hints = {owner: get_type_hints(owner) for owner in owners}
    return {
        item.name: hints[owner][item.name]
        for owner in owners
        for item in dataclasses.fields(owner)
        if item.name not in _NOT_SETTINGS
    }


def _sorted(options: type[Options], values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Values of a recipe's own fields, and of its options'."""
    own = {item.name for item in dataclasses.fields(Recipe)} - {"options"}
    others = {item.name for item in dataclasses.fields(options)}
    for name in values:
        if name not in own | others:
            raise PatchloomError(f"A recipe has no field {name!r}.{did_you_mean(name, (own | others) - {'sources'})}")
    return (
        {name: value for name, value in values.items() if name in own},
        {name: value for name, value in values.items() if name in others},
    )


def _is_decay(value: object) -> bool:
    return isinstance(value, int | float) and 0 <= value < 1
