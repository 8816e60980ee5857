"""Extremes of products in double precision, looked for in float16: `gemm_reduce` without most of the product."""
