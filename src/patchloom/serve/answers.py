"""The JSON that the service answers, as its OpenAPI description tells it."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class Prediction(BaseModel):
    model_config = ConfigDict(populate_by_name=True)

    name: str = Field(alias="class", description="the name of the class, or its number where it has none")
    probability: float


class Timings(BaseModel):
    """Milliseconds of one request in the server, upload included in the total."""

    upload_ms: float
    decode_ms: float
    queue_ms: float
    model_ms: float
    total_ms: float
    batch: int = Field(description="images that the network saw together with this one")


class VersionAnswer(BaseModel):
    version: str = Field(description="of patchloom")
    model: str
    digest: str = Field(description="SHA-256 of the model's weights")


class PredictResult(BaseModel):
    predictions: list[Prediction]
    timings: Timings


class PredictAnswer(VersionAnswer, PredictResult):
    """Of one file."""


class ErrorAnswer(BaseModel):
    error: str = Field(description="what was wrong, in a sentence")


class ResultsAnswer(VersionAnswer):
    """Of several files: one result per file, in their order."""

    results: list[PredictResult | ErrorAnswer]


class Picture(BaseModel):
    """A map in [0, 1] as a grey PNG of 8 bits."""

    name: str
    png: str = Field(description="base64")


class Layer(BaseModel):
    """One attention map a head."""

    name: str
    heads: list[str] = Field(description="grey PNGs of the patch grid, base64")


class Spread(BaseModel):
    mean: float | None = None
    std: float | None = None


class RandomAreas(BaseModel):
    deletion: Spread
    insertion: Spread


class Faithfulness(BaseModel):
    """Areas under the deletion curve (low is good) and the insertion curve (high is good) beside random maps."""

    deletion: float | None
    insertion: float | None
    random: RandomAreas
    verdict: str


class ExplainAnswer(VersionAnswer):
    predictions: list[Prediction]
    target: str = Field(description="the class that the maps explain")
    image: str = Field(description="what the network saw, a PNG, base64")
    maps: list[Picture]
    layers: list[Layer]
    faithfulness: dict[str, Faithfulness] = Field(description="by the name of the map")
    timings: Timings


class ModelAnswer(BaseModel):
    name: str
    digest: str = Field(description="SHA-256 of its weights")
    architecture: str
    family: str
    parameters: int
    image_size: tuple[int, int]
    classes: list[str]
    maps: list[str] = Field(description="the maps that it can be asked for")
    per_class: bool = Field(description="whether it has one attention map a class")


class ModelsAnswer(BaseModel):
    version: str = Field(description="of patchloom")
    models: list[ModelAnswer]


class SampleAnswer(BaseModel):
    name: str
    label: str
    pixelated: bool = False


class SamplesAnswer(BaseModel):
    samples: list[SampleAnswer]


class StateAnswer(BaseModel):
    status: str
