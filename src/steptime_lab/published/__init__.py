"""The transformer performance model of arXiv 2410.00273 as its authors' code computes it, defects included."""
