"""Adapters for vLLM. Nothing outside this package imports vLLM; only `_compat` looks at its version."""
