"""What the config.json of a Hugging Face model says of its linear layers and experts.

`config` reads fields; `layers` has what they give, as data; `attention` and `mixtures` know kinds of layers; `families`
says which model type is made of which, and `read_model` puts a model together. Knows nothing of kernels.
"""
