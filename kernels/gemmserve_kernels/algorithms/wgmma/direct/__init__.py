"""float16 operands on Hopper's tensor cores as they are: no pre-pass, no copies."""
