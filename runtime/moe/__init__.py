"""What a mixture of experts does around its grouped GEMMs, as operations: `permute` puts rows of tokens in the order
of experts, and `combine` adds up what the experts of each token made."""
