"""OLMo-2, which is refused: its norms and its q/k norm lie where the model has none yet (arXiv 2501.00656)."""

from laneformer.config import ModelConfig
from laneformer.errors import ConfigError
from laneformer.hf.family import Family
from laneformer.hf.fields import Fields


def config_from(fields: Fields, num_lanes: int | None) -> ModelConfig:
    raise ConfigError(
        "model_type = 'olmo2': norms after the modules and a q/k norm over the whole projection are not supported yet;"
        " supported are norms before the modules and q/k norms per head"
    )


FAMILY = Family(name="OLMo-2", config_from=config_from)
