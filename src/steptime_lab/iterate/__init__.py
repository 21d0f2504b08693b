"""Iterative algorithms: a loop of kernels over named arrays, predicted from what each level of the memory serves."""
