"""Handlers with `via="in_process"`: run beside the producer once its transaction has committed."""
