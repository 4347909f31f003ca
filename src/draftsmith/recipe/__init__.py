"""The typed settings of every stage: one definition feeds CLI flags, YAML, docs and manifests."""

from draftsmith.recipe.data import (
    CaptureSettings,
    DatasetSettings,
    GateLimits,
    ImportSettings,
    InspectSettings,
    QuestionSettings,
)
from draftsmith.recipe.draft import (
    ExportSettings,
    ExtractSettings,
    MeasureSettings,
    ReportSettings,
    TrainSettings,
    VocabSettings,
)
from draftsmith.recipe.loading import Recipe, arm_recipe, load_recipe, parse_recipe
from draftsmith.recipe.serving import (
    DiagnoseSettings,
    PayoffSettings,
    ServedSettings,
    ServeSettings,
    ServingSettings,
)
from draftsmith.recipe.values import (
    DatasetFormat,
    Dtype,
    Engine,
    Family,
    Settings,
    problems_of,
    seconds_of,
    validated,
    without_credentials,
)

__all__ = [
    "CaptureSettings",
    "DatasetFormat",
    "DatasetSettings",
    "DiagnoseSettings",
    "Dtype",
    "Engine",
    "ExportSettings",
    "ExtractSettings",
    "Family",
    "GateLimits",
    "ImportSettings",
    "InspectSettings",
    "MeasureSettings",
    "PayoffSettings",
    "QuestionSettings",
    "Recipe",
    "ReportSettings",
    "ServeSettings",
    "ServedSettings",
    "ServingSettings",
    "Settings",
    "TrainSettings",
    "VocabSettings",
    "arm_recipe",
    "load_recipe",
    "parse_recipe",
    "problems_of",
    "seconds_of",
    "validated",
    "without_credentials",
]
