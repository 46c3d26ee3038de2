"""Kernels in Triton. `launching` runs them: compiled on a GPU, by NumPy on a CPU."""
