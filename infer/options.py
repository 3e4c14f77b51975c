"""Options that several commands take, with their one help text."""

from typing import Annotated, Literal

import tyro

_DTYPES = {"metavar": "{float32,bfloat16,float16}"}
Dtype = Annotated[Literal["float32", "bfloat16", "float16"] | None, tyro.conf.arg(**_DTYPES)]
Compute = Annotated[
    Literal["float32", "bfloat16", "float16"] | None,
    tyro.conf.arg(help="Dtype of what is multiplied, sums are float32; without it the weights' dtype, on a CPU float32.", **_DTYPES),
]
