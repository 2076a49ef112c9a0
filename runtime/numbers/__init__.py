"""Numbers as tensors hold them: element types, how scales lie beside them, and which go together in a product."""
