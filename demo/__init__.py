"""The main job, watched: an engine dies, comes back, and its prompts are restored from the gateway."""
