"""The kernels of attention on a GPU, and the proof of each."""
