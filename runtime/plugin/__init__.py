"""What plugins of servers share: which of a model's layers an archive computes, and how that begins and is told.

Knows models by the attributes of their layers, and no server. Importing this imports no torch.
"""
