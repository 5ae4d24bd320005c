"""The adapter on vLLM's KV offloading framework: pages travel between the engine and the gateway on our own
path."""
