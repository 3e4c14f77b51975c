"""Bytes of one weight or value in each precision, scales included."""

PRECISIONS = {
    "float32": 4.0,
    "bfloat16": 2.0,
    "float16": 2.0,
    "fp8": 1.0,
    "int8": 1.0,
    "int4": 4.5 / 8,  # groups of 32 with a 16-bit scale
    "mxfp4": 4.25 / 8,  # groups of 32 with an 8-bit scale
}
