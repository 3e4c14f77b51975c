"""Grids: functions that return a complete ablation. `python -m train.ablate NAME` looks them up here."""

# Name -> MODULE:FUNCTION, imported on demand.
RECIPES = {
    "tiny": "configs.ablations.tiny:tiny",
    "tiny_moe": "configs.ablations.tiny:tiny_moe",
    "hybrid": "configs.ablations.tiny:hybrid",
    "30m": "configs.ablations.small:web_30m",
    "120m": "configs.ablations.small:web_120m",
    "350m": "configs.ablations.ladder:ladder_350m",
    "1p2b": "configs.ablations.ladder:ladder_1p2b",
}
