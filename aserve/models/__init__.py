"""What a model is: its spec, its weights on disk, its layers from shared blocks. No ranks, no I/O
but reading checkpoints; `registry.load_model` is the way in."""
