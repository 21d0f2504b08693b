"""Commands on real models."""
