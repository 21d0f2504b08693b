"""Shardings of the operators of any captured model over a mesh, what they cost, and the best of them with a proof."""
