"""Memory layouts (orders of strides) of the values of a graph, chosen exactly."""
