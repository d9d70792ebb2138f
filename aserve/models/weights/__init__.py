"""Checkpoints on disk, safetensors or GGUF, read one tensor at a time under Hugging Face names."""
