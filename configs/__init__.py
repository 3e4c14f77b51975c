"""Recipes: functions that return a complete TrainConfig. `python -m train NAME` looks them up here."""

# Name -> MODULE:FUNCTION, imported on demand, so that infer can read configs.models without importing train.
RECIPES = {
    "stdlib": "laneformer.recipes.stdlib:stdlib",
    "tiny": "laneformer.recipes.tiny:tiny",
    "stdlib_int4": "laneformer.recipes.stdlib:stdlib_int4",
    "delta_tiny": "laneformer.recipes.delta:delta_tiny",
    "laneformer_120m": "laneformer.recipes.small:laneformer_120m",
    "laneformer_350m": "laneformer.recipes.small:laneformer_350m",
    "laneformer_2b": "laneformer.recipes.laneformer_2b:laneformer_2b",
    "laneformer_8b": "laneformer.recipes.large:laneformer_8b",
    "laneformer_70b": "laneformer.recipes.large:laneformer_70b",
    "moe_tiny": "laneformer.recipes.moe:moe_tiny",
    "latent_tiny": "laneformer.recipes.moe:latent_tiny",
    "v4_tiny": "laneformer.recipes.moe:v4_tiny",
    "moe_1b_a200m": "laneformer.recipes.moe:moe_1b_a200m",
}
