"""Adapters: others' tensors to `verify_from_logits` and back."""
