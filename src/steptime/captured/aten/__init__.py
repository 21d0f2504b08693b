"""ATen operators as constructors of graph nodes: they name the arguments and work out the types of the outputs.

What reads a model (ONNX) and what derives one (gradients, rewrites) make nodes through these functions, so that the
vocabulary of a captured graph is the only one.
"""
