"""Options that several commands take, with their one help text."""

from typing import Annotated, Literal

import tyro

Distributed = Annotated[
    bool,
    tyro.conf.arg(
        help=(
            "Join the other processes of the job, one for each GPU: all run the same command, --devices counts the GPUs"
            " of all, and the first process speaks for them."
        )
    ),
]
_DTYPES = {"metavar": "{float32,bfloat16,float16}"}
Dtype = Annotated[Literal["float32", "bfloat16", "float16"] | None, tyro.conf.arg(**_DTYPES)]
Compute = Annotated[
    Literal["float32", "bfloat16", "float16"] | None,
    tyro.conf.arg(
        help="Dtype of what is multiplied, sums are float32; without it the weights' dtype, on a CPU float32.",
        **_DTYPES,
    ),
]
