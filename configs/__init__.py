"""Recipes: functions that return a complete TrainConfig. `python -m train NAME` looks them up here."""

# Name -> MODULE:FUNCTION, imported on demand, so that infer can read configs.models without importing train.
RECIPES = {
    "stdlib": "configs.stdlib:stdlib",
    "tiny": "configs.tiny:tiny",
    "stdlib_int4": "configs.stdlib:stdlib_int4",
    "delta_tiny": "configs.delta:delta_tiny",
    "laneformer_120m": "configs.small:laneformer_120m",
    "laneformer_350m": "configs.small:laneformer_350m",
    "laneformer_2b": "configs.laneformer_2b:laneformer_2b",
    "laneformer_8b": "configs.large:laneformer_8b",
    "laneformer_70b": "configs.large:laneformer_70b",
    "moe_tiny": "configs.moe:moe_tiny",
    "latent_tiny": "configs.moe:latent_tiny",
    "v4_tiny": "configs.moe:v4_tiny",
    "moe_1b_a200m": "configs.moe:moe_1b_a200m",
}
