"""The model that is trained: loading, attention within samples, the proof of packing, router replay."""
