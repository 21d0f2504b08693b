"""Which activations to keep, to compute again, or to move to the host: solvers on chains and small graphs."""
