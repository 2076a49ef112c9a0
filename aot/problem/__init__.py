"""Manifests: which problems to build for, and how they follow from a model."""
