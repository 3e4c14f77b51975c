"""Grids: functions that return a complete ablation. `python -m train.ablate NAME` looks them up here."""

# Name -> MODULE:FUNCTION, imported on demand.
RECIPES = {
    "tiny": "laneformer.recipes.ablations.tiny:tiny",
    "tiny_moe": "laneformer.recipes.ablations.tiny:tiny_moe",
    "hybrid": "laneformer.recipes.ablations.tiny:hybrid",
    "30m": "laneformer.recipes.ablations.small:web_30m",
    "120m": "laneformer.recipes.ablations.small:web_120m",
    "350m": "laneformer.recipes.ablations.ladder:ladder_350m",
    "1p2b": "laneformer.recipes.ablations.ladder:ladder_1p2b",
}
