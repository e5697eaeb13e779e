"""Adapters beside the layers of a model: their products, and the memory of their factors."""
