"""Numbers as tensors hold them."""
