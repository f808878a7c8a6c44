"""The JSON responses of the service, from which its OpenAPI description is generated."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class Prediction(BaseModel):
    """One class and its probability."""

    model_config = ConfigDict(populate_by_name=True)

    name: str = Field(alias="class", description="name of the class, or its number if it has none")
    probability: float


class Timings(BaseModel):
    """Milliseconds that one request spent in the server; the total includes the upload."""

    upload_ms: float
    decode_ms: float
    queue_ms: float
    model_ms: float
    total_ms: float
    batch: int = Field(description="number of images in the batch")


class VersionResponse(BaseModel):
    """The code and the weights that produced a response."""

    version: str = Field(description="version of patchloom")
    model: str
    digest: str = Field(description="SHA-256 of the model's weights")


class PredictResult(BaseModel):
    predictions: list[Prediction]
    timings: Timings


class PredictResponse(VersionResponse, PredictResult):
    """The response for one file."""


class ErrorResponse(BaseModel):
    error: str = Field(description="the reason, in one sentence")


class ResultsResponse(VersionResponse):
    """The response for several files: one result per file, in the same order."""

    results: list[PredictResult | ErrorResponse]


class Picture(BaseModel):
    """A map with values in [0, 1] as an 8-bit grey PNG."""

    name: str
    png: str = Field(description="base64")


class Layer(BaseModel):
    """The attention maps of one layer, one per head."""

    name: str
    heads: list[str] = Field(description="base64 grey PNGs on the patch grid")


class Spread(BaseModel):
    mean: float | None = None
    std: float | None = None


class RandomAreas(BaseModel):
    deletion: Spread
    insertion: Spread


class Faithfulness(BaseModel):
    """Areas under the deletion curve (lower is better) and the insertion curve (higher is better), compared with random
    maps."""

    deletion: float | None
    insertion: float | None
    random: RandomAreas
    verdict: str


class ExplainResponse(VersionResponse):
    predictions: list[Prediction]
    target: str = Field(description="the class that the maps explain")
    image: str = Field(description="the input of the network as a base64 PNG")
    maps: list[Picture]
    layers: list[Layer]
    faithfulness: dict[str, Faithfulness] = Field(description="scores by map name")
    timings: Timings


class ModelResponse(BaseModel):
    name: str
    digest: str = Field(description="SHA-256 of its weights")
    architecture: str
    family: str
    parameters: int
    image_size: tuple[int, int]
    classes: list[str]
    maps: list[str] = Field(description="names of the available maps")
    per_class: bool = Field(description="whether it has one attention map per class")


class IndexDescription(BaseModel):
    """The index that /api/search searches."""

    model: str = Field(description="the model that it was built with")
    images: int
    kind: str = Field(description="exact, hnsw or ivf")
    columns: list[str] = Field(description="label columns, the one with most classes first")
    coarse: str | None = Field(description="the column of the coarse condition")


class ModelsResponse(BaseModel):
    version: str = Field(description="version of patchloom")
    models: list[ModelResponse]
    index: IndexDescription | None = Field(description="null without --index")


class Neighbour(BaseModel):
    """An image of the index."""

    key: str
    score: float = Field(description="the cosine; with the coarse condition plus the log-odds of its coarse class")
    labels: dict[str, str | None] = Field(description="its class by label column")


class SearchResponse(VersionResponse):
    """The images of the index that are most similar to the query, best first."""

    results: list[Neighbour]
    knn: dict[str, dict[str, float]] = Field(
        description="for each label column the probabilities of the classes, by the nearest neighbours"
    )
    timings: Timings


class SampleResponse(BaseModel):
    name: str
    label: str
    pixelated: bool = False


class SamplesResponse(BaseModel):
    samples: list[SampleResponse]


class StateResponse(BaseModel):
    status: str
