"""Commands on rewritten graphs."""
