"""A rank's hands: its KV pages, the tensors of a step, and the model run over them. No policy."""
