"""Iterative algorithms as loops of kernels over named arrays, timed by the traffic from each level of memory."""
